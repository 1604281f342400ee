"""The codec's kernels on a GPU, beside what its memory does: chunks of a Llama 8B in bf16. Writes results/<gpu>.md.

Kernels are timed by events, with their input in device memory; "with transfers" is from host memory to decoded KV in
device memory by the clock, beside the copy of the KV as it is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import bare  # noqa: F401 - before kvloom
import torch
from table import RESULTS, SPEC

from kvloom_serde_cachegen import device, streams
from kvloom_serde_cachegen.bins import CacheGenConfig
from kvloom_serde_cachegen.streams import Mode, Settings

TOKENS, TIMES = 256, 30
MODES = {
    "step default": Settings(Mode.STEP, SPEC.head_size, step=0.375),
    "lossless": Settings(Mode.LOSSLESS, SPEC.head_size),
    "cachegen": Settings(
        Mode.CACHEGEN, SPEC.head_size, bins=CacheGenConfig.for_layers(SPEC.blob_shape(TOKENS)[1]).by_layer()
    ),
}


def main() -> None:
    codec = device.library()
    if codec is None:
        raise SystemExit(f"no kernels to measure: {device.about()}")
    name = torch.cuda.get_device_name().replace(" ", "-").lower()
    how = f"torch {torch.__version__}, CUDA {torch.version.cuda}; medians of {TIMES}, least and most; GB/s of bf16 KV."
    lines = [f"# {torch.cuda.get_device_name()}", "", how, "", "| | chunks | GB/s | range |", "|---|---|---|---|"]
    for chunks in (1, 8, 16):
        for row, rates in measured(codec, chunks):
            middle = statistics.median(rates)
            lines.append(f"| {row} | {chunks} | {middle:.0f} | {min(rates):.0f} to {max(rates):.0f} |")
            print(lines[-1], flush=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


def measured(codec: Any, chunks: int) -> list[tuple[str, list[float]]]:
    kvs = [kv(seed) for seed in range(chunks)]
    amount = sum(each.nbytes for each in kvs) / 1e9
    into = [torch.empty_like(each) for each in kvs]
    pinned = [each.cpu().pin_memory() for each in kvs]

    def copy() -> None:
        for mine, theirs in zip(into, kvs, strict=True):
            mine.copy_(theirs)

    def upload() -> None:
        for mine, theirs in zip(into, pinned, strict=True):
            mine.copy_(theirs, non_blocking=True)
        torch.cuda.synchronize()

    rows = [("copy within the device", by_events(copy)), ("raw KV from pinned memory", by_clock(upload))]
    for name, how in MODES.items():
        rows += coded(codec, kvs, into, name, how)
    return [(row, [amount / each for each in taken]) for row, taken in rows]


def coded(
    codec: Any, kvs: list[torch.Tensor], into: list[torch.Tensor], name: str, how: Settings
) -> list[tuple[str, list[float]]]:
    encoding, _ = device.encoding(kvs, how, codec)
    blobs = device.encode(kvs, how, codec)
    assert bytes(blobs[0][0]) == bytes(streams.encode(kvs[0].cpu(), how)[0])
    blobs = [in_the_pool(blob) for blob in blobs]
    decoding = device.decoding(blobs, into, how.mode, codec)
    return [
        (f"encode, {name}", by_events(encoding.run)),
        (f"decode, {name}", by_events(decoding.run)),
        (f"decode with transfers, {name}", by_clock(lambda: device.decode(blobs, into, how.mode, codec))),
    ]


def in_the_pool(blob: list[memoryview]) -> list[memoryview]:
    """The streams of a blob one after another in pinned memory."""
    whole = torch.cat([torch.frombuffer(bytearray(stream), dtype=torch.uint8) for stream in blob]).pin_memory()
    ends = list(itertools.accumulate(map(len, blob), initial=0))
    return [memoryview(whole.numpy())[begin:end] for begin, end in itertools.pairwise(ends)]


def kv(seed: int) -> torch.Tensor:
    """With scales by channel, as real KV has."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(SPEC.blob_shape(TOKENS), generator=generator, device="cuda")
    return (made * torch.rand(SPEC.hidden_dim, generator=generator, device="cuda").mul(2).exp()).to(torch.bfloat16)


def by_events(run: Callable[[], None]) -> list[float]:
    for _ in range(5):
        run()
    taken = []
    for _ in range(TIMES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        taken.append(began.elapsed_time(ended) / 1e3)
    return taken


def by_clock(run: Callable[[], None]) -> list[float]:
    run()
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main()
