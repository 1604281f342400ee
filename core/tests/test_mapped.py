"""Reads of mapped chunks: verified once, read where they lie, and never used if they changed meanwhile."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from core_support import CHUNK, Gate, Pane, Shelf, Window, Witness, eventually
from faults_support import DAMAGE, KV, MEMORY, TOKENS, Open, chunk_names, count, misses, retrieve
from layers_support import DEEP, by_layers, chunks_in, deep_kv
from layers_support import TOKENS as DEEP_TOKENS
from mapped_support import WINDOW, filled, mapped, window

from kvloom import Engine, StorageBackend


def test_a_chunk_is_mapped_and_verified_once(open_engine: Open) -> None:
    engine = filled(open_engine)
    asked: list[str] = []
    window().before = lambda verb, key: asked.append(verb)
    for times in (1, 2, 3):
        assert retrieve(engine) == [True] * 4
        read = engine.counters()["retrieved", "window", ""]
        assert read.chunks == times * 4 and read.tokens == times * len(TOKENS)
        assert engine._stack.memory.pool.used_bytes == 0, "nothing is copied into the pool"
    assert asked.count("map") == 4 and "get" not in asked
    panes = window().panes
    assert not any(pane.closed for pane in panes)
    engine.close()
    assert all(pane.closed for pane in panes)


def test_a_request_for_what_is_mapped_asks_twice(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once before all is read, and once afterwards."""
    asked: list[int] = []

    def current_many(self: Window, blobs: Sequence[Pane]) -> list[bool]:
        asked.append(len(blobs))
        return StorageBackend.current_many(self, blobs)

    monkeypatch.setattr(Window, "current_many", current_many, raising=False)
    monkeypatch.setattr("kvloom.tiers.stored.maintenance.ROUND_SECONDS", 3600.0)  # a round asks about each
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    asked.clear()
    assert retrieve(engine) == [True] * 4
    assert asked == [4, 4]


def test_one_that_cannot_be_asked_about_is_mapped_anew(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    broken = window().panes[1]
    real = Pane.current

    def current(self: Pane) -> bool:
        if self is broken:
            raise OSError(5, "Input/output error")
        return real(self)

    monkeypatch.setattr(Pane, "current", current)
    assert retrieve(engine) == [True] * 4
    assert [pane.closed for pane in window().panes] == [False, True, False, False, False]
    engine.close()
    assert all(pane.closed for pane in window().panes)


def test_memory_gives_some_and_a_store_the_rest(open_engine: Open) -> None:
    with open_engine(WINDOW) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, WINDOW, observers=["witness"])
    assert retrieve(engine) == [True] * 4
    assert engine.prefetch(TOKENS[: 2 * CHUNK]).result().all()
    assert engine.pin(TOKENS[: 2 * CHUNK])
    assert retrieve(engine) == [True] * 4
    assert engine._events.flush(30)
    assert dict(Witness.made[-1].seen[-1][0].sources) == {"memory": 2 * CHUNK, "window": 2 * CHUNK}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_blob_that_is_no_good_is_not_used(open_engine: Open, damage: str) -> None:
    engine = filled(open_engine)
    names = chunk_names(engine)
    blobs = window()._blobs
    blobs[names[1]] = DAMAGE[damage](blobs[names[1]], blobs[names[2]])
    assert retrieve(engine) == [True, False, False, False]
    assert next(pane for pane in window().panes if pane.key == names[1]).closed
    assert misses(engine)["corrupt"] == 1


def test_a_blob_longer_than_a_chunk_can_need_is_not_mapped(open_engine: Open) -> None:
    engine = filled(open_engine)
    blobs, name = window()._blobs, chunk_names(engine)[0]
    blobs[name] = blobs[name] + bytes(1 << 20)
    assert retrieve(engine) == [False] * 4
    assert name not in {pane.key for pane in window().panes}
    assert misses(engine)["corrupt"] == 1


def test_what_the_store_has_no_more_is_not_served_and_what_is_stored_anew_is(open_engine: Open) -> None:
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    before = {pane.key: pane for pane in window().panes}
    name = chunk_names(engine)[2]
    engine.remove(TOKENS[: 3 * CHUNK])
    assert retrieve(engine) == [False] * 4
    engine.store(TOKENS, kv=KV)
    assert engine.flush() and retrieve(engine) == [True] * 4
    assert before[name].closed and len(window().panes) == 4 + 3, "the last one was there all the while"


