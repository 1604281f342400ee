"""The connector alone: any segments, any row, both ways, and every `where` that it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

from kvloom import Chunk, ChunkKey, KVSpec, MemoryFormat, Segment
from kvloom_connector_transformers import RestoredKV, TransformersConnector, set_length

KEY = ChunkKey("f/-", 0, bytes(32))


def spec(**fields: Any) -> KVSpec:
    return KVSpec(**{"model": "m", "num_layers": 3, "num_kv_heads": 2, "head_size": 4, "dtype": "float32"} | fields)


def connector(**fields: Any) -> TransformersConnector:
    return TransformersConnector(TransformersConnector.Config(), spec(**fields))


def chunks_for(what: TransformersConnector, segments: list[Segment]) -> list[Chunk]:
    assert what.spec is not None
    return [
        Chunk(torch.zeros(what.shape(s.end - s.start), dtype=what.spec.torch_dtype), what.format, s.end - s.start)
        for s in segments
    ]


def dynamic(rows: int, tokens: int, layers: int = 3) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 4), layer)
    return cache


def static(make: Callable[..., PreTrainedModel], rows: int = 1, room: int = 32, **settings: Any) -> StaticCache:
    cache = StaticCache(config=make("llama", hidden_size=16, **settings).config, max_cache_len=room)
    cache.early_initialization(rows, 2, 4, torch.float32, torch.device("cpu"))
    return cache


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)) | st.integers(1, 5).map(lambda size: (size, size)),
    layers=st.integers(1, 3),
)
def test_read_then_write_is_the_identity(
    data: st.DataObject, rows: int, heads: int, sizes: tuple[int, int], layers: int
) -> None:
    planes = 1 + (sizes[0] == sizes[1])
    what = connector(num_layers=layers, num_kv_heads=heads, head_size=sum(sizes) // planes, kv_planes=planes)
    ends = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=6)))
    segments = [Segment(start, end, KEY) for start, end in zip([0, *ends], ends, strict=False)]
    tokens, row = ends[-1] + data.draw(st.integers(0, 3)), data.draw(st.integers(0, rows - 1))
    source, target = (RestoredKV.allocate(what.spec, tokens, rows=rows, key_size=sizes[0]) for _ in range(2))
    what.check({"cache": source, "row": row}, tokens)
    for number, tensor in enumerate((*source.keys, *source.values)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000 * number)
    for tensor in (*target.keys, *target.values):
        tensor.fill_(-1)

    chunks = chunks_for(what, segments)
    what.read(segments, chunks, cache=source, row=row)
    cut = data.draw(st.integers(0, len(segments)))
    for part in (slice(None, cut), slice(cut, None)):
        what.write(segments[part], chunks[part], cache=target, row=row)

    for ours, theirs in zip((*target.keys, *target.values), (*source.keys, *source.values), strict=True):
        assert torch.equal(ours[row, :, : ends[-1]], theirs[row, :, : ends[-1]])
        assert bool((ours[row, :, ends[-1] :] == -1).all())
        assert bool((ours[torch.arange(rows) != row] == -1).all())


def test_layers_one_by_one_are_the_whole(make: Callable[..., PreTrainedModel]) -> None:
    what, source = connector(), dynamic(2, 12)
    segments = [Segment(0, 4, KEY), Segment(4, 12, KEY)]
    whole, parts = chunks_for(what, segments), chunks_for(what, segments)
    what.read(segments, whole, cache=source, row=1)
    targets = [RestoredKV.allocate(what.spec, 12, rows=2), dynamic(2, 12), static(make, rows=2, room=12)]
    for layer in (1, 0, 2):
        views = [Chunk(one.tensor[:, layer : layer + 1], one.format, one.num_tokens) for one in parts]
        what.read_layer(layer, segments, views, cache=source, row=1)
        for target in targets:
            what.write_layer(layer, segments, views, cache=target, row=1)
    for ours, theirs in zip(parts, whole, strict=True):
        assert torch.equal(ours.tensor, theirs.tensor)
    for target in targets:
        back = chunks_for(what, segments)
        if isinstance(target, StaticCache):
            assert int(target.get_seq_length()) == 0, "only a mask says how many tokens count"
            set_length(target, 12)
        what.read(segments, back, cache=target, row=1)
        for ours, theirs in zip(back, whole, strict=True):
            assert torch.equal(ours.tensor, theirs.tensor)


def test_a_layer_is_read_while_later_ones_are_not_there(make: Callable[..., PreTrainedModel]) -> None:
    what, segments = connector(), [Segment(0, 4, KEY)]
    views = [Chunk(one.tensor[:, :1], one.format, one.num_tokens) for one in chunks_for(what, segments)]
    cache = DynamicCache()
    for where, problem in (
        ({}, "cache: missing"),
        ({"cache": cache}, "layer 0 of the DynamicCache holds nothing yet"),
        ({"cache": dynamic(1, 3)}, "cache: layer 0 holds 3 tokens, not 4"),
        ({"cache": dynamic(1, 4), "row": 1}, "row: 1 of a cache with 1 rows"),
        ({"cache": static(make)}, "cache: layer 0 holds 0 tokens, not 4"),
        ({"cache": [1]}, "cache: list, not a DynamicCache"),
    ):
        with pytest.raises(ValueError, match=problem):
            what.read_layer(0, segments, views, **where)
    cache.update(torch.ones(1, 2, 4, 4), torch.ones(1, 2, 4, 4), 0)
    what.read_layer(0, segments, views, cache=cache)
    assert bool((views[0].tensor == 1).all())
    with pytest.raises(ValueError, match="layer 1 of the DynamicCache holds nothing yet"):
        what.read_layer(1, segments, views, cache=cache)


def test_chunk_layout_is_kv_blob() -> None:
    cache = dynamic(2, 9)
    (chunk,) = chunks = chunks_for(connector(), [Segment(3, 7, KEY)])
    connector().read([Segment(3, 7, KEY)], chunks, cache=cache, row=1)
    assert chunk.format is MemoryFormat.KV_BLOB and tuple(chunk.tensor.shape) == (2, 3, 4, 8)
    for layer in range(3):
        for token in range(4):
            assert torch.equal(chunk.tensor[0, layer, token].view(2, 4), cache.layers[layer].keys[1, :, 3 + token])
            assert torch.equal(chunk.tensor[1, layer, token].view(2, 4), cache.layers[layer].values[1, :, 3 + token])


def test_gradients_stay_out_of_chunks() -> None:
    cache = dynamic(1, 4)
    cache.layers[0].keys.requires_grad_()
    (chunk,) = chunks = chunks_for(connector(), [Segment(0, 4, KEY)])
    connector().read([Segment(0, 4, KEY)], chunks, cache=cache)
    assert not chunk.tensor.requires_grad


def test_writing_marks_what_is_not_exact() -> None:
    restored = RestoredKV.allocate(spec(), 8)
    segments = [Segment(0, 4, KEY), Segment(4, 8, KEY)]
    tensor = torch.zeros(connector().shape(4))
    chunks = [Chunk(tensor, MemoryFormat.KV_BLOB, 4), Chunk(tensor, MemoryFormat.KV_BLOB, 4, fidelity="cachegen-2")]
    connector().write(segments[:1], chunks[:1], cache=restored)
    assert restored.lossy == set()
    connector().write(segments[1:], chunks[1:], cache=restored)
    assert restored.lossy == {"cachegen-2"}


def test_static_cache_gets_the_length_of_the_last_run(make: Callable[..., PreTrainedModel]) -> None:
    cache = static(make)
    segments = [Segment(0, 8, KEY), Segment(8, 16, KEY)]
    chunks = chunks_for(connector(), segments)
    connector().write(segments[:1], chunks[:1], cache=cache)
    assert int(cache.get_seq_length()) == 8
    connector().write(segments[1:], chunks[1:], cache=cache)
    assert int(cache.get_seq_length()) == 16
    connector().write(segments[:1], chunks[:1], cache=cache)
    assert int(cache.get_seq_length()) == 8


def test_what_a_cache_does_not_hold_is_not_read(make: Callable[..., PreTrainedModel]) -> None:
    segments = [Segment(0, 8, KEY)]
    chunks = chunks_for(connector(), segments)
    with pytest.raises(ValueError, match="cache: holds 0 tokens, not 8"):
        connector().read(segments, chunks, cache=static(make))
    with pytest.raises(ValueError, match="cache: holds 5 tokens, not 8"):
        connector().read(segments, chunks, cache=dynamic(1, 5))


def test_check_accepts(make: Callable[..., PreTrainedModel]) -> None:
    connector().check({"cache": dynamic(2, 9), "row": 1}, 9)
    connector().check({"cache": static(make)}, 32)
    connector().check({"cache": RestoredKV.allocate(spec(), 5)}, 5)


def test_check_refuses_by_name(make: Callable[..., PreTrainedModel]) -> None:
    sliding = StaticCache(config=make("mistral", sliding_window=8).config, max_cache_len=9)
    for where, problem in (
        ({}, "cache: missing"),
        ({"cache": dynamic(1, 9), "kvcaches": 1}, "kvcaches: the transformers connector takes"),
        ({"cache": [1, 2]}, "cache: list, not a DynamicCache"),
        ({"cache": QuantizedCache.__new__(QuantizedCache)}, "cache: QuantizedCache, not"),
        ({"cache": DynamicCache()}, "holds nothing yet"),
        ({"cache": sliding}, "layer 0 is a StaticSlidingWindowLayer, not a StaticLayer"),
        ({"cache": StaticCache(config=make("llama").config, max_cache_len=9)}, "call early_initialization"),
        ({"cache": dynamic(1, 9), "row": 1}, "row: 1 of a cache with 1 rows"),
        ({"cache": dynamic(1, 9), "row": True}, "row: True"),
        ({"cache": dynamic(1, 8)}, "room for 8 tokens, not 9; to restore, write into a RestoredKV"),
        ({"cache": RestoredKV.allocate(spec(), 8)}, "room for 8 tokens, not 9"),
        ({"cache": dynamic(1, 9, layers=2)}, "2 layers, the model has 3"),
        ({"cache": RestoredKV.allocate(spec(num_kv_heads=1), 9)}, r"K of layer 0 has \(heads, head size\) \(1, 4\)"),
        (
            {"cache": RestoredKV.allocate(spec(dtype="bfloat16"), 9)},
            "K of layer 0 is torch.bfloat16, not torch.float32",
        ),
    ):
        with pytest.raises(ValueError, match=problem):
            connector().check(where, 9)


def test_one_plane_is_all_of_a_token() -> None:
    cache = RestoredKV.allocate(spec(head_size=10, kv_planes=1), 9, key_size=6)
    connector(head_size=10, kv_planes=1).check({"cache": cache}, 9)
    with pytest.raises(ValueError, match=r"K of layer 0 has \(heads, head size\) \(2, 6\), not \(2, 7\)"):
        connector(head_size=11, kv_planes=1).check({"cache": cache}, 9)
    for size in (0, 10):
        with pytest.raises(ValueError, match="key_size"):
            RestoredKV.allocate(spec(head_size=10, kv_planes=1), 9, key_size=size)


def test_offloading_caches_are_refused() -> None:
    cache = dynamic(1, 9)
    cache.offloading = True
    with pytest.raises(ValueError, match="offloading"):
        connector().check({"cache": cache}, 9)


def test_an_engine_of_another_connector_does_not_wait_for_transformers_to_import() -> None:
    code = """
import sys
from kvloom import Engine, KVSpec
spec = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=1, dtype="float32")
Engine.open({"connector": "plain", "tiers": ["memory"]}, spec).close()
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
