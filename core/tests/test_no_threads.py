"""A machine that has no more threads, or no more file descriptors, costs hits, and nothing else."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest
import torch
from core_support import Shelf, eventually, kv_of, matches, tokens_of

from kvloom import BackendError, Engine
from kvloom.runtime import SystemRuntime, Workers, lacks_resource

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
TOKENS, KV = tokens_of(16), kv_of(16)
Open = Callable[..., Engine]


def none_left(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(SystemRuntime, "spawn", none_left)


def test_workers_without_a_thread_refuse(no_threads: Callable[[], None]) -> None:
    workers = Workers(SystemRuntime(), name="test", threads=2)
    no_threads()
    with pytest.raises(BackendError, match="test: can't start new thread"):
        workers.submit(lambda: 7)
    assert not workers._queue
    workers.close(0.0)


def test_workers_with_one_thread_leave_the_rest_to_it(no_threads: Callable[[], None]) -> None:
    runtime = SystemRuntime()
    workers, go = Workers(runtime, name="test", threads=2), runtime.lock()
    with go:

        def first() -> None:
            with go:
                pass

        busy = workers.submit(first)
        no_threads()
        second = workers.submit(lambda: 7)
        assert not second.done
    assert second.result(runtime.now() + 20) == 7 and busy.done
    workers.close(20.0)


@pytest.mark.parametrize("tiers", [(SHELF,), (MEMORY, SHELF)], ids=["stored only", "memory and stored"])
def test_every_verb_serves_a_miss(
    open_engine: Open, no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tiers: tuple[object, ...]
) -> None:
    with open_engine(SHELF) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(*tiers)
    segments, got = engine.segments(TOKENS), torch.zeros_like(KV)
    others, kv = tokens_of(16, seed=1), kv_of(16, seed=1)
    no_threads()
    assert not engine.retrieve(TOKENS, kv=got).any() and engine.lookup(TOKENS).tokens == 0
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        assert not loading.result().any()
    tasks = [engine.prefetch(TOKENS), engine.load(segments, kv=got), engine.save(segments, kv=KV)]
    assert all(task.done and not task.result(0.0).any() for task in tasks) and not got.any()
    assert not engine._background._tasks and not engine._background._waiting
    engine.store(others, kv=kv)
    assert engine.flush(0.0) and engine.tiers["shelf"].health().waiting_bytes == 0
    shelf, closed = Shelf.shelves["default"], []
    monkeypatch.setattr(shelf, "close", lambda: closed.append(shelf))
    assert not any(key.name == "tier_paused" for key in engine.counters())
    engine.close()
    assert closed and len(shelf.blobs) == 4


class PanicException(BaseException):
    """As Rust's panics reach Python."""


def no_thread_in_rust() -> None:
    raise PanicException("failed to spawn thread: Os { code: 11, kind: WouldBlock }")


def no_descriptor() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_chain_of_errors_without_an_end_is_left() -> None:
    error, other = ValueError("one"), ValueError("the other")
    error.__cause__, other.__cause__ = other, error
    assert not lacks_resource(error)


@pytest.mark.parametrize("lacking", [none_left, no_thread_in_rust, no_descriptor])
@pytest.mark.parametrize(("verb", "counted"), [("get", "missed"), ("put", "dropped")])
def test_a_store_whose_library_finds_no_thread_or_descriptor_is_not_paused(
    open_engine: Open, lacking: Callable[[], None], verb: str, counted: str
) -> None:
    engine = open_engine(SHELF)
    shelf = Shelf.shelves["default"]

    def library(called: str, key: str) -> None:
        if called == verb:
            try:
                lacking()
            except Exception as error:
                raise BackendError("no connection") from error

    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    shelf.before = library
    for seed in range(9, 14):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
        assert engine.flush(20) and engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).all() == (verb == "put")
    names = {key.name for key in engine.counters()}
    assert {"tier_error", counted} <= names and "tier_paused" not in names


def test_layers_in_memory_are_loaded_before_the_caller_goes_on(
    open_engine: Open, no_threads: Callable[[], None]
) -> None:
    engine, got = open_engine(MEMORY), torch.zeros_like(KV)
    engine.store(TOKENS, kv=KV)
    no_threads()
    loading = engine.retrieve_layer(TOKENS, kv=got)
    assert loading._ended and loading.result().all() and matches(got, KV, loading.result())
    loading.close()
    engine.close()


def test_a_tier_without_a_thread_for_its_upkeep_does_not_open_and_leaves_nothing(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Shelf] = []
    spawned: list[str] = []
    spawn = SystemRuntime.spawn

    def no_upkeep(self: SystemRuntime, run: Callable[[], None], *, name: str, low_priority: bool = False) -> object:
        if name.endswith("-upkeep"):
            raise RuntimeError("can't start new thread")
        spawned.append(name)
        return spawn(self, run, name=name, low_priority=low_priority)

    monkeypatch.setattr(SystemRuntime, "spawn", no_upkeep)
    monkeypatch.setattr(Shelf, "close", lambda shelf: closed.append(shelf))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        open_engine({**SHELF, "capacity": "1MiB"})
    opening = {name for name in spawned if name.startswith("kvloom-open-")}
    assert len(closed) == 1 and any("tiers.0" in name for name in opening)
    assert eventually(lambda: not opening & {thread.name for thread in threading.enumerate()})


def test_a_delete_that_is_owed_is_not_lost_for_want_of_a_thread(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("dict")
    upkeep, (segment, *_) = engine.tiers["dict"].maintenance, engine.segments(TOKENS)  # type: ignore[attr-defined]
    with monkeypatch.context() as full:
        full.setattr(SystemRuntime, "spawn", none_left)
        upkeep.owes(segment.key)
        assert upkeep._thread is None and segment.key in upkeep.owed
    upkeep.owes(segment.key)
    assert upkeep._thread is not None
