"""A store that others write to, or that evicts by itself, may lose blobs without a word: they are written again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from core_support import CHUNK, Serving, Shelf, kv_of, matches, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import chain_of

from kvloom import ChunkKey, Engine
from kvloom.builtin.dict_backend import DictBackend
from kvloom.runtime import SystemRuntime
from kvloom.tiers.index.ledger import Fidelity, Ledger
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.stored.existence import Existence

Open = Callable[..., Engine]
MEMORY = {"type": "memory", "capacity": "1MiB"}
TOKENS, KV = tokens_of(4 * CHUNK), kv_of(4 * CHUNK)
FORGETFUL = {"type": "shelf", "remember": "1ms"}
PATIENT = {"type": "shelf", "remember": "1h"}


class Clock(SystemRuntime):
    """Stands still until it is moved."""

    time = 1000.0

    def now(self) -> float:  # type: ignore[override]
        return self.time


class Lossy(DictBackend):
    """A store that evicts by itself."""

    bounded = True
    threads = 3

    def __init__(self) -> None:
        super().__init__(DictBackend.Config())
        self.asked: list[str] = []

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        self.asked += keys
        return super().contains_many(keys)


class World:
    """A tier's knowledge of a store, without the tier."""

    def __init__(self, *, believed: float | None = 30.0, shared: bool = True, one_by_one: bool = False) -> None:
        self.clock = Clock()
        self.store = Lossy()
        vars(self.store).update(shared=shared, one_by_one=one_by_one)
        self.ledger = Ledger(self.clock, believed=believed)
        self.ledger.complete = not shared
        self.existence = Existence(
            self.store, self.ledger, cast(Calls, Serving()), lossless=True, exact_only=False,
            expired=lambda header: False, ttl=False,
        )  # fmt: skip

    def write(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.store.put(str(key), [b"blob"])
            self.ledger.note(key, Fidelity.EXACT, nbytes=4096)

    def lose(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.store.delete(str(key))

    def find(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.existence.find(keys, cast(Any, None))

    def enough(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.existence.inquire(keys, cast(Any, None), ignore=lambda key: False).enough_of(keys)


KEYS = chain_of("prompt", 6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("verb", ["find", "enough"])
def test_what_is_there_is_believed_for_a_time_and_asked_about_once_after_it(verb: str, shared: bool) -> None:
    world = World(shared=shared)
    ask = getattr(world, verb)
    world.write(KEYS)
    world.clock.time += 29.9
    assert all(ask(KEYS)) and not world.store.asked
    world.clock.time += 0.2
    assert all(ask(KEYS)) and world.store.asked == [str(key) for key in KEYS]
    world.clock.time += 29.9
    assert all(ask(KEYS)) and len(world.store.asked) == len(KEYS), "the answer counts as long again"
    world.lose(KEYS[2:])
    world.clock.time += 0.2
    assert ask(KEYS) == [True, True, False, False, False, False]
    assert world.ledger.known(KEYS)[2:] == [None] * 4


def test_a_private_store_is_believed_for_ever() -> None:
    world = World(believed=None, shared=False)
    world.write(KEYS)
    world.clock.time += 1e9
    world.existence.doubt()
    assert all(world.find(KEYS)) and all(world.enough(KEYS)) and not world.store.asked


def test_after_an_outage_nothing_is_believed_that_was_seen_before() -> None:
    world = World()
    world.write(KEYS)
    world.lose(KEYS)
    world.clock.time += 1.0
    world.existence.doubt()
    assert world.enough(KEYS) == [False] * 6
    world.clock.time += 1.0
    world.write(KEYS)
    world.store.asked.clear()
    assert all(world.find(KEYS)) and not world.store.asked


def test_what_is_being_written_meanwhile_is_not_forgotten() -> None:
    world = World()
    world.write(KEYS[:1])
    world.lose(KEYS[:1])
    world.clock.time += 31.0
    contains_many = world.store.contains_many

    def written_in_between(keys: Sequence[str]) -> list[bool]:
        answer = contains_many(keys)
        assert world.ledger.admit(KEYS[0], 4096) == []
        world.write(KEYS[:1])
        return answer

    world.store.contains_many = written_in_between  # type: ignore[method-assign]
    world.enough(KEYS[:1])
    assert world.ledger.known(KEYS[:1]) == [Fidelity.EXACT]


def test_a_listing_counts_as_seeing() -> None:
    world = World()
    world.write(KEYS)
    world.clock.time += 31.0
    world.ledger.recover(world.store.scan())
    assert all(world.find(KEYS)) and not world.store.asked


@given(st.lists(st.booleans(), min_size=6, max_size=6), st.booleans())
@settings(deadline=None)
def test_before_writing_each_that_may_be_lost_is_asked_about(there: list[bool], one_by_one: bool) -> None:
    """If each key costs a request, a chain costs few: lost blobs are found if the head or the end of
    the chain is lost."""
    world = World(one_by_one=one_by_one)
    world.write(KEYS)
    world.lose([key for key, here in zip(KEYS, there, strict=True) if not here])
    world.clock.time += 31.0
    found = world.find(KEYS)
    assert not one_by_one or len(world.store.asked) <= 8
    known = [fidelity is not None for fidelity in world.ledger.known(KEYS)]
    assert all(said or not here for here, said in zip(there, known, strict=True)), "what is there is not forgotten"
    assert found == there or one_by_one
    enough = world.enough(KEYS)
    if not one_by_one or there == sorted(there, reverse=True):
        assert enough == there
    assert all(said or not here for here, said in zip(there, enough, strict=True))


# -- whole engines -----------------------------------------------------------------------------------------------------


def restored(engine: Engine) -> bool:
    kv = torch.zeros_like(KV)
    return matches(kv, KV, engine.retrieve(TOKENS, kv=kv)) and bool(kv.any())


def test_a_prompt_that_a_shared_store_lost_is_written_again_though_memory_has_it(open_engine: Open) -> None:
    one, other = open_engine(MEMORY, FORGETFUL), open_engine(FORGETFUL)
    one.store(TOKENS, kv=KV)
    one.flush()
    Shelf.shelves["default"]._blobs.clear()
    time.sleep(0.005)
    one.store(TOKENS, kv=KV)
    one.flush()
    assert len(Shelf.shelves["default"].blobs) == 4
    assert other.lookup(TOKENS).tokens == 4 * CHUNK and restored(other)


def test_what_another_engine_removes_is_not_promised_any_more(open_engine: Open) -> None:
    one, other = open_engine(FORGETFUL), open_engine(FORGETFUL)
    one.store(TOKENS, kv=KV)
    one.flush()
    other.remove(TOKENS)
    time.sleep(0.005)
    assert one.lookup(TOKENS).tokens == 0


def test_a_store_that_failed_is_asked_again_before_anything_is_taken_for_stored(open_engine: Open) -> None:
    engine = open_engine(MEMORY, PATIENT)
    shelf = Shelf.shelves["default"]
    engine.store(TOKENS, kv=KV)
    engine.flush()

    def refused(verb: str, key: str) -> None:
        raise ConnectionRefusedError("the server is restarting")

    shelf.before = refused
    assert engine.lookup(tokens_of(CHUNK, seed=9)).tokens == 0
    shelf._blobs.clear()
    shelf.before = lambda verb, key: None
    engine.store(TOKENS, kv=KV)
    engine.flush()
    assert len(shelf.blobs) == 4


@pytest.mark.usefixtures("hurried")
def test_a_store_that_evicts_by_itself_is_told_of_hits_in_memory(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: set[str] = set()
    monkeypatch.setattr(Shelf, "bounded", True)
    monkeypatch.setattr(Shelf, "touch_many", lambda self, keys: told.update(keys))
    engine = open_engine(MEMORY, PATIENT)
    engine.store(TOKENS, kv=KV)
    engine.flush()
    told.clear()
    assert restored(engine)
    until = time.monotonic() + 20
    while len(told) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert told == {str(segment.key) for segment in engine.segments(TOKENS)}
