"""Blobs of a codec, layer by layer: read by range, verified, decoded, handed on; or whole, where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core_support import CHUNK, Gate, Shelf, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layers_codec import StreamsSerializer
from layers_support import (
    DEEP,
    KV,
    LAYERS,
    MEMORY,
    SHELF,
    TOKENS,
    Open,
    Ranges,
    by_layers,
    chunks_in,
    count,
    deep_kv,
    names_of,
    right,
    settled,
    until,
)  # fmt: skip

from kvloom import Chunk, CorruptBlobError, KVSpec, MemoryFormat, envelope
from kvloom.builtin.raw import RawSerializer

pytestmark = pytest.mark.usefixtures("ranges")
FORMS = pytest.mark.parametrize("form", ["layer", "plane", "pair"])
WITH_MEMORY = pytest.mark.parametrize("memory", [(MEMORY,), ()], ids=["memory", "stored only"])


@pytest.fixture
def codec() -> Iterator[type[StreamsSerializer]]:
    before, table = StreamsSerializer.before, StreamsSerializer.table
    yield StreamsSerializer
    StreamsSerializer.before, StreamsSerializer.table = staticmethod(before), staticmethod(table)


def streams(form: str = "layer", **more: object) -> dict[str, object]:
    return SHELF | {"serializer": {"type": "streams", "form": form, **more}}


def fill(open_engine: Open, tier: dict[str, object], **more: Any) -> list[str]:
    """A shelf with KV in `tier`'s form; the log of whole reads from now on."""
    with open_engine(tier, spec=more.pop("spec", DEEP)) as engine:
        engine.store(more.get("tokens", TOKENS), kv=more.get("kv", KV))
    return []


def gets_of(shelf: Shelf) -> list[str]:
    gets: list[str] = []
    shelf.before = lambda verb, key: gets.append(key) if verb == "get" else None
    return gets


def header_of(name: str) -> envelope.Header:
    return envelope.unseal(Shelf.shelves["default"]._blobs[name], key=name)[0]


def damage(name: str, number: int) -> None:
    """Flip a bit in a buffer of a blob."""
    shelf, header = Shelf.shelves["default"], header_of(name)
    blob = bytearray(shelf._blobs[name])
    blob[header.header_bytes + sum(header.lengths[:number]) + header.lengths[number] // 2] ^= 1
    shelf._blobs[name] = bytes(blob)


@FORMS
@WITH_MEMORY
@pytest.mark.parametrize("timed", [False, True], ids=["", "timed"])
def test_layers_of_a_codec_come_by_range(
    open_engine: Open, ranges: Ranges, form: str, memory: tuple[dict[str, object], ...], timed: bool
) -> None:
    tier = streams(form, **({"timed": True} if timed else {}))
    fill(open_engine, tier)
    engine = open_engine(*memory, tier, spec=DEEP)
    assert len(set(header_of(names_of(engine)[0]).lengths)) > 2, "each layer is as long as it is"
    gets = gets_of(Shelf.shelves["default"])
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    assert not gets, "nothing was read whole"
    got = torch.zeros_like(KV)
    assert engine.retrieve(TOKENS, kv=got).all() and torch.equal(got, KV), "what was put together is the chunk"
    assert bool(memory) == (not gets)


def test_a_layer_of_a_codec_is_there_while_the_next_is_being_read(
    open_engine: Open, ranges: Ranges, gate: Gate, codec: type[StreamsSerializer]
) -> None:
    fill(open_engine, streams())
    engine = open_engine(MEMORY, streams(), spec=DEEP)
    codec.before = staticmethod(lambda layers: gate("decode", "") if layers.start else None)
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        assert loading.wait(0).all() and torch.equal(got[:, 0], KV[:, 0]) and not got[:, 1:].any()
        gate.open()
        assert loading.result().all() and torch.equal(got, KV)
    assert settled(engine)


def test_two_who_load_what_is_encoded_read_and_decode_it_once(
    open_engine: Open, gate: Gate, ranges: Ranges, codec: type[StreamsSerializer]
) -> None:
    fill(open_engine, streams())
    engine = open_engine(MEMORY, streams(), spec=DEEP)
    decoded: list[int] = []

    def before(layers: range) -> None:
        decoded.extend(layers)
        gate("decode", "")

    codec.before = staticmethod(before)
    gets = gets_of(Shelf.shelves["default"])
    first, second = torch.zeros_like(KV), torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=first) as one, engine.retrieve_layer(TOKENS, kv=second) as two:
        until(lambda: len(engine._stack.stored[0].loads.inflight._open) == 4)
        task = engine.prefetch(TOKENS)
        gate.open()
        assert one.result().all() and two.result().all() and task.result(20).all()
    assert torch.equal(first, KV) and torch.equal(second, KV) and settled(engine)
    assert sorted(decoded) == sorted(list(range(LAYERS)) * 4) and not gets


