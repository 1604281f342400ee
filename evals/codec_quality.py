"""Measures codecs of KV in bits and quality, on small models, as trained and with outlying channels of K.

    python evals/codec_quality.py [--only smollm2] [--windows 32] [--threads 1]

Codecs are measured with what `kvloom calibrate --verify` uses, on Python source that the models have not seen: KV of a
context is encoded and decoded in chunks of 256 tokens, the next 256 tokens are predicted. Writes codec_quality.json,
whose rows are not measured again (delete it to begin anew), codec_quality.md and codec_quality.png.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from platform import python_version
from tempfile import TemporaryDirectory
from typing import Any

import torch
from codec_models import subjects
from codec_models.subjects import Subject
from codec_page import draw, page

from kvloom_eval import peers
from kvloom_serde_cachegen import streams
from kvloom_serde_cachegen.bins import CacheGenConfig, QuantizationSpec
from kvloom_serde_cachegen.calibration.calibrating import calibrated
from kvloom_serde_cachegen.measuring import CHUNK_TOKENS, Codec, context_kv, measure, predictions, through
from kvloom_serde_cachegen.profile import Profile
from kvloom_serde_cachegen.serializer import CacheGenSerializer
from kvloom_serde_cachegen.streams import Mode, Settings

HERE = Path(__file__).parent
STEPS = (0.25, 0.375, 0.5, 0.75, 1.0)
KLT_STEPS = (0.25, 0.375, 0.5, 0.75, 1.0)
RULE_STEPS = (0.25, 0.5, 0.75)
"""Steps of the other rules for K."""
FLOOR_WINDOWS = 4


def streamed(settings: Settings) -> Codec:
    """The streams of the native codec alone."""

    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        blob, back = streams.encode(kv, settings, threads=1), torch.empty_like(kv)
        streams.decode(blob, back, settings.mode, threads=1)
        return back, sum(each.nbytes for each in blob)

    return codec


def codecs_for(subject: Subject, profile: Profile) -> dict[str, Codec]:
    """All rows of a table."""
    layers, hidden = profile.layers, profile.hidden
    band = min(128, hidden)
    bins, deep = CacheGenConfig.for_layers(layers).by_layer(), deep_bins(layers)
    lossless = streamed(Settings(Mode.LOSSLESS))
    found = {
        "raw bf16": peers.raw,
        "zstd-3": peers.zstd(3, planes=False),
        "zstd-3, byte planes": peers.zstd(3, planes=True),
        "lossless": lossless,
        "fp8 e4m3": peers.fp8,
        "fp8 e4m3 + lossless": peers.fp8_then(lossless),
        "int8 per token and head": peers.int8(subject.head_size),
        "int4 per token and head": peers.int4(subject.head_size),
        "KIVI-4": peers.kivi(4),
        "KIVI-2": peers.kivi(2),
        "LMCache CacheGen": peers.lmcache_cachegen(bins),
        "cachegen": streamed(Settings(Mode.CACHEGEN, band, bins=bins)),
        "LMCache CacheGen, as in 32 layers": peers.lmcache_cachegen(deep),
        "cachegen, as in 32 layers": streamed(Settings(Mode.CACHEGEN, band, bins=deep)),
    }
    for step in STEPS:
        found[f"step {step:g}"] = served("step", step)
        found[f"step {step:g}, profile"] = served("step", step, profile)
    for step in KLT_STEPS:
        found[f"klt {step:g}"] = served("klt", step, profile)
    for step in RULE_STEPS:
        for rule, weights in (
            ("each channel", deviations(subject)),
            ("one for all", torch.ones_like(profile.weights[0])),
        ):
            found[f"step {step:g}, {rule}"] = served("step", step, replace(profile, weights=weights))
    return found


def served(mode: str, step: float, profile: Profile | None = None) -> Codec:
    """The serializer with these settings."""
    settings: dict[str, Any] = {"mode": mode, "quality": step, "codec_gate": False, "threads": 1}
    with TemporaryDirectory() as folder:
        if profile is not None:
            settings["profile"] = Path(folder) / "profile"
            profile.save(settings["profile"])
        return through(CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings)))


@torch.no_grad()
def deviations(subject: Subject) -> torch.Tensor:
    """Deviations of K's channels, relative to each other, `[layers, hidden]`."""
    keys = torch.cat([context_kv(subject.model, each)[0].flatten(2) for each in subject.calibration[:4]], dim=1)
    found = keys.float().std(dim=1)
    return found / found.mean(1, keepdim=True)


def profile_of(subject: Subject) -> tuple[Profile, int]:
    """The profile that `kvloom calibrate` writes for this model, and its size in bytes."""
    profile, _ = calibrated(subject.model, subject.calibration, name=subject.name, klt=True)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "profile"
        profile.save(file)
        return profile, file.stat().st_size


