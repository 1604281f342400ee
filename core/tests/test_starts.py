"""The start of a chunk in its sequence: serializers receive it, whatever way the chunk came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_support import CHUNK, Shelf, tokens_of
from layers_codec import StreamsSerializer
from layers_support import DEEP, FAR, MEMORY, NEAR, SHELF, Open, store_layers

from kvloom import Buffers, Chunk, envelope
from kvloom.builtin.raw import RawSerializer

COUNT = 22
TOKENS = tokens_of(COUNT)
STARTS = list(range(0, COUNT - CHUNK + 1, CHUNK))
KV = torch.arange(COUNT).to(torch.bfloat16).expand(2, DEEP.num_layers, DEEP.hidden_dim, COUNT).transpose(2, 3).clone()
"""The KV of each token is its position."""

Starts = list[int | None]


def tiers_with(serializer: str, *tiers: dict[str, Any]) -> list[dict[str, Any]]:
    return [tier if tier is MEMORY else tier | {"serializer": serializer} for tier in tiers]


def told(chunk: Chunk) -> int | None:
    """The chunk's start. Checks that it agrees with its KV, unless it is None."""
    assert chunk.start is None or chunk.tensor[0, 0, :, 0].tolist() == [chunk.start + at for at in range(CHUNK)]
    return chunk.start


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """The starts that serializers receive when they encode."""
    seen: Starts = []
    for kind in (RawSerializer, StreamsSerializer):

        def spy(self: Any, chunk: Chunk, encode: Any = kind.encode) -> Buffers:
            seen.append(told(chunk))
            return encode(self, chunk)  # type: ignore[no-any-return]

        monkeypatch.setattr(kind, "encode", spy)
    return seen


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """The starts that they receive when they decode, whole chunks or layers of them."""
    seen: Starts = []
    decode, decode_layers = StreamsSerializer.decode, StreamsSerializer.decode_layers

    def spy(self: Any, blob: Buffers, into: Chunk) -> None:
        decode(self, blob, into)
        seen.append(told(into))

    def spy_layers(self: Any, blob: Buffers, layers: range, into: Chunk) -> None:
        decode_layers(self, blob, layers, into)
        seen.append(told(into))

    monkeypatch.setattr(StreamsSerializer, "decode", spy)
    monkeypatch.setattr(StreamsSerializer, "decode_layers", spy_layers)
    return seen


SERIALIZERS = pytest.mark.parametrize("serializer", ["raw", "streams"])


@SERIALIZERS
@pytest.mark.parametrize("tiers", [(MEMORY, NEAR, FAR), (NEAR, FAR)], ids=["memory", "stored"])
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_of_what_is_stored(
    open_engine: Open, encoded: Starts, serializer: str, tiers: tuple[dict[str, Any], ...], by_layer: bool
) -> None:
    engine = open_engine(*tiers_with(serializer, *tiers), spec=DEEP)
    store_layers(engine, TOKENS, KV) if by_layer else engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    assert sorted(encoded) == sorted(2 * STARTS)


@pytest.mark.parametrize("first", [1, 2])
def test_of_what_begins_behind_others(open_engine: Open, encoded: Starts, first: int) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    engine.store(TOKENS, torch.arange(COUNT) >= first * CHUNK, kv=KV)
    assert engine.flush(20)
    assert sorted(encoded) == STARTS[first:]


def test_of_what_memory_had_before_the_tier_below(open_engine: Open, encoded: Starts) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    engine.tiers["shelf"].clear("")  # type: ignore[attr-defined]
    encoded.clear()
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    assert sorted(encoded) == STARTS


@SERIALIZERS
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.usefixtures("ranges")
def test_of_what_is_promoted(
    open_engine: Open, encoded: Starts, decoded: Starts, serializer: str, by_layer: bool
) -> None:
    with open_engine(*tiers_with(serializer, FAR), spec=DEEP) as engine:
        engine.store(TOKENS, kv=KV)
    encoded.clear()
    engine = open_engine(*tiers_with(serializer, MEMORY, NEAR, FAR), spec=DEEP)
    got = torch.zeros_like(KV)
    if by_layer:
        with engine.retrieve_layer(TOKENS, kv=got) as loading:
            assert [int(mask.sum()) for _, mask in loading] == [len(STARTS) * CHUNK] * DEEP.num_layers
    else:
        assert int(engine.retrieve(TOKENS, kv=got).sum()) == len(STARTS) * CHUNK
    assert engine.flush(20)
    assert sorted(encoded) == STARTS
    assert sorted(set(decoded)) == (STARTS if serializer == "streams" else [])  # type: ignore[type-var]


def test_of_what_is_written_when_memory_lets_go(open_engine: Open, encoded: Starts) -> None:
    with open_engine(FAR, spec=DEEP) as engine:
        engine.store(TOKENS[:8], kv=KV[:, :, :8])
    encoded.clear()
    with open_engine(MEMORY, NEAR | {"write": "on_evict"}, FAR | {"write": "never"}, spec=DEEP) as engine:
        engine.store(TOKENS, kv=KV)
        assert int(engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).sum()) == len(STARTS) * CHUNK
    assert sorted(encoded) == STARTS


def test_of_what_an_earlier_release_wrote_nothing_is_known(open_engine: Open, encoded: Starts) -> None:
    with open_engine(FAR, spec=DEEP) as engine:
        engine.store(TOKENS, kv=KV)
    far = Shelf.shelves["far"]
    for key, blob in far.blobs.items():
        header, payload = envelope.unseal(blob, key=key)
        nothing = header.description._replace(start=None)
        far._blobs[key] = b"".join(envelope.seal(nothing, envelope.split(header, payload)))
    encoded.clear()
    engine = open_engine(MEMORY, NEAR, FAR, spec=DEEP)
    assert int(engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).sum()) == len(STARTS) * CHUNK
    assert engine.flush(20)
    assert encoded == [None] * len(STARTS)


def test_of_what_comes_without_its_sequence_nothing_is_known(open_engine: Open, encoded: Starts) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    engine.tiers["shelf"].put(engine.segments(TOKENS)[1].key, KV[:, :, CHUNK : 2 * CHUNK])
    assert encoded == [None]
