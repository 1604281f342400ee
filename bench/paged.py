"""Paged KV in host memory to chunks and back: the library of connector_vllm, torch, and a copy of as many bytes.

Four chunks of 256 tokens of a Llama 8B in bf16, in blocks of 16 tokens anywhere in a pool of 512. All take turns, on
one core in processor time, so that neighbours on the machine do not count. What a call costs besides its bytes is in
the last rows.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from table import SPEC, Rows

from kvloom import Chunk, ChunkKey, MemoryFormat, Segment
from kvloom_connector_vllm import native
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.layout import PagedLayout
from kvloom_connector_vllm.paged.move import Move, by_torch
from kvloom_connector_vllm.paged.table import PageTable

QUICK = "--quick" in sys.argv
CHUNKS, TOKENS, BLOCKS, BLOCK_TOKENS = 4, 256, 512, 16
ROUNDS = 3 if QUICK else 15
HEADS, CONTENT = SPEC.num_kv_heads, SPEC.head_size
Pages = list[torch.Tensor]


def pages_of(order: str) -> Pages:
    """Pages of each layer, every page written once."""
    shape, axes = {
        "LBNHC, K beside V": ((BLOCKS, BLOCK_TOKENS, HEADS, 2 * CONTENT), (0, 2, 1, 3)),
        "LBHNC, K beside V": ((BLOCKS, HEADS, BLOCK_TOKENS, 2 * CONTENT), (0, 1, 2, 3)),
        "nhd, K before V": ((2, BLOCKS, BLOCK_TOKENS, HEADS, CONTENT), (0, 1, 2, 3, 4)),
    }[order]
    return [torch.ones(shape, dtype=torch.bfloat16).permute(axes) for _ in range(SPEC.num_layers)]


def main() -> None:
    rows = Rows("paged")
    torch.set_num_threads(1)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))[: CHUNKS * TOKENS // BLOCK_TOKENS]
    slots = (table[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
    ours, others = ([torch.ones(SPEC.blob_shape(TOKENS), dtype=torch.bfloat16) for _ in range(CHUNKS)] for _ in "12")
    amount = sum(chunk.nbytes for chunk in ours) / 1e9
    library = native.processor()
    for order in ("LBNHC, K beside V", "LBHNC, K beside V", "nhd, K before V"):
        pages = pages_of(order)
        layout = PagedLayout.of(pages, SPEC)
        for to_pages in (False, True):
            move = Move(PageTable.of(layout), slots.numpy(), ours, to_pages)
            runs: dict[str, Callable[[], object]] = {"torch": partial(by_torch, move, layout)}
            if library is not None:
                runs["library"] = partial(by_library, move, library)
            taken = in_turn({**runs, "copy": partial(copy, ours, others)})
            for name in runs:
                what = f"{'write' if to_pages else 'read'} {order}: {name}, GB/s of a core"
                rows.spread(what, taken[name], amount, taken["copy"], "copying as much")
    calls(rows, pages, slots)
    rows.finish()


def by_library(move: Move, library: ctypes.CDLL) -> None:
    native.on_processor(native.Tables.of(move), library)


def copy(ours: Pages, others: Pages) -> None:
    for mine, theirs in zip(ours, others, strict=True):
        mine.copy_(theirs)


def in_turn(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if round_:
                taken[name].append(time.process_time() - began)
    return taken


def calls(rows: Rows, pages: Pages, slots: torch.Tensor) -> None:
    """Calls of the connector: one token of all layers, and of one."""
    connector = PagedConnector(PagedConnector.Config(), SPEC)
    where = {"kvcaches": pages, "slot_mapping": slots}
    segment = Segment(0, 1, ChunkKey("0/-", 0, bytes(32)))
    whole, one = (torch.ones(2, layers, 1, SPEC.hidden_dim, dtype=torch.bfloat16) for layers in (SPEC.num_layers, 1))
    runs = {
        "check 1,024 tokens (us)": lambda: connector.check(where, CHUNKS * TOKENS),
        "read 1 token of 32 layers (us)": lambda: connector.read([segment], [chunk_of(whole)], **where),
        "read 1 token of 1 layer (us)": lambda: connector.read_layer(0, [segment], [chunk_of(one)], **where),
    }
    for name, taken in in_turn(runs).items():
        rows.micros(name, statistics.median(taken))


def chunk_of(tensor: torch.Tensor) -> Chunk:
    return Chunk(tensor, MemoryFormat.KV_BLOB, tensor.shape[2])


if __name__ == "__main__":
    main()