def deep_bins(layers: int) -> list[tuple[int, int]]:
    """Levels in the shares that they have in a model of 32 layers: fine for K in 10, for V in 2 of them."""
    specs = [
        (QuantizationSpec(0, fine, 32), QuantizationSpec(fine, layers, 16))
        for fine in (round(layers * 10 / 32), max(1, round(layers * 2 / 32)))
    ]
    return CacheGenConfig(layers, *specs).by_layer()


@torch.no_grad()
def floors(subject: Subject) -> dict[str, float]:
    """`lossless` against the entropy of its symbols in each plane of a layer of a chunk, with all other bits raw: how
    much more it takes, as a share."""
    taken, least, lossless = {"bf16": 0, "fp8": 0}, {"bf16": 0.0, "fp8": 0.0}, streamed(Settings(Mode.LOSSLESS))
    for window in subject.windows[:FLOOR_WINDOWS]:
        kv = context_kv(subject.model, window[: subject.context]).flatten(3)
        for part in kv.split(CHUNK_TOKENS, dim=2):
            part = part.contiguous()
            exponents = part.view(torch.int16).int() >> 7 & 0xFF
            small = peers.to_fp8(part)
            for name, values, symbols, rest in (
                ("bf16", part, exponents, 8),
                ("fp8", small, small.view(torch.uint8).int(), 0),
            ):
                back, size = lossless(values, 0)
                assert torch.equal(back.view(torch.uint8), values.view(torch.uint8)), "lossless lost something"
                taken[name] += 8 * size
                least[name] += part.numel() * rest + sum(map(entropy, symbols.flatten(0, 1)))
    return {name: taken[name] / least[name] - 1 for name in taken}


def entropy(symbols: torch.Tensor) -> float:
    """Bits of all symbols together."""
    counts = torch.bincount(symbols.flatten()).double()
    counts = counts[counts > 0]
    return -(counts * (counts / counts.sum()).log2()).sum().item()


@torch.no_grad()
def worth(subject: Subject) -> dict[str, float]:
    """Loss with the context and without it, nats a token."""
    losses = {"with": 0.0, "without": 0.0}
    for window in subject.windows:
        seen, rest = window[: subject.context], window[subject.context :]
        whole = predictions(subject.model, rest, context_kv(subject.model, seen))
        alone = torch.log_softmax(subject.model(rest[None, :-1]).logits[0].float(), dim=-1)
        for name, each in (("with", whole), ("without", alone)):
            losses[name] -= each.gather(1, rest[1:, None]).mean().item() / len(subject.windows)
    return losses


def measure_model(name: str, windows: int, known: dict[str, Any]) -> dict[str, Any]:
    """known: what was measured of it before, with as many windows; codecs that are there are left as they are."""
    found: dict[str, Any] = {}
    for label in ("plain", "outliers") if name in subjects.PLANTED else ("plain",):
        subject = subjects.SUBJECTS[name](windows)
        if label == "outliers":
            subjects.plant_outliers(subject.model)
        found |= {"about": subject.about, "windows": windows, "context": subject.context, "python": python_version()}
        before = known.get(label, {})
        codecs = before.get("codecs", {})
        profile, profile_bytes = profile_of(subject)
        rows = codecs_for(subject, profile)
        codecs |= measured(subject, {each: rows[each] for each in rows if each not in codecs}, label)
        found[label] = {
            "profile bytes": profile_bytes,
            "loss": before.get("loss") or worth(subject),
            "over the entropy": before.get("over the entropy") or floors(subject),
            "codecs": {each: codecs[each] for each in rows},
        }
    return found


def measured(subject: Subject, codecs: Mapping[str, Codec], label: str) -> dict[str, Any]:
    began = time.monotonic()

    def progress(done: int, of: int) -> None:
        print(f"{subject.name}, {label}: {done} of {of} windows, {time.monotonic() - began:.0f} s", flush=True)

    found = measure(subject.model, subject.windows, codecs, context=subject.context, progress=progress)
    return {name: {"mean": asdict(each.mean), "error": asdict(each.error)} for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(subjects.SUBJECTS), action="append", help="these models")
    parser.add_argument("--windows", type=int, help="of each model, instead of what is usual for it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "codec_quality.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for name in args.only or subjects.SUBJECTS:
        known, windows = results.get(name, {}), args.windows or subjects.WINDOWS[name]
        results[name] = measure_model(name, windows, known if known.get("windows") == windows else {})
        kept.write_text(json.dumps(results, indent=1) + "\n")
    results = {name: results[name] for name in subjects.SUBJECTS if name in results}
    (args.out / "codec_quality.md").write_text(page(results))
    draw(results, args.out / "codec_quality.png")


if __name__ == "__main__":
    main()
