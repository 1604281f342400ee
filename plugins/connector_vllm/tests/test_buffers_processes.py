"""The lookup buffer among processes: each entry is given once, also where processes are killed.

Run as a program, this file is one of those processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from kvloom import Sink, StorageBackend
from kvloom_backend_disk.backend import DiskBackend
from kvloom_connector_vllm.buffers import KVLookupBuffer
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend

BACKENDS = {"directory": CompleteDirectoryBackend, "disk": DiskBackend}
NEEDS_SECONDS = 120.0


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


def take(kind: str, path: Path) -> None:
    """Take until there is nothing more, and say what; wait for the word to begin, and to end."""
    buffer = opened(kind, path)
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        got = number(buffer.drop_select(None, None))
        if got is None:
            return
        print(got, flush=True)


def die_reading(kind: str, path: Path) -> None:
    """Be killed between the claim and the entry."""

    class Deadly(BACKENDS[kind]):  # type: ignore[misc]
        def get_into(self, key: str, sink: Sink) -> bool:
            if "/entry/" in key:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().get_into(key, sink)  # type: ignore[no-any-return]

    buffer = KVLookupBuffer(Deadly(Deadly.Config(path=path)), capacity=2**20)
    buffer.drop_select(None, None)


def die_putting(kind: str, path: Path) -> None:
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


def start(what: str, kind: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, what, kind, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def ready(process: subprocess.Popen[str]) -> None:
    assert line(process.stdout) == "ready"


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_each_entry_goes_to_one_of_many_processes(kind: str, tmp_path: Path) -> None:
    """Some entries are there when they begin; the others come as fast as they are taken."""
    processes = [start("take", kind, tmp_path) for _ in range(3)]
    buffer = opened(kind, tmp_path, capacity=40 * 32768, timeout=NEEDS_SECONDS)
    for n in range(30):
        put_in(buffer, n)
    for process in processes:
        ready(process)
    for process in processes:
        go(process)
    for n in range(30, 150):
        put_in(buffer, n)
    said = [process.communicate(timeout=NEEDS_SECONDS)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    last = opened(kind, tmp_path, timeout=0)
    here = iter(lambda: number(last.drop_select(None, None)), None)
    taken = [int(word) for words in said for word in words] + [n for n in here if n is not None]
    assert sorted(taken) == list(range(150))
    assert [entry.key for entry in buffer._backend.scan("kv-lookup/")] == []


def test_of_those_who_are_killed_only_what_was_in_their_hands_is_lost(kind: str, tmp_path: Path) -> None:
    buffer = opened(kind, tmp_path, timeout=0)
    for n in range(60):
        put_in(buffer, n)
    said: list[int] = []
    for _ in range(2):
        process = start("take", kind, tmp_path)
        ready(process)
        go(process)
        said += [int(line(process.stdout)) for _ in range(10)]
        process.kill()
        with process:  # `communicate` would not have what was read ahead
            assert process.stdout is not None
            said += [int(word) for word in process.stdout.read().split()]
    rest = list(iter(lambda: number(buffer.drop_select(None, None)), None))
    taken = said + [n for n in rest if n is not None]
    assert len(set(taken)) == len(taken)
    assert 58 <= len(taken) <= 60


def test_what_a_killed_taker_had_claimed_is_given_to_nobody(kind: str, tmp_path: Path) -> None:
    buffer = opened(kind, tmp_path, timeout=0)
    for n in range(3):
        put_in(buffer, n)
    assert start("die_reading", kind, tmp_path).wait(NEEDS_SECONDS) == -signal.SIGKILL
    assert [number(buffer.drop_select(None, None)) for _ in range(3)] == [1, 2, None]
    time.sleep(0.1)
    later = opened(kind, tmp_path, timeout=0, abandoned=0.05)
    assert number(later.drop_select(None, None)) is None
    assert later.counts() == {"abandoned": 1, "missed": 1}
    assert [entry.key for entry in later._backend.scan("kv-lookup/")] == []


def test_what_a_killed_inserter_had_begun_is_not_there(kind: str, tmp_path: Path) -> None:
    assert start("die_putting", kind, tmp_path).wait(NEEDS_SECONDS) == -signal.SIGKILL
    buffer = opened(kind, tmp_path, timeout=0)
    assert number(buffer.drop_select(None, None)) is None
    assert len(list(buffer._backend.scan("kv-lookup/room/"))) == 1
    time.sleep(0.1)
    put_in(opened(kind, tmp_path, capacity=32768, abandoned=0.05), 1)
    assert number(buffer.drop_select(None, None)) == 1
    assert [entry.key for entry in buffer._backend.scan("kv-lookup/")] == []


if __name__ == "__main__":
    {"take": take, "die_reading": die_reading, "die_putting": die_putting}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
