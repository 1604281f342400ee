"""The codec of serde_cachegen: every mode, quality and instruction set, beside copying, zstd and zstd on byte planes.

KV is [2, 32 layers, 256 tokens, 1024] bf16, 33.6 MB, one chunk of Llama-8B's geometry. Values are made: channels with
means and scales of their own, a few of K's twenty times as large, directions whose strengths fall off as a power law,
positions rotated into K. Speeds hardly depend on that; sizes do, so read those in evals/. Rates are GB/s of KV that
goes in or comes out, on one core in processor time, so that neighbours on the machine do not count, on all of them by
the clock. All take turns, and what a call allocates is in its time.

    python bench/codec.py --rounds 9
    python bench/codec.py --only klt "step default" --channels 512  # 4 heads; rows go to codec_klt_512.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import zstandard
from table import SPEC, Rows

from kvloom_serde_cachegen import streams
from kvloom_serde_cachegen.bins import CacheGenConfig
from kvloom_serde_cachegen.native_profile import NativeProfile
from kvloom_serde_cachegen.profile import Profile, Transform, quantised, rotations_of
from kvloom_serde_cachegen.settings import QUALITY
from kvloom_serde_cachegen.streams import Mode, Settings

TOKENS, START = 256, 4096
PLANES, LAYERS, _, CHANNELS = SPEC.blob_shape(TOKENS)
SETS = ("portable", "AVX2", "AVX-512")
SECONDS = 20.0
"""Time for one contender: the slowest have fewer rounds."""
Blob = list[Any]


@dataclass
class Contender:
    """A contender: runs on `threads` threads, 0 for all processors."""

    name: str
    threads: int
    kv: torch.Tensor
    encode: Callable[[], Blob]
    decode: Callable[[Blob, torch.Tensor], object]
    exact: bool = False
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"encode": [], "decode": []})
    bytes: int = 0

    def run(self, into: torch.Tensor) -> None:
        clock = time.process_time if self.threads == 1 else time.perf_counter
        began = clock()
        blob = self.encode()
        self.seconds["encode"].append(clock() - began)
        began = clock()
        self.decode(blob, into)
        self.seconds["decode"].append(clock() - began)
        if not self.bytes:  # the first time: it does what it says
            self.bytes = sum(memoryview(part).nbytes for part in blob)
            if self.exact:
                assert torch.equal(into.view(torch.uint8), self.kv.view(torch.uint8))
            else:
                error = (into.float() - self.kv.float()).norm() / self.kv.float().norm()
                assert error < 0.5, f"{self.name}: relative error {error:.2f}"


# -- KV ----------------------------------------------------------------------------------------------------------------


def made_kv(hidden: int) -> tuple[torch.Tensor, Profile]:
    """KV of as many directions as channels, whose strengths fall off, and the profile that calibration would find."""
    generator = torch.Generator().manual_seed(0)
    strengths = (1.0 + torch.arange(hidden)) ** -0.7
    strengths *= (hidden / strengths.square().sum()) ** 0.5
    scales = torch.exp(0.6 * torch.randn(PLANES, LAYERS, hidden, generator=generator))
    scales[0, :, torch.randperm(hidden, generator=generator)[:12]] *= 20.0
    means = torch.randn(PLANES, LAYERS, hidden, generator=generator) * scales
    means[1] = 0.0
    directions = [torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q for _ in range(PLANES)]
    kv = torch.empty(PLANES, LAYERS, TOKENS, hidden)
    for plane in range(PLANES):
        for layer in range(LAYERS):
            noise = torch.randn(TOKENS, hidden, generator=generator) * strengths
            kv[plane, layer] = means[plane, layer] + scales[plane, layer] * (noise @ directions[plane])
    frequencies = 500_000.0 ** -(torch.arange(SPEC.head_size // 2, dtype=torch.float64) / (SPEC.head_size // 2))
    kv[0] = rotated(kv[0], frequencies)
    weights = 1 / scales
    weights /= weights.mean(-1, keepdim=True)
    sigmas = (weights * scales).mean(-1)
    rank = int((strengths > 0.05).sum()) // 32 * 32
    rows = [[quantised(each[:rank].double()) for _ in range(LAYERS)] for each in directions]
    transform = Transform(
        means, weights, sigmas, *(tuple(tuple(pair[which] for pair in row) for row in rows) for which in (0, 1))
    )
    profile = Profile(
        model="bench", identity="bench", planes=PLANES, layers=LAYERS, hidden=hidden, head_size=SPEC.head_size,
        calibrated_tokens=0, weights=weights[0], rotary_size=SPEC.head_size, interleaved=False,
        rotations=rotations_of(frequencies), transform=transform,
    )  # fmt: skip
    return kv.to(torch.bfloat16), profile


def rotated(keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """`[layers, tokens, hidden]`, with positions from START on: pairs are a head's first and second half."""
    angles = (torch.arange(START, START + TOKENS)[:, None] * frequencies).float()[:, None, :]
    first, second = keys.unflatten(2, (-1, SPEC.head_size)).chunk(2, dim=-1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, dim=-1).flatten(2)


# -- contenders --------------------------------------------------------------------------------------------------------