@FORMS
@given(data=st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_layer_of_a_codec_ends_the_prefix(open_engine: Open, form: str, data: st.DataObject) -> None:
    Shelf.shelves.clear()
    fill(open_engine, streams(form))
    chunk = data.draw(st.integers(0, 3))
    with open_engine(MEMORY, streams(form), spec=DEEP) as engine:
        name = names_of(engine)[chunk]
        number = data.draw(st.integers(0, len(header_of(name).lengths) - 1))
        damage(name, number)
        first = {"layer": number - 1, "plane": (number - 1) % LAYERS, "pair": 2 * (number - 1)}[form] if number else 0
        got, masks = by_layers(engine)
        assert chunks_in(masks) == [4] * first + [chunk] * (LAYERS - first) and right(got, KV, masks)
        assert name not in Shelf.shelves["default"].blobs and count(engine, "corrupt") == 1


def test_a_codec_is_never_handed_what_was_not_verified(open_engine: Open, codec: type[StreamsSerializer]) -> None:
    fill(open_engine, streams())
    engine = open_engine(MEMORY, streams(), spec=DEEP)
    decoded: list[int] = []
    codec.before = staticmethod(decoded.extend)
    for name in names_of(engine):
        damage(name, 4)
    _, masks = by_layers(engine)
    assert chunks_in(masks)[:3] == [4] * 3 and chunks_in(masks)[3:] == [0] * 3
    assert decoded and not {3, 4} & set(decoded), "they come together, and the first of them is damaged"


def test_a_codec_that_finds_layers_corrupt_is_asked_for_the_whole(
    open_engine: Open, codec: type[StreamsSerializer]
) -> None:
    fill(open_engine, streams())
    engine = open_engine(MEMORY, streams(), spec=DEEP)

    def before(layers: range) -> None:
        if 3 in layers:
            raise CorruptBlobError("odd")

    codec.before = staticmethod(before)
    gets = gets_of(Shelf.shelves["default"])
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks) and len(gets) == 4


def test_a_codec_that_raises_at_layers_is_tried_with_the_whole(
    open_engine: Open, codec: type[StreamsSerializer]
) -> None:
    fill(open_engine, streams())
    engine = open_engine(MEMORY, streams(), spec=DEEP)

    def before(layers: range) -> None:
        if 3 in layers:
            raise RuntimeError("a bug")

    codec.before = staticmethod(before)
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    assert count(engine, "tier_error") >= 1 and count(engine, "corrupt") == 0 and engine.health().ok


@pytest.mark.parametrize(
    "answer",
    [None, [], [[0, 1]] * (LAYERS - 1), [[0, 99]] * LAYERS, [[-1]] * LAYERS],
    ids=["none", "empty", "too short", "beyond the end", "negative"],
)
def test_a_blob_whose_layers_nobody_can_name_is_read_whole(
    open_engine: Open, codec: type[StreamsSerializer], answer: Any
) -> None:
    fill(open_engine, streams())
    engine = open_engine(MEMORY, streams(), spec=DEEP)
    codec.table = staticmethod(lambda numbers: answer)
    gets = gets_of(Shelf.shelves["default"])
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks) and len(gets) == 4


