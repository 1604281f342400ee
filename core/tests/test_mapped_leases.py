"""Leases of mapped chunks: which are given, how many are kept, and when the memory is closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from core_support import CHUNK, Pane, Window, eventually
from faults_support import KV, TOKENS, Open, retrieve
from mapped_support import WINDOW, filled, mapped, window

from kvloom import Engine
from kvloom.memory import MappedMemory, Mappings
from kvloom.runtime import SystemRuntime
from kvloom.tiers.stored.inflight import Wanted


def test_what_others_removed_is_given_back_in_a_while(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not ask for it any more would keep its memory from everybody."""
    monkeypatch.setattr("kvloom.tiers.stored.maintenance.ROUND_SECONDS", 0.01)
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    gone, *there = window().panes
    del window()._blobs[gone.key]
    assert eventually(lambda: gone.closed)
    assert mapped(engine) == 3 and not any(pane.closed for pane in there)


def test_what_was_leased_is_given_back_if_the_rest_cannot_be_begun(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    engine.tiers["window"]._mapped._held.popitem()  # type: ignore[attr-defined]

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr("kvloom.tiers.stored.inflight.InflightReads._begin_whole", fail)
        with pytest.raises(MemoryError):
            retrieve(engine)
    panes = window().panes
    engine.close()
    assert sum(pane.closed for pane in panes) == 3, "all but the one that was taken out"


def test_there_is_a_bound(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tiers.stored.mapped._MOST_MAPPED", 2)
    engine = filled(open_engine)
    for _ in range(2):
        assert retrieve(engine) == [True] * 4
        assert mapped(engine) == 2 and sum(not pane.closed for pane in window().panes) == 2


def test_the_bound_holds_when_many_are_mapped_at_once(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tiers.stored.mapped._MOST_MAPPED", 1)
    engine = filled(open_engine)
    chunks = engine.tiers["window"]._mapped  # type: ignore[attr-defined]
    for _, loaded in chunks.open([held_as(engine, place) for place in range(4)]):
        loaded.release()
    assert len(chunks) == 1 and [pane.closed for pane in window().panes] == [True, True, True, False]


def test_what_has_outlived_its_tier_is_not_served(open_engine: Open) -> None:
    engine = filled(open_engine, WINDOW | {"ttl": "1h"})
    assert retrieve(engine) == [True] * 4
    reader = engine.tiers["window"]._mapped  # type: ignore[attr-defined]
    reader._outlived = lambda written: True
    assert mapped(engine) == 4
    assert [one is None for one in reader.lease([held_as(engine, n) for n in range(4)], doomed=set)] == [True] * 4
    assert all(pane.closed for pane in window().panes)


def held_as(engine: Engine, place: int) -> Any:
    segment = engine.segments(TOKENS)[place]
    return Wanted(segment.key, tuple(KV[:, :, :CHUNK].shape), CHUNK)


def test_what_is_being_removed_is_not_served(open_engine: Open) -> None:
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    wanted = [held_as(engine, place) for place in range(4)]
    found = engine.tiers["window"]._mapped.lease(wanted, doomed=lambda: {wanted[1].key})  # type: ignore[attr-defined]
    assert [one is None for one in found] == [False, True, False, False]
    for one in found:
        if one is not None:
            one.release()


def test_a_chunk_of_another_shape_is_not_served(open_engine: Open) -> None:
    engine = filled(open_engine)
    assert retrieve(engine) == [True] * 4
    longer = held_as(engine, 0)._replace(shape=(2, 2, 2 * CHUNK, 8))
    assert engine.tiers["window"]._mapped.lease([longer], doomed=set) == [None]  # type: ignore[attr-defined]


def test_what_is_mapped_twice_or_after_the_end_is_closed(open_engine: Open) -> None:
    engine = filled(open_engine)
    chunks, wanted = engine.tiers["window"]._mapped, held_as(engine, 0)  # type: ignore[attr-defined]
    chunks._lease = lambda wanted: [None]  # as for threads that map it at one time
    for _ in range(3):
        _, loaded = chunks.open([wanted])[0]
        loaded.release()
    assert [pane.closed for pane in window().panes] == [True, True, False]
    chunks.close()
    _, loaded = chunks.open([wanted])[0]
    assert not window().panes[-1].closed, "it is being read"
    loaded.release()
    assert all(pane.closed for pane in window().panes)


def test_of_many_that_are_mapped_at_once_those_that_are_no_good_are_closed(open_engine: Open) -> None:
    engine = filled(open_engine)
    chunks, wanted = engine.tiers["window"]._mapped, [held_as(engine, place) for place in range(4)]  # type: ignore[attr-defined]
    blobs, names = window()._blobs, [str(one.key) for one in wanted]
    blobs[names[1]] = blobs[names[2]]
    del blobs[names[3]]
    found = chunks.open(wanted)
    assert [one is None for one in found] == [False, True, False, True]
    assert all(torch.equal(found[place][1].chunk.tensor, KV[:, :, place * CHUNK :][:, :, :CHUNK]) for place in (0, 2))
    assert [pane.closed for pane in window().panes] == [False, True, False]
    for one in found[::2]:
        one[1].release()


def test_where_one_of_many_cannot_be_mapped_none_is(open_engine: Open) -> None:
    engine = filled(open_engine)
    chunks, wanted = engine.tiers["window"]._mapped, [held_as(engine, place) for place in range(4)]  # type: ignore[attr-defined]

    def before(verb: str, key: str) -> None:
        if (verb, key) == ("map", str(wanted[2].key)):
            raise OSError(5, "Input/output error")

    window().before = before  # type: ignore[method-assign]
    assert chunks.open(wanted) == [None] * 4 and len(chunks) == 0
    assert [pane.closed for pane in window().panes] == [True, True]


@pytest.mark.parametrize("fault", ["verifying", "too few"])
def test_nothing_stays_leased_or_mapped_if_many_cannot_be_verified(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = filled(open_engine)
    chunks, wanted = engine.tiers["window"]._mapped, [held_as(engine, place) for place in range(4)]  # type: ignore[attr-defined]
    chunks.open(wanted[:1])[0][1].release()

    def fail(some: object) -> Any:
        raise MemoryError

    if fault == "verifying":
        chunks._view = fail
    else:
        monkeypatch.setattr(Window, "map_many", lambda self, requests: [self.map(*requests[0])])
    with pytest.raises((MemoryError, ValueError)):
        chunks.open(wanted)
    chunks.close()
    assert len(window().panes) > 1 and all(pane.closed for pane in window().panes)


def test_it_is_closed_once_by_the_last_who_reads_it() -> None:
    for first in ("owner", "readers"):
        pane = Pane(Window(Window.Config()), "key", b"blob")
        home = Mappings("window", lambda blobs: [blob.current() for blob in blobs], SystemRuntime())
        memory = MappedMemory(pane, home, verified=lambda: True)
        leases = [lease for _ in range(50) if (lease := memory.lease()) is not None]
        leases.append(leases[0].again())
        assert len(leases) == 51
        if first == "owner":
            memory.drop()
            memory.drop()
        threads = [threading.Thread(target=lease.release) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        leases[0].release()
        if first == "readers":
            assert not pane.closed
            memory.drop()
        assert pane.closed and memory.lease() is None
