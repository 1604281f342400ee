"""Saves that wait for a tier or for room: what they have copied by then, and who waits for that."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from core_support import CHUNK, Gate, Shelf, eventually, kv_of, tokens_of

from kvloom import Engine, Task

Open = Callable[..., Engine]
SHELF = {"type": "shelf", "deadline": "60s"}
ROOM = 3
MEMORY = {"type": "memory", "capacity": f"{4 * ROOM}KiB"}


def save(engine: Engine, chunks: int, seed: int) -> Task:
    tokens = chunks * CHUNK
    return engine.save(engine.segments(tokens_of(tokens, seed)), kv=kv_of(tokens, seed))


def hold(verb: str, gate: Gate) -> None:
    """Have calls of that verb of the store wait at the gate."""
    Shelf.shelves["default"].before = lambda called, key: gate(called, key) if called == verb else None


def test_a_save_has_copied_what_there_is_room_for_when_it_stalls(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold("put", gate)
    task = save(engine, ROOM + 2, 0)
    assert task.wait_for_copies(60) and not task.done
    began = time.monotonic()
    task.cancel()
    assert time.monotonic() - began < 30, "nobody waits for the store"
    assert task.result(30).tolist() == [True] * ROOM + [False] * 2, "nor does the save go on to wait for room"
    gate.open()
    assert engine.flush(60)
    got = torch.zeros_like(kv_of(CHUNK * ROOM))
    assert engine.retrieve(tokens_of(CHUNK * ROOM), kv=got).all() and torch.equal(
        got, kv_of(CHUNK * (ROOM + 2))[:, :, : CHUNK * ROOM]
    )


def test_a_save_that_goes_on_has_not_stalled(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold("put", gate)
    task = save(engine, ROOM + 2, 0)
    assert task.wait_for_copies(60)
    read, copies = engine.connector.read, Gate()
    engine.connector.read = lambda *given, **where: (copies("read", ""), read(*given, **where))[1]
    gate.open()
    copies.reached()
    assert not task.wait_for_copies(0.01)
    copies.open()
    assert task.wait_for_copies(60) and task.result(60).all()


def test_a_save_that_cannot_begin_because_others_wait_is_not_waited_for(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold("put", gate)
    threads = engine._background.workers.threads
    first = [save(engine, ROOM + 2, seed) for seed in range(threads)]
    last = save(engine, 1, threads)
    assert last.wait_for_copies(60) and not last.done
    assert all(task.wait_for_copies(60) for task in first)
    for task in [*first, last]:
        task.cancel()
    gate.open()
    assert not last.result(60).any() and eventually(lambda: engine.flush(1))


def test_a_save_of_what_another_saves_does_not_wait_for_it_longer_than_for_its_own_copies(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold("put", gate)
    first, second = save(engine, ROOM + 2, 0), save(engine, ROOM + 2, 0)
    assert first.wait_for_copies(60) and second.wait_for_copies(60) and not (first.done or second.done)
    gate.open()
    assert first.result(60).all() and second.wait(60)


def test_a_save_that_waits_for_the_answer_of_a_store_has_stalled(open_engine: Open) -> None:
    engine, gate = open_engine(SHELF | {"deadline": "600s"}), Gate()  # of which a tenth is waited
    hold("contains", gate)
    task = save(engine, 1, 0)
    assert task.wait_for_copies(20) and not task.done
    gate.open()
    assert task.result(60).all()


def test_a_save_has_copied_all_when_its_writes_wait_for_others(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()  # half of memory may wait to be written
    hold("put", gate)
    task = save(engine, ROOM, 0)
    assert task.wait_for_copies(60) and not task.done
    gate.open()
    assert task.result(60).all()