def test_what_was_encoded_with_other_settings_is_read_by_its_own(open_engine: Open) -> None:
    """`params` are those of the blob. (This codec's `decode` has none, so that only `layer_buffers` is told.)"""
    fill(open_engine, streams("plane"))
    seen: list[str] = []
    numbers = StreamsSerializer.layer_buffers

    def spy(self: Any, lengths: Any, like: Chunk, params: Any) -> Any:
        seen.append(params["form"])
        assert like.tensor.device.type == "meta" and tuple(like.tensor.shape) == DEEP.blob_shape(CHUNK)
        return numbers(self, lengths, like, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamsSerializer, "layer_buffers", spy)
        by_layers(open_engine(MEMORY, streams("layer"), spec=DEEP))
    assert set(seen) == {"plane"}


def test_layers_of_a_lossy_codec_are_kept_as_lossy(open_engine: Open) -> None:
    lossy = SHELF | {"serializer": "lossy_streams"}
    fill(open_engine, lossy)
    engine = open_engine(MEMORY, lossy, spec=DEEP)
    want = torch.where(KV > 0, 1.0, -1.0).to(KV.dtype)
    gets = gets_of(Shelf.shelves["default"])
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, want, masks) and not gets
    memory, keys = engine._stack.memory, [segment.key for segment in engine.segments(TOKENS)]
    assert memory.find(keys) == [True] * 4 and memory.find(keys, exact=True) == [False] * 4


def there_and_back(open_engine: Open, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    Shelf.shelves.clear()
    layers, planes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2))
    spec = KVSpec("m", num_layers=layers, num_kv_heads=1, head_size=data.draw(st.sampled_from([1, 3, 64])),
                  dtype=data.draw(st.sampled_from(["bfloat16", "float32", "uint8"])), kv_planes=planes)  # fmt: skip
    monkeypatch.setattr("kvloom.tiers.stored.layer_ranges.RANGE_BYTES", data.draw(st.sampled_from([1, 700, 1 << 20])))
    total = data.draw(st.integers(0, 30))
    tokens, kv = tokens_of(total), deep_kv(total, spec) if spec.dtype != "uint8" else torch.zeros(0)
    if spec.dtype == "uint8":
        kv = torch.randint(0, 256, spec.blob_shape(total), dtype=torch.uint8)
    tier = streams(data.draw(st.sampled_from(["layer", "plane", "pair"])))
    memory = data.draw(st.sampled_from([(), (MEMORY,), ({"type": "memory", "capacity": "64KiB"},)]))
    with open_engine(tier, spec=spec) as engine:
        engine.store(tokens, kv=kv)
    with open_engine(*memory, tier, spec=spec) as engine:
        gets = gets_of(Shelf.shelves["default"])
        got, masks = by_layers(engine, tokens, kv)
        assert chunks_in(masks) == [total // CHUNK] * layers and right(got, kv, masks) and not gets


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(open_engine: Open, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    there_and_back(open_engine, monkeypatch, data)


@given(planes=st.integers(1, 2), layers=st.integers(1, 6), data=st.data())
def test_raw_decodes_layers_as_any_other(planes: int, layers: int, data: st.DataObject) -> None:
    """The core reads raw layers to where they belong; one who wraps `raw` may want them decoded."""
    kv = torch.randn(planes, layers, 3, 8)
    chunk = Chunk(kv, MemoryFormat.KV_BLOB, 3)
    serializer = RawSerializer(RawSerializer.Config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvloom.builtin.raw._SMALL_BYTES", 0)
        blob = [bytearray(part) for part in serializer.encode(chunk)]
    numbers = serializer.layer_buffers([len(part) for part in blob], chunk, {})
    assert numbers is not None and serializer.layer_buffers([kv.nbytes - 1], chunk, {}) is None
    start = data.draw(st.integers(0, layers - 1))
    some = range(start, data.draw(st.integers(start + 1, layers)))
    into = torch.zeros(planes, layers + 1, 3, 8)[:, 1 : 1 + len(some)]
    wanted = [blob[number] for number in sorted({number for layer in some for number in numbers[layer]})]
    serializer.decode_layers(wanted, some, Chunk(into, MemoryFormat.KV_BLOB, 3))
    assert torch.equal(into, kv[:, some.start : some.stop])
    with pytest.raises(CorruptBlobError, match="not as long"):
        serializer.decode_layers(wanted[:-1], some, Chunk(into, MemoryFormat.KV_BLOB, 3))