def changed_while_moved(engine: Engine, name: str, method: str = "write") -> None:
    """From now on the blob is damaged as soon as a chunk has been moved."""
    move = getattr(engine.connector, method)

    def moved(*args: Any, **where: Any) -> Any:
        fence = move(*args, **where)
        window().damage(name)
        return fence

    setattr(engine.connector, method, moved)


@pytest.mark.parametrize("at", range(4))
def test_a_chunk_that_changes_while_it_is_read_counts_as_missed(open_engine: Open, at: int) -> None:
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    changed_while_moved(engine, chunk_names(engine)[at])
    got = torch.zeros_like(KV)
    mask = engine.retrieve(TOKENS, kv=got)
    assert mask[::CHUNK].tolist() == [place < at for place in range(4)]
    assert torch.equal(got[:, :, mask], KV[:, :, mask])
    assert misses(engine)["changed while it was read"] == 1


def test_a_chunk_that_is_evicted_while_it_is_read_is_served(open_engine: Open) -> None:
    """Its memory is still what it was: it is verified once more."""
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    move = engine.connector.write

    def moved(*args: Any, **where: Any) -> Any:
        fence = move(*args, **where)
        window()._blobs.clear()
        return fence

    engine.connector.write = moved  # type: ignore[method-assign]
    assert retrieve(engine) == [True] * 4
    assert retrieve(engine) == [False] * 4
    assert all(pane.closed for pane in window().panes)


def test_a_chunk_that_is_changed_and_changed_back_while_it_is_read_is_not_served(open_engine: Open) -> None:
    """To verify it again would say that it is right, and not what was copied."""
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    name, move = chunk_names(engine)[1], engine.connector.write

    def moved(*args: Any, **where: Any) -> Any:
        fence = move(*args, **where)
        window()._blobs[name] = bytes(bytearray(window()._blobs[name]))
        return fence

    engine.connector.write = moved  # type: ignore[method-assign]
    assert engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).tolist() == [True] * CHUNK + [False] * 3 * CHUNK


def test_what_comes_behind_a_chunk_that_changed_is_counted(open_engine: Open) -> None:
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    changed_while_moved(engine, chunk_names(engine)[1])
    engine.retrieve(TOKENS, kv=torch.zeros_like(KV))
    assert misses(engine) == {"changed while it was read": 1, "behind a miss": 2}
    delivered = next(totals for key, totals in engine.counters().items() if key.name == "retrieved" and not key.tier)
    assert (delivered.tokens, delivered.bytes) == (5 * CHUNK, 5 * KV.nbytes // 4), "four chunks, then one"


def test_a_tier_that_gives_single_chunks_maps_them_once(open_engine: Open) -> None:
    engine = filled(open_engine)
    tier, key = engine.tiers["window"], engine.segments(TOKENS)[0].key
    for _ in range(3):
        chunk = tier.get(key)
        assert chunk is not None and torch.equal(chunk, KV[:, :, :CHUNK])
    assert len(window().panes) == 1


def test_a_store_that_cannot_say_serves_nothing_of_it(open_engine: Open) -> None:
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4

    def before(pane: Pane) -> None:
        raise OSError(5, "input/output error")

    window().before_asked = before
    assert not engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).any()


def test_gaps_are_left_where_chunks_changed(open_engine: Open) -> None:
    engine = filled(open_engine)
    segments = engine.segments(TOKENS)
    assert engine.load(segments, kv=torch.zeros_like(KV)).result().all()
    changed_while_moved(engine, chunk_names(engine)[1])
    assert engine.load(segments, kv=torch.zeros_like(KV)).result().tolist() == [True, False, True, True]


def test_by_layers_the_prefix_ends_before_a_chunk_that_changed(open_engine: Open) -> None:
    kv = deep_kv(16)
    with open_engine(WINDOW, spec=DEEP) as engine:
        engine.store(DEEP_TOKENS, kv=kv)
    engine = open_engine(WINDOW, spec=DEEP)
    changed_while_moved(engine, str(engine.segments(DEEP_TOKENS)[2].key), "write")
    got, masks = by_layers(engine, DEEP_TOKENS, kv)
    assert chunks_in(masks)[-1] == 2
    assert torch.equal(got[:, :, : 2 * CHUNK], kv[:, :, : 2 * CHUNK])


def test_a_tier_gives_no_chunk_that_changed(open_engine: Open) -> None:
    engine = filled(open_engine)
    key = engine.segments(TOKENS)[0].key
    tier = engine.tiers["window"]
    chunk = tier.get(key)
    assert chunk is not None and torch.equal(chunk, KV[:, :, :CHUNK])
    window().before_asked = lambda pane: window().damage(pane.key)
    assert tier.get(key) is None


