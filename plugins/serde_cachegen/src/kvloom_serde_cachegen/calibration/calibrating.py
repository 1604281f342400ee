"""A model and its text in, a profile out; and what the codec does to that model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvloom import KVSpec
from kvloom_connector_transformers.identity import named
from kvloom_serde_cachegen import measuring
from kvloom_serde_cachegen.calibration.capture import run, seen_by
from kvloom_serde_cachegen.calibration.rope import NO_ROPE, UnknownRopeError, rope_of
from kvloom_serde_cachegen.calibration.statistics import Statistics
from kvloom_serde_cachegen.profile import Profile, Verdict, identity_of, rotations_of
from kvloom_serde_cachegen.serializer import CacheGenSerializer

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a codec may do to a model, at most."""

    kl: float = 1e-3
    """Nats a token."""
    dnll: float = 0.01
    """Nats a token."""
    top1: float = 0.98
    """At least."""

    def allow(self, figures: measuring.Figures) -> bool:
        return figures.kl <= self.kl and figures.dnll <= self.dnll and figures.top1 >= self.top1


def calibrated(
    model: PreTrainedModel, windows: torch.Tensor, *, name: str, klt: bool, step: Step = lambda: None
) -> tuple[Profile, KVSpec]:
    """The profile of `model`, without verdicts, and the spec of its KV.

    windows: token ids `[windows, tokens]`. klt: with what that mode needs. step: called after each window. ValueError,
    with the remedy, for a model that cannot be calibrated.
    """
    try:
        rope = rope_of(model)
    except UnknownRopeError as error:
        if klt:
            raise ValueError(
                f"{error}: the mode klt cannot undo that; calibrate the mode step alone, --no-klt"
            ) from error
        rope = NO_ROPE
    statistics = Statistics(rope, klt=klt)
    with seen_by(statistics.see, model):
        for window in windows:
            run(model, window)
            step()
    shape, num_layers = statistics.shape, statistics.num_layers
    kind, revision = named(model)
    dtype = str(shape.dtype).removeprefix("torch.")
    spec = KVSpec(kind, num_layers, shape.kv_heads, shape.head_size, dtype, revision=revision)
    profile = Profile(
        model=name,
        identity=identity_of(spec),
        planes=2,
        layers=num_layers,
        hidden=shape.hidden,
        head_size=shape.head_size,
        calibrated_tokens=statistics.tokens,
        weights=statistics.weights(),
        rotary_size=rope.size,
        interleaved=rope.interleaved,
        rotations=rotations_of(rope.frequencies),
        transform=statistics.transform() if klt else None,
    )
    return profile, spec


def serializer(codec: str, profile: Path, spec: KVSpec) -> CacheGenSerializer:
    """What encodes as `codec`, `step/0.75`, says, with the profile in a file, judged or not."""
    mode, _, step = codec.partition("/")
    settings = {"mode": mode, "quality": float(step), "profile": profile, "codec_gate": False}
    return CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings), spec)


def saved_per_token(model: PreTrainedModel, tokens: torch.Tensor, profile: Path, spec: KVSpec) -> float:
    """How many bytes less the mode klt takes than the mode step, both as they are by default, on one chunk."""
    kv = measuring.context_kv(model, tokens[: measuring.CHUNK_TOKENS].to(model.device), spec.torch_dtype).flatten(3)
    step, klt = (measuring.through(serializer(codec, profile, spec))(kv, 0)[1] for codec in ("step/0.5", "klt/0.5"))
    return (step - klt) / kv.shape[2]


def judged(
    model: PreTrainedModel, windows: torch.Tensor, codecs: Mapping[str, measuring.Codec], limits: Limits, *,
    dtype: torch.dtype, step: Step = lambda: None,
) -> dict[str, Verdict]:  # fmt: skip
    """A verdict on each of `codecs`, from windows of text `[windows, tokens]`, at least two.

    Two thirds of each are read from KV that went through the codec, the rest is predicted. ValueError for a model whose
    KV cannot be replaced.
    """
    context = windows.shape[1] * 2 // 3
    measured = measuring.measure(
        model, windows, codecs, context=context, dtype=dtype, progress=lambda done, of: step()
    )  # fmt: skip
    return {name: _verdict(quality, limits) for name, quality in measured.items()}


def _verdict(quality: measuring.Quality, limits: Limits) -> Verdict:
    mean = quality.mean
    return Verdict(
        mean.dnll, mean.kl, quality.error.kl, mean.top1, mean.bits_per_value, quality.tokens, limits.allow(mean),
        {"kl": limits.kl, "dnll": limits.dnll, "top1": limits.top1},
    )  # fmt: skip


def loaded(name: str, device: str) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer, from a path or a hub. Raises OSError or ValueError, as transformers does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    return model, AutoTokenizer.from_pretrained(name)
