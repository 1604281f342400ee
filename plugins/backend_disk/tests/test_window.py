"""Reads and writes through the page cache: followed to the disk, in order, and dropped from the cache later."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvloom_backend_disk import native_reads, pagecache, window
from kvloom_backend_disk.backend import DiskBackend
from kvloom_backend_disk.pagecache import is_cached
from kvloom_backend_disk.transfer import SMALL_BLOB_BYTES, SMALL_BYTES, Transfer
from kvloom_backend_disk.window import Window, _Line

KEPT_BYTES = 3 * SMALL_BYTES


@pytest.fixture
def backend(direct_path: Path, open_backend: Any) -> DiskBackend:
    """Keeps three small blobs in the page cache."""
    opened: DiskBackend = open_backend(direct_path, page_cache=KEPT_BYTES)
    if opened._transfer.window is None:
        pytest.skip("on overlayfs, before Linux 6.5 or under a system call filter, writes are not followed, but direct")
    return opened


def key(number: int) -> str:
    return f"{'0' * 32}/-/0-{number:064x}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blobs on their way."""
    monkeypatch.setattr(window, "UNWRITTEN_BYTES", 2 * SMALL_BYTES)


class Noted(Window):
    """Notes what it would do to which file."""

    def __init__(self) -> None:
        super().__init__(KEPT_BYTES)
        self.done: list[tuple[str, str]] = []

    def _wait_for(self, path: str) -> None:
        self.done.append((path, "wait"))

    def _drop(self, path: str) -> None:
        self.done.append((path, "drop"))


@pytest.mark.usefixtures("short")
def test_later_writers_wait_and_later_still_it_is_dropped() -> None:
    noted = Noted()
    for number in range(5):
        noted.written(str(number), SMALL_BYTES)
    assert noted.done == [("0", "wait"), ("1", "wait"), ("0", "drop"), ("2", "wait"), ("1", "drop")]
    noted.written("large", 100 * SMALL_BYTES)
    assert noted.done[5:] == [("3", "wait"), ("4", "wait"), ("2", "drop"), ("3", "drop"), ("4", "drop")]


@pytest.mark.usefixtures("short")
def test_what_is_read_stays_and_drops_what_was_used_before_it() -> None:
    noted = Noted()
    for path in "abc":
        noted.written(path, SMALL_BYTES)
    noted.done.clear()
    noted.read([("a", SMALL_BYTES), ("d", SMALL_BYTES)])
    assert noted.done == [("b", "drop")]
    noted.read([("e", SMALL_BYTES), ("f", SMALL_BYTES)])
    assert noted.done[1:] == [("c", "drop"), ("a", "drop")]


def test_a_blob_is_on_its_way_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def note(fd: int, *how: int) -> None:
        asked.append((os.fstat(fd).st_size, *how))

    monkeypatch.setattr(window, "_sync_file_range", lambda: note)
    with open(tmp_path / "blob", "w+b", buffering=0) as file:
        Transfer("auto", window=Window(KEPT_BYTES)).write(file.fileno(), [bytes(SMALL_BYTES), b"end"])
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("how", ["alone", "with others", "in part"])
def test_what_was_read_last_is_in_the_page_cache(
    direct_path: Path, backend: DiskBackend, target: Any, open_backend: Any, drop_from_cache: Any, how: str
) -> None:
    size = SMALL_BLOB_BYTES + 4096
    for number in range(5):
        backend.put(key(number), [bytes(size)])
    drop_from_cache(direct_path)
    backend = open_backend(direct_path, page_cache=3 * size)
    assert cached(backend, *range(5)) == [False] * 5
    numbers = [0, 1, 2, 0, 3]
    if how == "with others":
        backend.get_many_into([(key(number), target()) for number in [9, *numbers]], lambda *_: None)
    for number in numbers:
        if how == "alone":
            assert backend.get_into(key(number), target())
        elif how == "in part":
            assert backend.get_range(key(number), 4096, target().reserve(SMALL_BYTES))
    assert cached(backend, *range(5)) == [True, False, True, True, False], "1 was dropped, 4 not read"


@pytest.mark.skipif(not native_reads.available(), reason="without native code, each is read when it is asked for")
def test_the_next_small_blobs_are_read_meanwhile(
    direct_path: Path, backend: DiskBackend, target: Any, drop_from_cache: Any
) -> None:
    for number, size in enumerate([SMALL_BYTES, SMALL_BYTES, SMALL_BLOB_BYTES + 4096, SMALL_BLOB_BYTES]):
        backend.put(key(number), [bytes(size)])
    drop_from_cache(direct_path)
    sinks = [target() for _ in range(4)]
    seen: list[list[bool]] = []
    sinks[0].filled = lambda _: seen.append(cached(backend, 1, 2, 3))
    backend.get_many_into([(key(number), sink) for number, sink in enumerate(sinks)], lambda *_: None)
    assert seen[0] == [True, False, True], "the kernel reads ahead by itself in a large one"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("direct", ["never", "always"])
def test_in_other_modes_reads_drop_nothing(direct_path: Path, open_backend: Any, target: Any, direct: str) -> None:
    open_backend(direct_path, "never").put(key(0), [bytes(SMALL_BYTES)])
    backend: DiskBackend = open_backend(direct_path, direct, page_cache=0)
    backend.put(key(1), [bytes(SMALL_BYTES)])
    for number in (0, 1, 0, 1):
        assert backend.get_into(key(number), target())
    assert cached(backend, 0) == [True]


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

    monkeypatch.setattr(Window, "begin", refuse)
    monkeypatch.setattr(_Line, "add", refuse)
    backend: DiskBackend = open_backend(direct_path, direct)
    backend.put(key(0), [bytes(size)])
    assert backend.get(key(0)) == bytes(size)


class Answers:
    """System calls that are taken, and do what they do on systems that cannot follow a write."""

    @staticmethod
    def no_symbol(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(window, "_sync_file_range", lambda: None)

    @staticmethod
    def refused(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(window, "_sync_file_range", lambda: lambda *_: -1)

    @staticmethod
    def ignored(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(window, "_sync_file_range", lambda: lambda *_: 0)

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
    windowed = backend._transfer.window
    assert windowed is not None
    with windowed._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            try:
                backend.put(key(0), [bytes(SMALL_BYTES)])
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and backend.contains(key(0))
