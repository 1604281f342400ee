"""Saves that wait for a tier or for room: what they have copied by then, and who waits for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from core_support import CHUNK, Gate, Shelf, eventually, kv_of, tokens_of

from kvloom import Engine, Task
from kvloom.builtin.plain import PlainConnector

Open = Callable[..., Engine]
SHELF = {"type": "shelf", "deadline": "60s"}
ROOM = 3
PATIENCE = 0.05
MEMORY = {"type": "memory", "capacity": f"{4 * ROOM}KiB"}


def save(engine: Engine, chunks: int, seed: int) -> Task:
    tokens = chunks * CHUNK
    return engine.save(engine.segments(tokens_of(tokens, seed)), kv=kv_of(tokens, seed))


def hold(verb: str, gate: Gate) -> None:
    """Have calls of that verb of the store wait at the gate."""
    Shelf.shelves["default"].before = lambda called, key: gate(called, key) if called == verb else None


def test_a_cancelled_save_keeps_what_there_was_room_for_and_does_not_wait_for_more(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold("put", gate)
    began = time.monotonic()
    task = save(engine, ROOM + 2, 0)
    assert not task.wait_for_copies(60, patience=PATIENCE) and not task.done
    task.cancel()
    assert time.monotonic() - began < 30, "nobody waits for the store"
    assert task.result(30).tolist() == [True] * ROOM + [False] * 2
    gate.open()
    assert engine.flush(60)
    tokens, kv = CHUNK * ROOM, kv_of(CHUNK * (ROOM + 2))
    got = torch.zeros_like(kv[:, :, :tokens])
    assert engine.retrieve(tokens_of(tokens), kv=got).all() and torch.equal(got, kv[:, :, :tokens])


def test_a_save_has_copied_all_when_its_writes_wait_for_others(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF | {"deadline": "600s"}), Gate()  # half of memory may wait to be written
    hold("put", gate)
    task = save(engine, ROOM, 0)
    assert task.wait_for_copies(30, patience=30) and not task.done
    gate.open()
    assert task.result(60).all()


def test_a_save_is_waited_for_while_others_go_on(open_engine: Open) -> None:
    """It has not begun, because others have all threads."""
    engine, gate, read = open_engine({"type": "memory", "capacity": "1MiB"}), Gate(), PlainConnector.read

    def slowly(*given: Any, **where: Any) -> Any:
        gate("read", "")
        return read(engine.connector, *given, **where)

    engine.connector.read = slowly
    saves = [save(engine, 2, seed) for seed in range(engine._background.workers.threads + 2)]
    gate.reached(engine._background.workers.threads)
    assert not saves[-1].wait_for_copies(5 * PATIENCE, patience=PATIENCE)
    began = time.monotonic()
    threading.Timer(5 * PATIENCE, gate.open).start()
    assert saves[-1].wait_for_copies(60, patience=PATIENCE), "copies under way count"
    assert time.monotonic() - began >= 5 * PATIENCE and all(task.result(60).all() for task in saves)


def test_a_save_that_cannot_begin_because_others_wait_is_not_waited_for(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold("put", gate)
    threads = engine._background.workers.threads
    first = [save(engine, ROOM + 2, seed) for seed in range(threads)]
    last, began = save(engine, 1, threads), time.monotonic()
    assert not last.wait_for_copies(60, patience=PATIENCE) and not last.done
    assert time.monotonic() - began < 30
    for task in [*first, last]:
        task.cancel()
    gate.open()
    assert not last.result(60).any() and eventually(lambda: engine.flush(1))
