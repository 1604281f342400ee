"""Blobs of several parts: whole, of one version, and nothing is written to memory that was given back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvloom import BackendError, CorruptBlobError
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.stores import obstore_store
from kvloom_backend_fsspec.stores.obstore_store import PART_BYTES, ObstoreStore
from kvloom_testkit.backends.doubles import put_all

SIZE = 3 * PART_BYTES + 12_345


class Room:
    """A sink that tells what arrives, and may do something then."""

    def __init__(self, act: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.steps: list[int] = []
        self.memory = bytearray()
        self._act = act

    def reserve(self, num_bytes: int) -> memoryview:
        self.memory = bytearray(num_bytes + 100)  # more than was asked for, as a pool gives
        return memoryview(self.memory)

    def filled(self, num_bytes: int) -> None:
        self.steps.append(num_bytes)
        self._act(num_bytes)


@pytest.fixture
def backend(tmp_path: Path) -> FsspecBackend:
    config = FsspecBackend.Config(url=f"file://{tmp_path}/kv")
    backend = FsspecBackend(config)
    backend._clients[os.getpid()] = ObstoreStore(config)  # as of a bucket; local files are read without it
    return backend


@pytest.mark.parametrize("expected", [False, True], ids=["met by surprise", "expected"])
def test_it_arrives_from_the_front(backend: FsspecBackend, expected: bool) -> None:
    blob = os.urandom(SIZE)
    backend.put("a", [blob[:5], blob[5:]])
    if expected:
        backend.get("a")
    room = Room()
    assert backend.get_into("a", room)
    assert room.memory == blob + bytes(100)
    assert room.steps == sorted(set(room.steps)) and room.steps[-1] == SIZE
    assert backend.get("a") == blob


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "deleted"])
def test_two_versions_are_never_mixed(backend: FsspecBackend, replaced: bool) -> None:
    backend.put("a", [bytes(SIZE)])

    def interfere(num_bytes: int) -> None:
        if num_bytes == PART_BYTES:
            backend.put("a", [b"\1" * SIZE]) if replaced else backend.delete("a")

    with pytest.raises(BackendError, match="while it was read"):
        backend.get_into("a", Room(interfere))


def test_nothing_is_written_once_it_has_returned(backend: FsspecBackend) -> None:
    backend.put("a", [b"\1" * SIZE])

    class EnoughError(Exception):
        pass

    def enough(num_bytes: int) -> None:
        if num_bytes > PART_BYTES:
            raise EnoughError

    room = Room(enough)
    with pytest.raises(EnoughError):
        backend.get_into("a", room)
    left = bytes(room.memory)
    assert backend.get("a") == b"\1" * SIZE
    assert room.memory == left


def test_parts_under_way_end_where_another_failed(backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.put("a", [b"\1" * SIZE])
    store, raised = backend._store(), Event()
    begin = store._begin

    def begin_late(name: str, part: tuple[int, int] | None, tag: str | None = None) -> Any:
        if part is not None and part[0] == 2 * PART_BYTES:
            raised.wait(20)
        return begin(name, part, tag)

    def enough(num_bytes: int) -> None:
        if num_bytes > PART_BYTES:
            raise ValueError

    def waits(parts: Any) -> None:
        raised.set()
        wait(parts)

    monkeypatch.setattr(store, "_begin", begin_late)
    monkeypatch.setattr(obstore_store, "wait", waits)
    room = Room(enough)
    with pytest.raises(ValueError):
        backend.get_into("a", room)
    assert not room.memory[3 * PART_BYTES - 1]


@pytest.mark.parametrize("expected_size", [5, SIZE])
def test_an_empty_object_is_corrupt(backend: FsspecBackend, tmp_path: Path, expected_size: int) -> None:
    backend.put("before", [bytes(expected_size)])
    backend.get("before")
    (tmp_path / "kv" / "a=kv").write_bytes(b"")
    with pytest.raises(CorruptBlobError, match="an empty object"):
        backend.get("a")


def test_the_last_of_many_puts_of_one_key_wins(backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    store = backend._store()
    put = store.put

    def first_one_is_slow(name: str, data: bytes) -> None:
        if data == b"first":
            time.sleep(0.3)
        put(name, data)

    monkeypatch.setattr(store, "put", first_one_is_slow)
    put_all(backend, [("b", [b"other"]), ("a", [b"first"]), ("a", [b"second"])])
    backend.close()  # waits for what is still under way
    again = type(backend)(backend.config)
    assert [again.get(key) for key in ("a", "b")] == [b"second", b"other"]
    again.close()
