"""Ways to move paged KV between a GPU and pinned host memory: those of the connectors, and what they compete with."""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import bare
import numpy as np
import torch
from table import SPEC

from kvloom import Chunk, ChunkKey, KVSpec, MemoryFormat, Segment
from kvloom_connector_vllm.paged.blocks import VLLMConnector
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.cuda import PagedCudaConnector
from kvloom_connector_vllm.paged.settings import Geometry, VLLMConfig

REHEARSE = "--rehearse" in sys.argv
ON = "cpu" if REHEARSE else "cuda"
MODEL = KVSpec("rehearsal", 2, 2, 16, "bfloat16") if REHEARSE else SPEC
TOKENS, BLOCK_TOKENS = (32, 16) if REHEARSE else (256, 16)
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


@dataclass
class Work:
    """So many chunks, where they are in the pages, and the memory for a plain copy of as many bytes."""

    pages: list[torch.Tensor]
    """Pages of each layer, `[2, blocks, block tokens, heads, head size]`."""
    table: torch.Tensor
    segments: list[Segment]
    chunks: list[Chunk]
    plain: list[torch.Tensor]
    """In device memory, one of a chunk's shape each."""

    @property
    def slots(self) -> torch.Tensor:
        return (self.table[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()

    @property
    def where(self) -> Mapping[str, Any]:
        return {"kvcaches": self.pages, "slot_mapping": self.slots}


def work_of(chunks: int) -> Work:
    count = chunks * TOKENS // BLOCK_TOKENS
    shape = (2, 2 * count, BLOCK_TOKENS, MODEL.num_kv_heads, MODEL.head_size)
    pages = [torch.randn(shape, device=ON).to(torch.bfloat16) for _ in range(MODEL.num_layers)]
    table = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count]
    segments = [Segment(n * TOKENS, (n + 1) * TOKENS, ChunkKey("0/-", n, bytes(32))) for n in range(chunks)]
    tensors = [torch.empty(MODEL.blob_shape(TOKENS), dtype=torch.bfloat16, pin_memory=not REHEARSE) for _ in segments]
    plain = [torch.empty_like(tensor, device=ON) for tensor in tensors]
    return Work(pages, table, segments, [Chunk(each, MemoryFormat.KV_BLOB, TOKENS) for each in tensors], plain)


def contenders(work: Work, direction: str) -> dict[str, Callable[[], object]]:
    ours = PagedCudaConnector(PagedCudaConnector.Config(), MODEL)
    torchs = PagedConnector(PagedConnector.Config(), MODEL)
    runs: dict[str, Callable[[], object]] = {
        "the bus: a copy of as many bytes": partial(plain, work, direction),
        "type: paged_cuda": partial(moved, ours, work, direction),
        "type: paged_cuda, a call for each chunk": partial(moved_one_by_one, ours, work, direction),
        "type: paged_cuda, layer by layer": partial(moved_by_layers, ours, work, direction),
        "type: vllm": blocks_moved(work, direction),
        "torch: indexing and a copy": partial(moved, torchs, work, direction),
        "one cudaMemcpyBatchAsync of pages": batch_of_pages(work, direction),
        "a cudaMemcpyAsync for each page": page_by_page(work, direction),
    }
    if direction == "write" and not bare.MISSING:
        runs["an engine's load from memory, type: vllm"] = loaded(work)
    if (peer := lmcache_kernel(work, direction)) is not None:
        runs["LMCache's kernel"] = peer
    return runs


def plain(work: Work, direction: str) -> None:
    for chunk, there in zip(work.chunks, work.plain, strict=True):
        to, source = (chunk.tensor, there) if direction == "read" else (there, chunk.tensor)
        to.copy_(source, non_blocking=True)


def moved(connector: PagedConnector, work: Work, direction: str) -> None:
    fence = getattr(connector, direction)(work.segments, work.chunks, **work.where)
    if fence is not None:
        fence.wait()


def moved_one_by_one(connector: PagedConnector, work: Work, direction: str) -> None:
    fences = []
    for segment, chunk in zip(work.segments, work.chunks, strict=True):
        fences.append(getattr(connector, direction)([segment], [chunk], **work.where))
    for fence in fences:
        fence.wait()


def moved_by_layers(connector: PagedConnector, work: Work, direction: str) -> None:
    fences = []
    for layer in range(MODEL.num_layers):
        parts = [Chunk(each.tensor[:, layer : layer + 1], each.format, each.num_tokens) for each in work.chunks]
        fences.append(getattr(connector, f"{direction}_layer")(layer, work.segments, parts, **work.where))
    for fence in fences:
        fence.wait()


def by_blocks(work: Work) -> tuple[VLLMConnector, list[Chunk], Mapping[str, Any]]:
    """The connector that vLLM uses; a plane of a layer is a layer to it, and a page is one plane's."""
    views = tuple(layer[plane].flatten(1) for plane in range(2) for layer in work.pages)
    geometry = Geometry(layers=len(views), block_tokens=BLOCK_TOKENS, page_elements=views[0].shape[1])
    connector = VLLMConnector(VLLMConfig(geometry=geometry), MODEL)
    shape = connector.shape(TOKENS)
    chunks = [Chunk(each.tensor.view(shape), MemoryFormat.KV_PAGES, TOKENS) for each in work.chunks]
    return connector, chunks, {"pages": views, "blocks": work.table.tolist()}


def blocks_moved(work: Work, direction: str) -> Callable[[], object]:
    connector, chunks, where = by_blocks(work)

    def run() -> None:
        fence = getattr(connector, direction)(work.segments, chunks, **where)
        if fence is not None:
            fence.wait()

    return run


def loaded(work: Work) -> Callable[[], object]:
    """Through the engine: segments that the memory tier holds, from its pinned pool into the pages."""
    connector, chunks, where = by_blocks(work)
    from kvloom import Engine, Registry

    plugins = [EntryPoint(name, name, "kvloom.v1") for name in ("kvloom.builtin", "kvloom_connector_vllm")]
    engine = Engine.open(
        {
            "connector": {"type": "vllm", "geometry": connector.representation},
            "chunk_tokens": TOKENS,
            "tiers": [{"type": "memory", "capacity": 2 * sum(chunk.nbytes for chunk in chunks) + (64 << 20)}],
        },
        MODEL,
        registry=Registry.discover(entry_points=plugins),
    )
    atexit.register(engine.close)
    segments = engine.segments(torch.arange(len(chunks) * TOKENS))
    assert engine.save(segments, **where).result(60).all()
    memory, until = engine.memory, time.monotonic() + 60
    while memory is not None and not memory.pool.pages.settled and time.monotonic() < until:
        time.sleep(0.01)

    def run() -> None:
        assert engine.load(segments, **where).result(60).all()

    return run


def page_copies(work: Work, direction: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Target and source of each page."""
    copies = []
    per_chunk = TOKENS // BLOCK_TOKENS
    for at, block in enumerate(work.table.tolist()):
        tensor, row = work.chunks[at // per_chunk].tensor, at % per_chunk * BLOCK_TOKENS
        for layer, pages in enumerate(work.pages):
            for plane in range(2):
                pair = (tensor[plane, layer, row : row + BLOCK_TOKENS], pages[plane, block].flatten(1))
                copies.append(pair if direction == "read" else pair[::-1])
    return copies


def page_by_page(work: Work, direction: str) -> Callable[[], object]:
    """By the runtime itself, whose calls cost less than torch's."""
    copies, runtime = page_copies(work, direction), cudart()
    if runtime is None:
        return lambda: [to.copy_(source, non_blocking=True) for to, source in copies] and None
    stream, kind = current(), ctypes.c_int(TO_HOST if direction == "read" else TO_DEVICE)
    calls = [tuple(ctypes.c_void_p(each.data_ptr()) for each in pair) for pair in copies]
    size = ctypes.c_size_t(copies[0][0].nbytes)
    copy = runtime.cudaMemcpyAsync

    def run() -> None:
        for to, source in calls:
            copy(to, source, size, kind, stream)

    return run


def batch_of_pages(work: Work, direction: str) -> Callable[[], object]:
    copies, runtime = page_copies(work, direction), cudart()
    if runtime is None or not hasattr(runtime, "cudaMemcpyBatchAsync"):
        return page_by_page(work, direction)
    to, source = (np.array([pair[which].data_ptr() for pair in copies], dtype=np.uint64) for which in (0, 1))
    sizes = np.full(len(copies), copies[0][0].nbytes, dtype=np.uint64)
    # cudaMemcpyAttributes: the source is read in the order of the stream; no hints, no flags. For all, from index 0.
    attributes, begin = np.array([1, 0, 0, 0, 0, 0], dtype=np.int32), np.zeros(1, dtype=np.uint64)
    stream = torch.cuda.Stream()  # the legacy default stream takes no batches

    def run() -> None:
        arrays = (ctypes.c_void_p(each.ctypes.data) for each in (to, source, sizes))
        count, about = ctypes.c_size_t(len(copies)), (attributes, begin)
        stream.wait_stream(torch.cuda.current_stream())
        error = runtime.cudaMemcpyBatchAsync(
            *arrays, count, *(ctypes.c_void_p(each.ctypes.data) for each in about), ctypes.c_size_t(1),
            ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        assert error == 0, error

    return run


def current() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def cudart() -> ctypes.CDLL | None:
    """The runtime that torch has loaded."""
    for version in () if REHEARSE else (13, 12, 11):
        try:
            return ctypes.CDLL(f"libcudart.so.{version}")
        except OSError:
            continue
    return None


def lmcache_kernel(work: Work, direction: str) -> Callable[[], None] | None:
    """The kernel of LMCache 0.5, which moves one chunk at a time; None if it is not installed or does
    not support this."""
    try:
        from lmcache import c_ops
    except ImportError:
        return None
    formats = getattr(c_ops, "EngineKVFormat", None) or c_ops.GPUKVFormat
    way = getattr(c_ops.TransferDirection, "D2H" if direction == "read" else "H2D")
    pointers = torch.tensor([pages.data_ptr() for pages in work.pages], dtype=torch.int64).to(ON)
    slots = work.slots.to(ON)
    num_slots = work.pages[0].shape[1] * BLOCK_TOKENS
    head = {"block_size": BLOCK_TOKENS, "head_size": MODEL.head_size}

    def run() -> None:
        for segment, chunk in zip(work.segments, work.chunks, strict=True):
            c_ops.multi_layer_kv_transfer(
                chunk.tensor, pointers, slots[segment.start : segment.end], work.pages[0].device, num_slots, way,
                formats.NL_X_TWO_NB_BS_NH_HS, **head,
            )  # fmt: skip

    try:
        run()
        settle()
    except (TypeError, RuntimeError, AttributeError) as error:
        print(f"LMCache's kernel is left out: {error}")
        return None
    return run


def settle() -> None:
    if ON == "cuda":
        torch.cuda.synchronize()
