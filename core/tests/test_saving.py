"""Saves that wait for a tier or for room: what they have copied by then, and who waits for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from core_support import CHUNK, Gate, Shelf, kv_of, tokens_of

from kvloom import Chunk, Engine, Segment, Task
from kvloom.engine.background import THREADS

Open = Callable[..., Engine]
SHELF = {"type": "shelf", "deadline": "600s"}
ROOM = 3
WHOLE_PAGE = 16 * CHUNK
"""Tokens whose KV fills a page of the pool, 4 KiB."""
MEMORY = {"type": "memory", "capacity": f"{4 * ROOM}KiB"}


def save(engine: Engine, chunks: int, *, seed: int = 0) -> Task:
    tokens = chunks * CHUNK
    return engine.save(engine.segments(tokens_of(tokens, seed)), kv=kv_of(tokens))


def hold_puts(gate: Gate) -> None:
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "put" else None


def test_a_cancelled_save_keeps_what_there_was_room_for_and_does_not_wait_for_more(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF), Gate()
    hold_puts(gate)
    task = save(engine, ROOM + 2)
    gate.reached()
    began = time.monotonic()
    assert not task.wait_for_copies(60, stalled=0.05) and not task.done
    task.cancel()
    assert task.result(30).tolist() == [True] * ROOM + [False] * 2
    assert time.monotonic() - began < 30, "nobody waits for the store"
    assert task.wait_for_copies(0)
    gate.open()
    assert engine.flush(60)
    tokens, kv = CHUNK * ROOM, kv_of(CHUNK * (ROOM + 2))
    got = torch.zeros_like(kv[:, :, :tokens])
    assert engine.retrieve(tokens_of(tokens), kv=got).all() and torch.equal(got, kv[:, :, :tokens])


def test_a_save_has_copied_all_when_its_writes_wait_for_others(open_engine: Open) -> None:
    engine, gate = open_engine(MEMORY, SHELF, chunk_tokens=WHOLE_PAGE), Gate()  # half of memory may wait to be written
    hold_puts(gate)
    task = save(engine, ROOM * WHOLE_PAGE // CHUNK)
    gate.reached()
    assert task.wait_for_copies(30) and not task.wait(0.05)
    gate.open()
    assert task.result(60).all() and task.wait_for_copies(0)


def test_a_save_that_cannot_begin_counts_as_stalled_once_all_that_have_begun_are(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate, copying = open_engine(MEMORY, SHELF), Gate(), Gate()
    hold_puts(gate)
    read = engine.connector.read

    def slow(segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        if segments[0].key == last.key:
            copying("read", "")
        return read(segments, chunks, **where)

    monkeypatch.setattr(engine.connector, "read", slow)
    last = engine.segments(tokens_of(CHUNK, seed=9))[0]
    going_on = engine.save([last], kv=kv_of(CHUNK))
    copying.reached()
    tasks = [save(engine, ROOM + 2, seed=seed) for seed in range(THREADS)]
    began = time.monotonic()
    assert not any(task.wait_for_copies(30, stalled=0.05) for task in tasks[:-1])
    asked = time.monotonic()
    assert not tasks[-1].wait_for_copies(0.3, stalled=0.01)
    assert time.monotonic() - asked >= 0.3, "it has not begun, and one thread goes on"
    copying.open()
    assert going_on.wait_for_copies(30, stalled=30)
    assert not tasks[-1].wait_for_copies(30, stalled=0.05), "it has begun"
    assert not save(engine, 1, seed=THREADS).wait_for_copies(30, stalled=0.05)
    assert time.monotonic() - began < 25
    gate.open()
    assert engine.flush(60)
