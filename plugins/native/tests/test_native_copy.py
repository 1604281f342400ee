"""Chunks that are copied natively are those that torch copies, and nothing beside them is touched."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloom import Chunk, ChunkKey, KVSpec, MemoryFormat, Segment
from kvloom.builtin import plain
from kvloom.builtin.plain import PlainConnector
from kvloom.pipeline.layer_read import layer_of

pytestmark = pytest.mark.skipif(plain._native_copy() is None, reason="no C++ compiler has built the library")

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
MARGIN = 64


def within(tokens: int, spec: KVSpec, offset: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of random bytes, and KV that lies in it, `offset` elements behind its beginning."""
    shape = spec.blob_shape(tokens)
    elements = torch.Size(shape).numel()
    memory = torch.randint(0, 120, (elements + 2 * MARGIN,), dtype=torch.uint8, generator=generator)
    memory = memory.repeat_interleave(spec.torch_dtype.itemsize)
    return memory, memory.view(spec.torch_dtype)[offset : offset + elements].view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


PAST_CACHE = {"layers": 1, "hidden": 7001, "before": 1}


@example(lengths=[30] * 6, dtype="bfloat16", offset=3, seed=0, **PAST_CACHE)
@example(lengths=[70] * 6, dtype="float8_e4m3fn", offset=5, seed=1, **PAST_CACHE)
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    layers=st.integers(1, 3),
    hidden=st.one_of(st.integers(1, 70), st.just(7001)),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, MARGIN),
    before=st.integers(0, 50),
    seed=st.integers(0, 1000),
)
def test_native_copies_are_those_of_torch(
    lengths: list[int], layers: int, hidden: int, dtype: str, offset: int, before: int, seed: int
) -> None:
    spec = KVSpec(model="m", num_layers=layers, num_kv_heads=1, head_size=hidden, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    segments, chunks, start = [], [], before
    for length in lengths:
        _, tensor = within(length, spec, offset, generator)
        segments.append(Segment(start, start + length, ChunkKey("n/-", 0, bytes(32))))
        chunks.append(Chunk(tensor, MemoryFormat.KV_BLOB, length))
        start += length + seed % 3
    memory, kv = within(start, spec, offset, generator)
    connector = PlainConnector(PlainConnector.Config(), spec)

    same = memory.clone()
    same_kv = same.view(spec.torch_dtype)[offset : offset + kv.numel()].view(kv.shape)
    assert plain._copied(kv, segments, chunks, to_kv=True) == (max(map(nbytes, chunks)) <= 1 << 20)
    connector.write(segments, chunks, kv=kv)
    for segment, chunk in zip(segments, chunks, strict=True):
        same_kv[:, :, segment.start : segment.end] = chunk.tensor
    assert torch.equal(memory, same)

    got = [dataclasses.replace(chunk, tensor=torch.zeros_like(chunk.tensor)) for chunk in chunks]
    connector.read(segments, got, kv=kv)
    assert all(torch.equal(bits(one.tensor), bits(chunk.tensor)) for one, chunk in zip(got, chunks, strict=True))
    assert torch.equal(memory, same)

    memory, kv = within(start, spec, offset, torch.Generator().manual_seed(seed + 1))
    same = memory.clone()
    same_kv = same.view(spec.torch_dtype)[offset : offset + kv.numel()].view(kv.shape)
    for one in got:
        one.tensor.zero_()
    for layer in reversed(range(layers)):
        views = [layer_of(chunk, layer) for chunk in chunks]
        with patch.object(plain, "_LEAST_LAYER_BYTES", 0):
            connector.write_layer(layer, segments, views, kv=kv)
            connector.read_layer(layer, segments, [layer_of(one, layer) for one in got], kv=kv)
        for segment, view in zip(segments, views, strict=True):
            same_kv[:, layer : layer + 1, segment.start : segment.end] = view.tensor
        assert torch.equal(memory, same)
    assert all(torch.equal(bits(one.tensor), bits(chunk.tensor)) for one, chunk in zip(got, chunks, strict=True))


def nbytes(chunk: Chunk) -> int:
    return chunk.nbytes


SPEC = KVSpec(model="m", num_layers=2, num_kv_heads=1, head_size=4, dtype="float32")
SEGMENT = Segment(4, 8, ChunkKey("n/-", 0, bytes(32)))


class Odd(torch.Tensor):
    pass


def emptied(offset: int) -> torch.Tensor:
    kv = torch.zeros(4 + 2 * 2 * 8 * 4)[offset : offset + 2 * 2 * 8 * 4].view(2, 2, 8, 4)
    kv.untyped_storage().resize_(0)
    return kv


@pytest.mark.parametrize(
    ("kv", "tensor"),
    [
        (torch.zeros(2, 2, 7, 4), torch.ones(2, 2, 4, 4)),  # ends before the segment
        (torch.zeros(2, 2, 8, 8)[..., ::2], torch.ones(2, 2, 4, 4)),
        (torch.zeros(2, 2, 8, 4), torch.ones(2, 4, 2, 4).transpose(1, 2)),
        (torch.zeros(2, 2, 8, 4), torch.ones(2, 2, 4, 4, dtype=torch.float64)),
        (torch.zeros(2, 2, 8, 4), torch.ones(2, 2, 3, 4)),
        (torch.zeros(2, 2, 8, 4), torch.ones(2, 2, 1, 4)),
        (torch.zeros(2, 2, 8, 4, device="meta"), torch.ones(2, 2, 4, 4)),
        (torch.zeros(2, 2, 8, 4), torch.ones(2, 2, 4, 4, device="meta")),
        (torch.zeros(2, 2, 8, 4), torch._neg_view(torch.ones(2, 2, 4, 4))),
        (torch._neg_view(torch.zeros(2, 2, 8, 4)), torch.ones(2, 2, 4, 4)),
        (torch.zeros(2, 2, 8, 4).as_subclass(Odd), torch.ones(2, 2, 4, 4)),
        (torch.zeros(2, 2, 8, 4), torch._efficientzerotensor((2, 2, 4, 4))),
        (torch.zeros(2, 2, 8, 0), torch.ones(2, 2, 4, 0)),
        (torch.zeros(2, 2, 8, 4, 1), torch.ones(2, 2, 4, 4, 1)),
        (torch.zeros(2, 2, 8), torch.ones(2, 2, 4)),
    ],
)
def test_what_it_does_not_take_is_left_to_torch(
    kv: torch.Tensor, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> Any:
        there = kv.clone()
        try:
            PlainConnector(PlainConnector.Config(), SPEC).write(
                [SEGMENT], [Chunk(tensor, MemoryFormat.KV_BLOB, 4)], kv=there
            )
        except (RuntimeError, NotImplementedError) as error:  # what torch says of shapes, and of `meta`
            return type(error), str(error)
        return there.tolist() if there.device.type == "cpu" else None

    natively = outcome()
    monkeypatch.setattr(plain, "_native_copy", lambda: None)
    assert natively == outcome()


@pytest.mark.parametrize(
    ("layer", "tensor"),
    [
        (2, torch.ones(2, 1, 4, 4)),  # there are two
        (-1, torch.ones(2, 1, 4, 4)),
        (1, torch.ones(2, 1, 4, 4).transpose(2, 3)),
        (1, torch.ones(1, 1, 4, 4).expand(2, 1, 4, 4)),
        (1, torch.ones(2, 2, 4, 4)),
        (1, torch._neg_view(torch.ones(2, 1, 4, 4))),
        (1, torch.ones(2, 1, 4, 4).as_subclass(Odd)),
    ],
)
def test_of_layers_neither(layer: int, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_LEAST_LAYER_BYTES", 0)

    def outcome() -> Any:
        kv = torch.zeros(2, 2, 8, 4)
        chunk = Chunk(tensor, MemoryFormat.KV_BLOB, 4)
        assert not plain._copied(kv, [SEGMENT], [chunk], to_kv=True, layer=layer)
        try:
            PlainConnector(PlainConnector.Config(), SPEC).write_layer(layer, [SEGMENT], [chunk], kv=kv)
        except RuntimeError as error:
            return str(error)
        return kv.tolist()

    natively = outcome()
    monkeypatch.setattr(plain, "_native_copy", lambda: None)
    assert natively == outcome()


@pytest.mark.parametrize("offset", [0, 4])
def test_kv_without_memory_is_refused_by_torch(offset: int) -> None:
    chunk = Chunk(torch.ones(2, 2, 4, 4), MemoryFormat.KV_BLOB, 4)
    with pytest.raises(RuntimeError, match="out of bounds"):
        PlainConnector(PlainConnector.Config(), SPEC).write([SEGMENT], [chunk], kv=emptied(offset))


@pytest.mark.parametrize(("tokens", "natively"), [(127, False), (128, True)])
def test_layers_that_the_cache_holds_are_left_to_torch(tokens: int, natively: bool) -> None:
    spec = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=1 << 10, dtype="float32")
    segments = [Segment(at, at + tokens, SEGMENT.key) for at in range(0, 8 * tokens, tokens)]
    chunks = [Chunk(torch.ones(spec.blob_shape(tokens)), MemoryFormat.KV_BLOB, tokens) for _ in segments]
    kv = torch.zeros(spec.blob_shape(8 * tokens))
    assert plain._copied(kv, segments, chunks, to_kv=True, layer=0) == natively == bool(kv.all())


def test_torch_knows_that_the_kv_was_changed() -> None:
    kv = torch.zeros(2, 2, 8, 4)
    chunk = Chunk(torch.ones(2, 2, 4, 4), MemoryFormat.KV_BLOB, 4)
    assert plain._copied(kv, [SEGMENT], [chunk], to_kv=True) and kv._version == 1
    assert plain._copied(kv, [SEGMENT], [chunk], to_kv=False) and kv._version == 1
    with torch.inference_mode():
        assert plain._copied(torch.zeros(2, 2, 8, 4), [SEGMENT], [chunk], to_kv=True)