def ours(name: str, threads: int, kv: torch.Tensor, settings: Settings, which: int = -1) -> Contender:
    encode = partial(streams.encode, kv, settings, start=START, threads=threads, with_instructions=which)

    def decode(blob: Blob, into: torch.Tensor) -> None:
        streams.decode(blob, into, settings.mode, profile=settings.profile, threads=threads, with_instructions=which)

    return Contender(name, threads, kv, encode, decode, settings.mode is Mode.LOSSLESS)


def copy(threads: int, kv: torch.Tensor) -> Contender:
    """Into memory that was used before, as decoding goes into the caller's."""
    into = torch.empty_like(kv)

    def encode() -> Blob:
        into.copy_(kv)
        return [memoryview(into.view(torch.uint8).flatten().numpy())]

    return Contender("copy_", threads, kv, encode, lambda _, target: target.copy_(kv), True)


def zstd(threads: int, kv: torch.Tensor, level: int, *, planes: bool) -> Contender:
    """Each layer of each plane on its own; planes: all upper bytes, then all lower ones."""
    parts = list(kv.flatten(0, 1))
    pool = ThreadPoolExecutor() if threads == 0 else None

    def each(work: Callable[..., Any], *of: Sequence[Any]) -> list[Any]:
        return list(pool.map(work, *of) if pool else map(work, *of))

    def compress(part: torch.Tensor) -> bytes:
        words = part.view(torch.int16).flatten()
        raw = torch.cat([(words >> 8).to(torch.uint8), words.to(torch.uint8)]) if planes else words
        return zstandard.ZstdCompressor(level=level).compress(raw.numpy())

    def restore(blob: bytes, part: torch.Tensor) -> None:
        raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8)
        words = part.view(torch.int16).flatten().numpy()
        if planes:
            upper, lower = np.split(raw, 2)
            np.bitwise_or(upper.astype(np.int16) << 8, lower, out=words)
        else:
            words[:] = raw.view(np.int16)

    name = f"zstd -{level}{' on byte planes' if planes else ''}"
    return Contender(
        name,
        threads,
        kv,
        lambda: each(compress, parts),
        lambda blob, into: each(restore, blob, into.flatten(0, 1)),
        True,
    )


def contenders(kv: torch.Tensor, profile: Profile) -> list[Contender]:
    bins = CacheGenConfig.for_layers(LAYERS).by_layer()
    band = SPEC.head_size
    settings = {
        **{f"step {quality}": Settings(Mode.STEP, band, step=step) for quality, step in QUALITY["step"].items()},
        "lossless": Settings(Mode.LOSSLESS),
        "cachegen": Settings(Mode.CACHEGEN, band, bins=bins),
        "klt 0.5": Settings(Mode.KLT, band, step=0.5, profile=NativeProfile(profile)),
    }
    small = (kv.float() / kv.float().abs().amax(dim=(2, 3), keepdim=True) * 448).to(torch.float8_e4m3fn)
    best = streams.instructions()
    found = []
    for threads in (1, 0):
        found.append(copy(threads, kv))
        found += [ours(f"{name}, {SETS[best]}", threads, kv, how) for name, how in settings.items()]
        for name in ("step default", "lossless"):
            found.append(ours(f"fp8, {name}, {SETS[best]}", threads, small, settings[name]))
        found += [zstd(threads, kv, level, planes=planes) for level in (1, 3) for planes in (False, True)]
    for which in reversed(range(best)):
        for name in ("step default", "lossless", "cachegen", "klt 0.5"):
            found.append(ours(f"{name}, {SETS[which]}", 1, kv, settings[name], which))
    return found


def main(rounds: int, only: list[str], channels: int) -> None:
    kv, profile = made_kv(channels)
    found = [each for each in contenders(kv, profile) if not only or each.name.startswith(("copy_", *only))]
    into = {kv.dtype: torch.zeros_like(kv), torch.float8_e4m3fn: torch.zeros(kv.shape, dtype=torch.float8_e4m3fn)}
    cores = torch.get_num_threads()
    for round in range(rounds + 1):
        for each in found:
            if round < 2 or sum(map(sum, each.seconds.values())) < SECONDS:
                torch.set_num_threads(each.threads or cores)
                each.run(into[each.kv.dtype])
            if not round:  # memory was touched for the first time
                each.seconds = {"encode": [], "decode": []}
    parts = ["codec", *(only[:1]), *([str(channels)] if channels != CHANNELS else [])]
    rows = Rows("_".join(parts))
    for each in found:
        if each.threads == 1:
            bits = 8 * each.bytes / each.kv.numel()
            rows.add(f"{each.name}: size", f"{each.kv.nbytes / each.bytes:.2f}x smaller", f"{bits:.2f} bits a value")
    for threads, where in ((1, "one core"), (0, f"{cores} cores")):
        of_these = [each for each in found if each.threads == threads]
        for job in ("encode", "decode"):
            limits = of_these[0].seconds[job]  # of copying as many bytes
            for each in of_these:
                share = each.kv.nbytes / kv.nbytes
                scaled = [seconds * share for seconds in limits]
                rows.spread(f"{where}, {job}: {each.name}", each.seconds[job], each.kv.nbytes / 1e9, scaled, "copy_")
    rows.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose names begin with one of these")
    parser.add_argument("--channels", type=int, default=CHANNELS, help="of one token of K: a multiple of the head size")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.only, arguments.channels)