def test_what_changed_while_it_was_written_on_is_not_kept_there(open_engine: Open) -> None:
    """Its checksums would be right: they are made of what was read."""
    with open_engine(WINDOW | {"shelf": "far"}) as engine:
        engine.store(TOKENS, kv=KV)
    near, far = {"type": "shelf", "shelf": "near", "deadline": "20s"}, WINDOW | {"shelf": "far"}
    engine = open_engine(near, far)
    name = chunk_names(engine)[1]

    def before(verb: str, key: str) -> None:
        if (verb, key) == ("put", name):
            window("far").damage(name)

    Shelf.shelves["near"].before = before
    assert engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).any()
    assert engine.flush()
    assert set(Shelf.shelves["near"].blobs) == {*chunk_names(engine)} - {name}


def test_chunks_that_have_to_be_decoded_are_read(open_engine: Open) -> None:
    tier = WINDOW | {"serializer": "padded"}
    with open_engine(tier) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(tier)
    assert retrieve(engine) == [True] * 4
    assert window().panes == [], "read once, not mapped first"


def test_a_device_reads_from_pinned_memory(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = filled(open_engine)
    monkeypatch.setattr(type(engine._stack.memory.pool), "pinned", property(lambda pool: True))
    assert retrieve(engine) == [True] * 4
    assert window().panes == []


def test_signed_blobs_are_read(open_engine: Open, tmp_path: Path) -> None:
    """A signature is checked, and an encrypted blob decrypted, in memory of this process's own."""
    pytest.importorskip("cryptography")
    keys = tmp_path / "keys"
    keys.write_text(base64.b64encode(os.urandom(32)).decode() + "\n")
    keys.chmod(0o600)
    tier = WINDOW | {"protect": {"mode": "sign", "keys": str(keys)}}
    with open_engine(tier) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(tier)
    assert retrieve(engine) == [True] * 4
    assert window().panes == [], "read once, not mapped first"


def test_a_request_knows_which_tier_gave_a_chunk(open_engine: Open) -> None:
    with open_engine(WINDOW) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, WINDOW, observers=["witness"])
    for _ in range(2):
        assert retrieve(engine) == [True] * 4
    assert engine._events.flush(30)
    assert [dict(request.sources) for request, _ in Witness.made[-1].seen] == [{"window": 16}] * 2


def test_what_is_mapped_is_not_copied_into_the_memory_tier(open_engine: Open) -> None:
    engine = filled(open_engine, MEMORY, WINDOW)
    for _ in range(2):
        assert retrieve(engine) == [True] * 4
    assert len(engine.tiers["memory"]) == 0 and count(engine, "promoted") == 0  # type: ignore[arg-type]


def test_what_is_to_be_in_memory_is_read(open_engine: Open) -> None:
    for verb in ("pin", "prefetch"):
        engine = filled(open_engine, MEMORY, WINDOW)
        assert retrieve(engine) == [True] * 4
        assert len(engine.tiers["memory"]) == 0  # type: ignore[arg-type]
        if verb == "pin":
            assert engine.pin(TOKENS) == 16
        else:
            assert engine.prefetch(TOKENS).result().all()
        assert engine.lookup(TOKENS).by_tier == {"memory": 16}
        engine.close()
    engine = filled(open_engine)
    assert engine.prefetch(TOKENS).result().all() and mapped(engine) == 4, "verified ahead of its use"


def test_who_wants_it_in_memory_does_not_share_a_mapped_read(open_engine: Open) -> None:
    engine = filled(open_engine, MEMORY, WINDOW)
    gate = Gate()
    window().before = lambda verb, key: gate(verb, key) if verb == "map" else None
    task = engine.load(engine.segments(TOKENS), kv=torch.zeros_like(KV))
    gate.reached()
    pinned: list[int] = []
    thread = threading.Thread(target=lambda: pinned.append(engine.pin(TOKENS)))
    thread.start()
    inflight = engine.tiers["window"].loads.inflight  # type: ignore[attr-defined]
    assert eventually(lambda: any(one.shares > 1 for one in tuple(inflight._open.values())))
    gate.open()
    thread.join()
    assert task.result().all() and pinned == [16]


def test_a_store_that_cannot_map_is_read(open_engine: Open) -> None:
    engine = filled(open_engine)

    def before(verb: str, key: str) -> None:
        if verb == "map":
            raise OSError(12, "cannot allocate memory")

    window().before = before
    assert retrieve(engine) == [True] * 4
    assert {tier.state for tier in engine.health().tiers} == {"ok"}
