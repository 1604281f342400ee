"""Writes through the page cache: followed to the disk, in order, and dropped from the cache later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloom_backend_disk import pagecache, write_behind
from kvloom_backend_disk.backend import DiskBackend
from kvloom_backend_disk.pagecache import is_cached
from kvloom_backend_disk.transfer import SMALL_BYTES, Transfer
from kvloom_backend_disk.write_behind import WriteBehind


@pytest.fixture
def backend(direct_path: Path, open_backend: Any) -> DiskBackend:
    opened: DiskBackend = open_backend(direct_path)
    if opened._transfer._behind is None:
        pytest.skip("on overlayfs, before Linux 6.5 or under a system call filter, writes are not followed, but direct")
    return opened


def key(number: int) -> str:
    return f"{'0' * 32}/-/0-{number:064x}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blobs on their way, three kept."""
    monkeypatch.setattr(write_behind, "UNWRITTEN_BYTES", 2 * SMALL_BYTES)
    monkeypatch.setattr(write_behind, "KEPT_BYTES", 3 * SMALL_BYTES)


@pytest.mark.usefixtures("short")
def test_later_writers_wait_and_later_still_it_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []

    def note(path: str, use: Callable[[int], object]) -> None:
        done.append((Path(path).name, "wait" if "WAIT" in "".join(use.__code__.co_names) else "drop"))

    monkeypatch.setattr(write_behind, "_opened", note)
    behind = WriteBehind()
    for number in range(5):
        behind.note(str(tmp_path / str(number)), SMALL_BYTES)
    assert done == [("0", "wait"), ("1", "wait"), ("0", "drop"), ("2", "wait"), ("1", "drop")]
    behind.note("large", 100 * SMALL_BYTES)
    assert done[5:] == [("3", "wait"), ("4", "wait"), ("2", "drop"), ("3", "drop"), ("4", "drop")]


def test_a_blob_is_on_its_way_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def note(fd: int, *how: int) -> None:
        asked.append((os.fstat(fd).st_size, *how))

    monkeypatch.setattr(write_behind, "_sync_file_range", lambda: note)
    with open(tmp_path / "blob", "w+b", buffering=0) as file:
        Transfer("auto", followed=True).write(file.fileno(), [bytes(SMALL_BYTES), b"end"])
    assert asked == [(SMALL_BYTES + 3, 0, 0, 2)]


def cached(backend: DiskBackend, *numbers: int) -> list[bool]:
    found = []
    for number in numbers:
        with open(backend._layout.path(key(number)), "rb") as file:
            found.append(is_cached(file.fileno(), 0, SMALL_BYTES))
    return found


@pytest.mark.usefixtures("short")
def test_what_was_written_last_is_in_the_page_cache(backend: DiskBackend) -> None:
    for number in range(6):
        backend.put(key(number), [os.urandom(SMALL_BYTES)])
    assert cached(backend, *range(6)) == [False] * 3 + [True] * 3


@pytest.mark.usefixtures("short")
def test_a_blob_that_is_written_anew_is_the_last_one(backend: DiskBackend) -> None:
    for number in [0, 1, *[0] * 9, 2]:
        backend.put(key(number), [os.urandom(SMALL_BYTES)])
    assert cached(backend, 0, 1, 2) == [True] * 3
    backend.put(key(3), [os.urandom(SMALL_BYTES)])
    assert cached(backend, 0, 1, 2, 3) == [True, False, True, True]


@pytest.mark.usefixtures("short")
def test_files_that_are_gone_or_something_else_hold_nobody_up(backend: DiskBackend) -> None:
    for number in range(8):
        backend.put(key(number), [bytes(SMALL_BYTES)])
        path = Path(backend._layout.path(key(number)))
        if number % 3 == 0:
            backend.delete(key(number))
        elif number % 3 == 1:
            path.unlink()
            os.mkfifo(path)
    assert backend.get(key(5)) == bytes(SMALL_BYTES)


@pytest.mark.parametrize(
    ("direct", "size"), [("auto", SMALL_BYTES - 1), ("never", SMALL_BYTES), ("always", SMALL_BYTES)]
)
def test_small_blobs_and_other_modes_are_left_to_the_kernel(
    direct_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch, direct: str, size: int
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(WriteBehind, "begin", refuse)
    monkeypatch.setattr(WriteBehind, "note", refuse)
    backend: DiskBackend = open_backend(direct_path, direct)
    backend.put(key(0), [bytes(size)])
    assert backend.get(key(0)) == bytes(size)


class Answers:
    """System calls that are taken, and do what they do on systems that cannot follow a write."""

    @staticmethod
    def no_symbol(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(write_behind, "_sync_file_range", lambda: None)

    @staticmethod
    def refused(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(write_behind, "_sync_file_range", lambda: lambda *_: -1)

    @staticmethod
    def ignored(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(write_behind, "_sync_file_range", lambda: lambda *_: 0)

    @staticmethod
    def untold(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(pagecache, "_syscall", lambda *_: -1)


@pytest.mark.parametrize("answer", ["no_symbol", "refused", "ignored", "untold"])
def test_where_it_cannot_be_followed_large_blobs_are_written_past_the_cache(
    backend: DiskBackend, direct_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    blob = [bytes(SMALL_BYTES)]
    assert not backend._transfer.writes_directly(blob)
    getattr(Answers, answer)(monkeypatch)
    assert open_backend(direct_path)._transfer.writes_directly(blob)


def test_a_child_that_was_forked_under_the_lock_writes(backend: DiskBackend) -> None:
    behind = backend._transfer._behind
    assert behind is not None
    with behind._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            try:
                backend.put(key(0), [bytes(SMALL_BYTES)])
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and backend.contains(key(0))
