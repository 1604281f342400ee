"""The lookup buffer among processes: each entry is given once, also where processes are killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import Sink, StorageBackend
from kvloom_backend_disk.backend import DiskBackend
from kvloom_connector_vllm.buffers import KVLookupBuffer
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend

BACKENDS = {"directory": CompleteDirectoryBackend, "disk": DiskBackend}
NEEDS_SECONDS = 120.0
END = 1000
FORK = multiprocessing.get_context("fork")


def opened(kind: str, path: Path, **settings: Any) -> KVLookupBuffer:
    cls = BACKENDS[kind]
    return KVLookupBuffer(cls(cls.Config(path=path)), **{"capacity": 10 * 2**20, "timeout": 0.5, **settings})


def put_in(buffer: KVLookupBuffer, number: int) -> None:
    kv = torch.full((1000,), number)
    buffer.insert(torch.tensor([1, number]), torch.ones(2), kv, -kv, kv)


def number(taken: list[torch.Tensor | None]) -> int | None:
    tokens, _, key, value, hidden = taken
    if tokens is None:
        return None
    here = int(tokens[1])
    assert all(torch.equal(t, torch.full((1000,), sign * here)) for t, sign in ((key, 1), (value, -1), (hidden, 1)))  # type: ignore[arg-type]
    return here


# -- what a process does -----------------------------------------------------------------------------------------------


def take(kind: str, path: Path, pipe: Connection) -> None:
    """Take until there is an entry that says so, and say what; wait for the word to begin."""
    buffer = opened(kind, path, timeout=NEEDS_SECONDS)
    pipe.send("ready")
    pipe.recv()
    while True:
        got = number(buffer.drop_select(None, None))
        if got is None or got >= END:
            return
        pipe.send(got)


def die_reading(kind: str, path: Path, pipe: Connection) -> None:
    """Be killed between the claim and the entry."""

    class Deadly(BACKENDS[kind]):  # type: ignore[misc]
        def get_into(self, key: str, sink: Sink) -> bool:
            if "/entry/" in key:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().get_into(key, sink)  # type: ignore[no-any-return]

    buffer = KVLookupBuffer(Deadly(Deadly.Config(path=path)), capacity=2**20)
    buffer.drop_select(None, None)


def die_putting(kind: str, path: Path, pipe: Connection) -> None:
    """Be killed between the reservation and the entry."""

    class Deadly(BACKENDS[kind]):  # type: ignore[misc]
        def put(self, key: str, blob: Any) -> None:
            if "/entry/" in key:
                os.kill(os.getpid(), signal.SIGKILL)
            super().put(key, blob)

    put_in(KVLookupBuffer(Deadly(Deadly.Config(path=path)), capacity=2**20), 0)


# -- what must be true of them -----------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(BACKENDS))
def kind(request: pytest.FixtureRequest) -> str:
    if BACKENDS[request.param].create is StorageBackend.create:
        pytest.skip(f"{request.param} has no exclusive create")
    return str(request.param)


class Child:
    """A process of its own, forked: none of them computes anything that would want threads."""

    def __init__(self, what: Callable[[str, Path, Connection], None], kind: str, path: Path) -> None:
        self._pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=what, args=(kind, path, theirs))
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        assert self._pipe.poll(NEEDS_SECONDS)
        assert self._pipe.recv() == "ready"

    def go(self) -> None:
        self._pipe.send("go")

    def took(self) -> int:
        return int(self._pipe.recv())

    def rest(self) -> list[int]:
        """The other entries that it took until it ended."""
        found = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                found.append(self.took())
        return found

    def wait(self) -> int | None:
        self.process.join(NEEDS_SECONDS)
        self._pipe.close()
        return self.process.exitcode


def test_each_entry_goes_to_one_of_many_processes(kind: str, tmp_path: Path) -> None:
    """Some entries are there when they begin; the others come as fast as they are taken."""
    processes = [Child(take, kind, tmp_path) for _ in range(3)]
    buffer = opened(kind, tmp_path, capacity=40 * 32768, timeout=NEEDS_SECONDS)
    for n in range(30):
        put_in(buffer, n)
    for process in processes:
        process.ready()
    for process in processes:
        process.go()
    for n in [*range(30, 90), *range(END, END + len(processes))]:
        put_in(buffer, n)
    said = [process.rest() for process in processes]
    assert [process.wait() for process in processes] == [0, 0, 0]
    last = opened(kind, tmp_path, timeout=0)
    here = iter(lambda: number(last.drop_select(None, None)), None)
    taken = [n for some in said for n in some] + [n for n in here if n is not None]
    assert sorted(taken) == list(range(90))
    assert [entry.key for entry in buffer._backend.scan("kv-lookup/")] == []


def test_of_those_who_are_killed_only_what_was_in_their_hands_is_lost(kind: str, tmp_path: Path) -> None:
    buffer = opened(kind, tmp_path, timeout=0)
    for n in range(60):
        put_in(buffer, n)
    said: list[int] = []
    for _ in range(2):
        process = Child(take, kind, tmp_path)
        process.ready()
        process.go()
        said += [process.took() for _ in range(10)]
        process.process.kill()
        said += process.rest()
        assert process.wait() == -signal.SIGKILL
    rest = list(iter(lambda: number(buffer.drop_select(None, None)), None))
    taken = said + [n for n in rest if n is not None]
    assert len(set(taken)) == len(taken)
    assert 58 <= len(taken) <= 60


def test_what_a_killed_taker_had_claimed_is_given_to_nobody(kind: str, tmp_path: Path) -> None:
    buffer = opened(kind, tmp_path, timeout=0)
    for n in range(3):
        put_in(buffer, n)
    assert Child(die_reading, kind, tmp_path).wait() == -signal.SIGKILL
    assert [number(buffer.drop_select(None, None)) for _ in range(3)] == [1, 2, None]
    time.sleep(0.1)
    later = opened(kind, tmp_path, timeout=0, abandoned=0.05)
    assert number(later.drop_select(None, None)) is None
    assert later.counts() == {"abandoned": 1, "missed": 1}
    assert [entry.key for entry in later._backend.scan("kv-lookup/")] == []


def test_what_a_killed_inserter_had_begun_is_not_there(kind: str, tmp_path: Path) -> None:
    assert Child(die_putting, kind, tmp_path).wait() == -signal.SIGKILL
    buffer = opened(kind, tmp_path, timeout=0)
    assert number(buffer.drop_select(None, None)) is None
    assert len(list(buffer._backend.scan("kv-lookup/room/"))) == 1
    time.sleep(0.1)
    put_in(opened(kind, tmp_path, capacity=32768, abandoned=0.05), 1)
    assert number(buffer.drop_select(None, None)) == 1
    assert [entry.key for entry in buffer._backend.scan("kv-lookup/")] == []
