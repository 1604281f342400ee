"""KV by tokens: along any axis, of any spec, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import Chunk, ChunkKey, Engine, KVSpec, MemoryFormat, Segment
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.nested_tuple import NestedTupleConnector

SPEC = KVSpec("m", 2, 2, 8, "bfloat16")


def connector(spec: KVSpec = SPEC, token_dim: int = 0) -> NestedTupleConnector:
    return NestedTupleConnector(NestedTupleConnector.Config(token_dim=token_dim), spec)


@settings(max_examples=100, deadline=None)
@given(
    planes=st.integers(1, 2), heads=st.integers(1, 3), size=st.integers(1, 5), joined=st.booleans(),
    ones=st.integers(0, 2), token_dim=st.integers(0, 4), start=st.integers(0, 3), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_tokens_along_any_axis(
    planes: int, heads: int, size: int, joined: bool, ones: int, token_dim: int, start: int, seed: int
) -> None:
    spec = KVSpec("m", 2, heads, size, "float32", kv_planes=planes)
    inner = [1] * ones + ([spec.hidden_dim] if joined else [heads, size])
    token_dim = min(token_dim, len(inner))
    kv = torch.rand(spec.blob_shape(7), generator=torch.Generator().manual_seed(seed))
    there = [[plane.view(7, *inner).movedim(0, token_dim) for plane in layer] for layer in kv.transpose(0, 1)]
    it, segment = connector(spec, token_dim), Segment(start, 6, ChunkKey("0/-", 0, bytes(32)))
    it.check({"kvcaches": there}, 7)
    chunk = Chunk(torch.zeros(spec.blob_shape(6 - start)), MemoryFormat.KV_BLOB, 6 - start)
    it.read([segment], [chunk], kvcaches=there)
    assert torch.equal(chunk.tensor, kv[:, :, start:6])
    before = kv.clone()
    it.write([segment], [Chunk(chunk.tensor + 1, chunk.format, chunk.num_tokens)], kvcaches=there)
    before[:, :, start:6] += 1
    assert torch.equal(kv, before)


def kv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


REFUSED = [
    (None, "expected for each layer a pair"),
    (kv(2, 2, 9, 2, 8), "expected for each layer a pair"),
    ([(kv(9, 2, 8), kv(9, 2, 8))], "1 layers, the model has 2"),
    ([kv(9, 2, 8)] * 2, r"kvcaches\[0\]: expected a pair"),
    ([(kv(9, 2, 8),)] * 2, "expected a pair"),
    ([(kv(9, 2, 8), kv(9, 2, 8, dtype=torch.float16))] * 2, "expected a tensor of torch.bfloat16, got torch.float16"),
    ([(kv(9, 2, 8), None)] * 2, "expected a tensor of torch.bfloat16, got NoneType"),
    ([(kv(9, 8, 2), kv(9, 8, 2))] * 2, r"\[9, 8, 2\] is not \[2, 8\] for each token of axis 0"),
    ([(kv(9, 17), kv(9, 17))] * 2, "is not"),
    ([(kv(9, 2, 8), kv(7, 2, 8))] * 2, "room for 7 tokens, not 8"),
]


@pytest.mark.parametrize(("kvcaches", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_wrong_is_said(kvcaches: Any, message: str) -> None:
    connector().check({"kvcaches": [(kv(9, 2, 8), kv(9, 1, 16))] * 2}, 8)
    with pytest.raises(ValueError, match=message):
        connector().check({"kvcaches": kvcaches}, 8)
    with pytest.raises(ValueError, match="cache: the nested_tuple connector takes"):
        connector().check({"kvcaches": [(kv(9, 2, 8), kv(9, 2, 8))] * 2, "cache": 1}, 8)


@pytest.mark.parametrize("shape", [(7, 2, 8), (8, 1, 8)])
def test_a_chunk_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    chunk = Chunk(kv(2, 2, 7, 16), MemoryFormat.KV_BLOB, 7)
    with pytest.raises(ValueError, match=r"chunk: of tokens 0 to 8, expected \[2, 2, 8, 16\]"):
        connector().write(
            [Segment(0, 8, ChunkKey("0/-", 0, bytes(32)))], [chunk], kvcaches=[(kv(9, 2, 8), kv(9, 2, 8))] * 2
        )


def test_engines_share_kv_whichever_connector_they_have() -> None:
    """KV stored from pairs is retrieved into pages: one fingerprint, one form of chunks."""
    spec, tokens = KVSpec("m", 2, 2, 8, "float32"), torch.arange(32)
    config = {"connector": "nested_tuple", "chunk_tokens": 16, "tiers": ["memory"]}
    pairs = torch.rand(2, 2, 32, 2, 8)
    pages = torch.zeros(2, 10, 2, 4, 16)  # [layers, B, H, N, K | V]
    table = torch.tensor([7, 3, 9, 0, 1, 8, 2, 5])
    with Engine.open(config, spec) as engine:
        engine.store(tokens, kvcaches=[tuple(layer) for layer in pairs])
        other = PagedConnector(PagedConnector.Config(), spec)
        assert other.format is engine.connector.format and other.representation == engine.connector.representation
        engine.connector = other
        assert engine.retrieve(tokens, kvcaches=list(pages), block_table=table).all()
    found = pages[:, table].permute(0, 1, 3, 2, 4).flatten(1, 2)  # [layers, tokens, H, K | V]
    assert torch.equal(found[..., :8], pairs[:, 0]) and torch.equal(found[..., 8:], pairs[:, 1])


def test_a_wrong_setting_is_said_at_start() -> None:
    with pytest.raises(ValueError, match=r"connector\.token_dim"):
        Engine.open({"connector": {"type": "nested_tuple", "token_dim": -1}, "tiers": ["memory"]}, SPEC)
    with pytest.raises(ValueError, match=r"connector\.layout"):
        Engine.open({"connector": {"type": "paged", "layout": "NHD"}, "tiers": ["memory"]}, SPEC)
