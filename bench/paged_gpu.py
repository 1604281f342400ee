"""Paged KV of a GPU to pinned host memory and back, beside the bus. Writes results/<gpu>-paged.md.

Chunks of 256 tokens of a Llama 8B in bf16, in blocks of 16 tokens anywhere in the pages. The limit is a copy of as
many bytes between device memory and the same pinned memory, measured in turn with everything else. Beside the
connectors: one cudaMemcpyBatchAsync of single pages (as vLLM's swap_blocks_batch), a cudaMemcpyAsync for each, torch's
indexing and then a copy (`type: paged`), and LMCache's kernel where it is installed. By the clock, from the call until
the device is done. Then both directions at once, and the time of a model's products of matrices beside each way.

`--rehearse` runs all of it on a processor, small, with the kernel built as a loop: to try the script, not for figures.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import bare
import torch
from paged_ways import MODEL, ON, REHEARSE, Work, batch_of_pages, by_blocks, contenders, moved, plain, settle, work_of
from table import RESULTS

from kvloom_connector_vllm import native
from kvloom_connector_vllm.paged import cuda
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.cuda import PagedCudaConnector

ROUNDS = 2 if REHEARSE else 30
CSRC = Path(__file__).parents[1] / "plugins/connector_vllm/csrc"


def main() -> None:
    if REHEARSE:
        from kvloom_testkit.devices.simulated import SimulatedDevice

        pretend()
        with SimulatedDevice(0).installed():
            measure()
    elif native.kernels() is None:
        raise SystemExit(f"no kernels to measure: {native.about_kernels()}")
    else:
        measure()


def measure() -> None:
    if bare.MISSING:
        print(f"left out, because there is no {', '.join(bare.MISSING)}: an engine's load from memory")
    name = "a rehearsal" if REHEARSE else torch.cuda.get_device_name()
    how = f"torch {torch.__version__}, CUDA {torch.version.cuda}; medians of {ROUNDS}, least and most; GB/s of bf16 KV."
    lines = [f"# {name}: pages", "", how, "", "| | chunks | GB/s | range | of the bus |", "|---|---|---|---|---|"]
    print("\n".join(lines[2:]))
    for chunks in (1, 8):
        work = work_of(chunks)
        check(work)
        for direction in ("read", "write"):
            for line in measured(work, direction):
                lines.append(line)
                print(line, flush=True)
    lines += ["", *(() if REHEARSE else beside_the_model(work))]
    if not REHEARSE:
        (RESULTS / f"{name.replace(' ', '-').lower()}-paged.md").write_text("\n".join(lines) + "\n")


def measured(work: Work, direction: str) -> list[str]:
    """A line for each contender. All take turns."""
    runs = contenders(work, direction)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            settle()
            if round_ >= 2:
                taken[name].append(time.perf_counter() - began)
    amount = sum(chunk.nbytes for chunk in work.chunks) / 1e9
    limit = statistics.median(taken["the bus: a copy of as many bytes"])
    lines = []
    for name, times in taken.items():
        middle = statistics.median(times)
        spread = f"{amount / max(times):.2f} to {amount / min(times):.2f}"
        row = f"| {direction}: {name} | {len(work.chunks)} | {amount / middle:.2f} | {spread} | {limit / middle:.2f} |"
        lines.append(row)
    return lines


def beside_the_model(work: Work) -> list[str]:
    """Both directions at once, and products of matrices meanwhile."""
    other = work_of(len(work.chunks))
    streams = [torch.cuda.Stream() for _ in range(2)]
    connector, chunks, where = by_blocks(work)
    its_chunks, its_where = by_blocks(other)[1:]
    ours = PagedCudaConnector(PagedCudaConnector.Config(), MODEL)

    def plain_one(direction: str) -> None:
        with torch.cuda.stream(streams[direction == "write"]):
            plain(work if direction == "read" else other, direction)

    def vllm_one(direction: str) -> None:
        mine = (chunks, where) if direction == "read" else (its_chunks, its_where)
        getattr(connector, direction)(work.segments, mine[0], **mine[1])

    def paged_one(direction: str) -> None:
        mine = work if direction == "read" else other
        getattr(ours, direction)(mine.segments, mine.chunks, **mine.where)

    batches = {
        direction: batch_of_pages(mine, direction) for direction, mine in (("read", work), ("write", other))
    }  # fmt: skip
    ways: dict[str, Callable[[str], object]] = {
        "copies of as many bytes": plain_one,
        "type: paged_cuda": paged_one,
        "type: vllm": vllm_one,
        "one cudaMemcpyBatchAsync of pages": lambda direction: batches[direction](),
    }
    amount = 2 * sum(chunk.nbytes for chunk in work.chunks) / 1e9
    lines = ["| both directions at once | GB/s together | range | of copies |", "|---|---|---|---|"]
    limit, pool = 0.0, ThreadPoolExecutor(2)  # an engine saves and loads on threads of their own
    for name, way in ways.items():
        taken = []
        for _ in range(ROUNDS):
            settle()
            began = time.perf_counter()
            for half in [pool.submit(way, direction) for direction in ("read", "write")]:
                half.result()
            settle()
            taken.append(time.perf_counter() - began)
        middle = amount / statistics.median(taken)
        limit = limit or middle
        lines.append(
            f"| {name} | {middle:.1f} | {amount / max(taken):.1f} to {amount / min(taken):.1f} | {middle / limit:.2f} |"
        )
        print(lines[-1], flush=True)
    lines += ["", "| 60 products of bf16 matrices of 4,096 | ms | range | of alone |", "|---|---|---|---|"]
    alone = 0.0
    for _ in range(ROUNDS):
        products(lambda: None)  # until the clocks are up
    for name, way in {"alone": lambda direction: None, **ways}.items():
        for direction in ("read",) if name == "alone" else ("read", "write"):
            taken = [products(partial(way, direction)) for _ in range(ROUNDS)]
            middle = statistics.median(taken)
            alone = alone or middle
            row = name if name == "alone" else f"beside {direction}s by {name}"
            lines.append(f"| {row} | {middle:.2f} | {min(taken):.2f} to {max(taken):.2f} | {middle / alone:.2f} |")
            print(lines[-1], flush=True)
    return lines


def products(move: Callable[[], object]) -> float:
    """Milliseconds that products take while moves are under way, which last longer."""
    one, other = (torch.randn(4096, 4096, device=ON).to(torch.bfloat16) for _ in range(2))
    into = one @ other
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    settle()
    for _ in range(4):
        move()
    began.record()
    for _ in range(60):
        torch.mm(one, other, out=into)
    ended.record()
    settle()
    return began.elapsed_time(ended)


def check(work: Work) -> None:
    """Check that each contender reads what torch reads, and writes it back."""
    before = [pages.clone() for pages in work.pages]
    torchs = PagedConnector(PagedConnector.Config(), MODEL)
    moved(torchs, work, "read")
    expected = [chunk.tensor.clone() for chunk in work.chunks]
    for name, run in moving(contenders(work, "read")):
        for chunk in work.chunks:
            chunk.tensor.zero_()
        run()
        settle()
        assert all(torch.equal(a.tensor, b) for a, b in zip(work.chunks, expected, strict=True)), f"read: {name}"
    for name, run in moving(contenders(work, "write")):
        for pages in work.pages:
            pages[:, work.table] = 0
        run()
        settle()
        assert all(map(torch.equal, work.pages, before)), f"write: {name}"


def moving(runs: Mapping[str, Callable[[], object]]) -> Sequence[tuple[str, Callable[[], object]]]:
    return [(name, run) for name, run in runs.items() if not name.startswith("the bus")]


def pretend() -> None:
    """Have the connector use the kernel as a loop on a processor."""
    built = Path(tempfile.mkdtemp()) / "libkvpaged_emulated.so"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-x", "c++"]
    subprocess.run(["c++", *options, CSRC / "paged.cu", "-o", built], check=True)
    emulated = native.Kernels(ctypes.CDLL(str(built)), "cpu")
    cuda.kernels = lambda: emulated  # type: ignore[assignment]


if __name__ == "__main__":
    main()
