"""Blobs without layers are read whole, or refused; and misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_support import Shelf
from layers_support import (
    DEEP,
    KV,
    LAYERS,
    MEMORY,
    SHELF,
    TOKENS,
    Open,
    by_layers,
    chunks_in,
    damage,
    fill,
    names_of,
    right,
    settled,
)

from kvloom import StorageBackend

pytestmark = pytest.mark.usefixtures("ranges")


def test_blobs_without_layers_are_read_whole(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer, another serializer, or a backend that reads no ranges: slower, but right."""
    monkeypatch.setattr("kvloom.builtin.raw._SMALL_BYTES", 1 << 20)
    fill(open_engine)
    got, masks = by_layers(open_engine(MEMORY, SHELF, spec=DEEP))
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    lossy = SHELF | {"serializer": "signs", "shelf": "lossy"}
    with open_engine(lossy, spec=DEEP) as engine:
        engine.store(TOKENS, kv=KV)
    got, masks = by_layers(open_engine(MEMORY, lossy, spec=DEEP))
    assert chunks_in(masks) == [4] * LAYERS and right(got, torch.where(KV > 0, 1.0, -1.0).to(KV.dtype), masks)
    monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    damage(Shelf.shelves["default"], names_of(engine)[2], layer=4)
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [2] * LAYERS and right(got, KV, masks)


def test_what_is_held_makes_room_for_what_is_read_whole(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of the prompt fills memory; the other half has to come through it."""
    monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    fill(open_engine)
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF, spec=DEEP)
    assert engine.retrieve(TOKENS[:8], kv=torch.zeros_like(KV)).all()
    assert engine._stack.memory.pool.used_bytes == 16 << 10
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    assert not [key for key in engine.counters() if key.name == "missed"]


@pytest.mark.parametrize("at", range(4))
def test_a_chunk_that_is_read_whole_is_asked_for_once(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """There is room for one at a time, and one is gone."""
    monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    fill(open_engine)
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF, spec=DEEP)
    names, shelf = names_of(engine), Shelf.shelves["default"]
    asked: list[str] = []

    def lose(verb: str, key: str) -> None:
        if verb == "get":
            asked.append(key)
            shelf._blobs.pop(names[at], None)

    shelf.before = lose
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [at] * LAYERS and right(got, KV, masks)
    assert len(asked) == len(set(asked)) and set(names[: at + 1]) <= set(asked)


def test_a_connector_without_layers_is_refused(open_engine: Open) -> None:
    engine = open_engine(MEMORY, connector="pages", spec=DEEP)
    for verb in (engine.retrieve_layer, engine.store_layer):
        with pytest.raises(NotImplementedError, match="'pages' has KV_PAGES, which has no layers"):
            verb(TOKENS, kv=KV)


def test_a_connector_that_fails_says_so_and_nothing_is_lost(open_engine: Open) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)

    def write_layer(layer: int, segments: Any, chunks: Any, **where: Any) -> None:
        if layer == 3:
            raise RuntimeError("the device is gone")

    engine.connector.write_layer = write_layer  # type: ignore[method-assign]
    with engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV)) as loading:
        assert loading.wait(2).all()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is gone"):
                loading.result()
    assert settled(engine)


def test_misuse_is_a_value_error(open_engine: Open) -> None:
    engine = open_engine(MEMORY, spec=DEEP)
    with pytest.raises(ValueError, match="kv: expected"):
        engine.retrieve_layer(TOKENS, kv=KV[:1])
    with pytest.raises(ValueError, match="whole number of chunks"):
        engine.retrieve_layer(TOKENS, torch.arange(16) >= 3, kv=KV)
    with engine.retrieve_layer(TOKENS, kv=KV) as loading:
        assert chunks_in([loading.result()]) == [0] and not loading.hit
        for layer in (-1, LAYERS):
            with pytest.raises(ValueError, match=f"layer: {layer} of 6"):
                loading.wait(layer)
    with engine.store_layer(TOKENS, kv=KV) as storing:
        with pytest.raises(ValueError, match="layer: 6 of 6"):
            storing.layer(6)
        with pytest.raises(ValueError, match="kv: expected"):
            storing.layer(0, kv=KV[:1])
    assert settled(engine) and not len(engine._stack.memory)


@pytest.mark.parametrize("kept", [4, 2])
def test_layers_that_come_together_are_written_by_one_call(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    if kept < 4:
        damage(Shelf.shelves["default"], names_of(engine)[kept], layer=4)
    write, written = engine.connector.write, list[int]()

    def count(segments: Any, chunks: Any, **where: Any) -> None:
        written.extend(segment.start for segment in segments)
        write(segments, chunks, **where)

    monkeypatch.setattr(engine.connector, "write", count)
    monkeypatch.setattr(engine.connector, "write_layer", None)
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [kept] * LAYERS and right(got, KV, masks)
    assert written == [segment.start for segment in engine.segments(TOKENS)][:kept]
