"""A model and its text in, a profile out; and what the codec does to that model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvloom import KVSpec
from kvloom_connector_transformers import spec_of
from kvloom_serde_cachegen import measuring
from kvloom_serde_cachegen.calibration.rope import NO_ROPE, UnknownRopeError, rope_of
from kvloom_serde_cachegen.calibration.statistics import Statistics
from kvloom_serde_cachegen.profile import Profile, Verdict, rotations_of
from kvloom_serde_cachegen.serializer import CacheGenSerializer
from kvloom_serde_cachegen.settings import CodecConfig

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum harm that a codec may do to a model."""

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
    spec = spec_of(model)
    if any(DynamicCache(config=model.config).is_sliding):
        raise ValueError(f"{type(model).__name__} has layers with a window, whose KV is not calibrated")
    if spec.kv_planes != 2:
        raise ValueError(f"{type(model).__name__} has K and V of different sizes (MLA), which are not calibrated")
    try:
        rope = rope_of(model)
    except UnknownRopeError as error:
        if klt:
            raise ValueError(f"{error}: klt cannot undo that; calibrate for the mode step alone, --no-klt") from error
        rope = NO_ROPE
    statistics = Statistics(rope, klt=klt)
    chance = torch.Generator().manual_seed(0)
    for window in windows:
        with torch.no_grad():
            kv = measuring.context_kv(model, window.to(model.device), torch.float32)
        statistics.see(kv)
        statistics.see_gradients(_gradients(model, window, kv, chance))
        step()
    profile = Profile(
        model=name,
        identity=spec.identity,
        planes=spec.kv_planes,
        layers=spec.num_layers,
        hidden=spec.hidden_dim,
        head_size=spec.head_size,
        calibrated_tokens=statistics.tokens,
        weights=statistics.weights(),
        rotary_size=rope.size,
        interleaved=rope.interleaved,
        rotations=rotations_of(rope.frequencies),
        transform=statistics.transform() if klt else None,
    )
    return profile, spec


def _gradients(model: PreTrainedModel, window: torch.Tensor, kv: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Gradients of the logarithm of the model's continuation by the KV of the first two thirds of a window.

    The continuation is drawn from the model's own predictions. The squares of these gradients are, on average, the
    speed at which the predictions move away.
    """
    context = _context(len(window))
    held = kv[:, :, :context].clone().requires_grad_()
    predictions = measuring.predictions(model, window[context:].to(model.device), held)
    drawn = torch.multinomial(predictions.detach().exp().cpu(), 1, generator=chance)
    (gradients,) = torch.autograd.grad(predictions.gather(1, drawn.to(model.device)).sum(), held)
    return gradients


def _context(window_tokens: int) -> int:
    return window_tokens * 2 // 3


def serializer(codec: str, profile: Path, spec: KVSpec) -> CacheGenSerializer:
    """A serializer for `codec`, such as `step/0.75`, with the profile in a file, judged or not."""
    mode, _, step = codec.partition("/")
    settings = {"mode": mode, "quality": float(step), "profile": profile, "codec_gate": False}
    return CacheGenSerializer(CodecConfig.model_validate(settings), spec)


def saved_per_token(model: PreTrainedModel, tokens: torch.Tensor, profile: Path, spec: KVSpec) -> float:
    """The number of bytes a token that the mode klt saves over step, both with their defaults, on one chunk."""
    kv = measuring.context_kv(model, tokens[: measuring.CHUNK_TOKENS].to(model.device), spec.torch_dtype).flatten(3)
    step, klt = (measuring.through(serializer(codec, profile, spec))(kv, 0)[1] for codec in ("step/0.375", "klt/0.5"))
    return (step - klt) / kv.shape[2]


def judged(
    model: PreTrainedModel, windows: torch.Tensor, codecs: Mapping[str, measuring.Codec], limits: Limits, *,
    dtype: torch.dtype, step: Step = lambda: None,
) -> dict[str, Verdict]:  # fmt: skip
    """A verdict on each of `codecs`, from windows of text `[windows, tokens]`, at least two.

    Two thirds of each are read from KV that went through the codec, the rest is predicted. ValueError for a model whose
    KV cannot be replaced.
    """
    measured = measuring.measure(
        model, windows, codecs, context=_context(windows.shape[1]), dtype=dtype, progress=lambda done, of: step()
    )  # fmt: skip
    return {name: _verdict(quality, limits) for name, quality in measured.items()}


def _verdict(quality: measuring.Quality, limits: Limits) -> Verdict:
    mean = quality.mean
    return Verdict(
        mean.dnll, mean.kl, quality.error.kl, mean.top1, mean.bits_per_value, quality.tokens, limits.allow(mean),
        {"kl": limits.kl, "dnll": limits.dnll, "top1": limits.top1},
    )  # fmt: skip


def loaded(name: str, device: str) -> tuple[Callable[[], PreTrainedModel], Any, Any]:
    """A function that loads a model from a path or a hub, and its tokenizer and configuration, which are small.

    Raises OSError or ValueError, as transformers does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # of no such name, or not built into torch, or not there
        raise ValueError(f"--device: {device!r} cannot be used here: {str(error).splitlines()[0][:200]}") from None

    def model() -> PreTrainedModel:
        whole: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        return whole.to(device).eval().requires_grad_(False)

    return model, AutoTokenizer.from_pretrained(name), AutoConfig.from_pretrained(name)
