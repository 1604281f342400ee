"""Saves that wait for a tier or for room: what they have copied by then, and who waits for that."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from core_support import CHUNK, Gate, Shelf, kv_of, tokens_of

from kvloom import Engine, Task

Open = Callable[..., Engine]
SHELF = {"type": "shelf", "deadline": "600s"}
ROOM = 3
MEMORY = {"type": "memory", "capacity": f"{4 * ROOM}KiB"}


def save(engine: Engine, chunks: int) -> Task:
    tokens = chunks * CHUNK
    return engine.save(engine.segments(tokens_of(tokens)), kv=kv_of(tokens))


def hold_puts(gate: Gate) -> None:
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "put" else None


def test_a_cancelled_save_keeps_what_there_was_room_for_and_does_not_wait_for_more(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold_puts(gate)
    task = save(engine, ROOM + 2)
    gate.reached()
    assert not task.wait_for_copies(0.05) and not task.done
    began = time.monotonic()
    task.cancel()
    assert task.result(30).tolist() == [True] * ROOM + [False] * 2
    assert time.monotonic() - began < 30, "nobody waits for the store"
    gate.open()
    assert engine.flush(60)
    tokens, kv = CHUNK * ROOM, kv_of(CHUNK * (ROOM + 2))
    got = torch.zeros_like(kv[:, :, :tokens])
    assert engine.retrieve(tokens_of(tokens), kv=got).all() and torch.equal(got, kv[:, :, :tokens])


def test_a_save_has_copied_all_when_its_writes_wait_for_others(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()  # half of memory may wait to be written
    hold_puts(gate)
    task = save(engine, ROOM)
    assert task.wait_for_copies(30) and not task.done
    gate.open()
    assert task.result(60).all() and task.wait_for_copies(0)
