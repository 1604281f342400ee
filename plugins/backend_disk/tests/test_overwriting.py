"""A blob that takes the place of one that is evicted: the same file, unless somebody would notice."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import BackendError
from kvloom_backend_disk.backend import DiskBackend
from kvloom_backend_disk.scratch import Scratch

Open = Callable[..., DiskBackend]
OLD, NEW, OTHER = (f"{'0a' * 16}/-/{depth}-{'3f' * 32}" for depth in range(3))
LEASES = hasattr(fcntl, "F_SETLEASE")


def blob(seed: int, num_bytes: int = 1 << 20) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]
    memory[:] = random.Random(seed).randbytes(num_bytes)
    return memory


def place(backend: DiskBackend, key: str) -> Path:
    return Path(backend._layout.path(key))


def writes_over(backend: DiskBackend) -> bool:
    """Return whether overwriting gains something here."""
    return LEASES and backend._transfer.writes_over([blob(0)])


def audit(path: Path) -> None:
    assert not list((path / "+tmp").iterdir()), "a file was left over"


@given(old=st.integers(0, 600_000), new=st.integers(0, 600_000), more=st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_new_blob_is_whole_and_the_old_one_gone(
    tmp_path: Path, open_backend: Open, old: int, new: int, more: bool
) -> None:
    backend = open_backend(tmp_path)
    backend.put(OLD, [blob(1, old)])
    victims = [OLD]
    if more:
        backend.put(OTHER, [blob(2, old)])
        victims = [OTHER, OLD]
    backend.put_over(NEW, [blob(3, new)], victims)
    got = backend.get(NEW)
    assert got is not None and got == blob(3, new)
    assert not any(backend.contains_many([OLD, OTHER])) and [entry.key for entry in backend.scan()] == [NEW]
    audit(tmp_path)


def test_it_is_the_same_file_where_that_gains_something(tmp_path: Path, open_backend: Open) -> None:
    backend = open_backend(tmp_path)
    backend.put(OLD, [blob(1)])
    before = place(backend, OLD).stat()
    if not writes_over(backend):
        os.link(place(backend, OLD), tmp_path / "kept")  # so that its number is not given to another file
    backend.put_over(NEW, [blob(2, 200_001)], [OTHER, OLD])
    after = place(backend, NEW).stat()
    assert (after.st_ino == before.st_ino) == writes_over(backend) and after.st_size == 200_001
    assert after.st_mtime_ns > before.st_mtime_ns and after.st_blocks < before.st_blocks


def test_who_reads_the_old_blob_reads_it_to_the_end(tmp_path: Path, open_backend: Open) -> None:
    backend = open_backend(tmp_path)
    backend.put(OLD, [blob(1)])
    with open(place(backend, OLD), "rb") as reader:
        backend.put_over(NEW, [blob(2)], [OLD])
        assert reader.read() == blob(1)
    audit(tmp_path)


def test_a_copy_made_by_links_stays_as_it_was(tmp_path: Path, open_backend: Open) -> None:
    backend = open_backend(tmp_path)
    backend.put(OLD, [blob(1)])
    os.link(place(backend, OLD), tmp_path / "backup")
    backend.put_over(NEW, [blob(2)], [OLD])
    assert (tmp_path / "backup").read_bytes() == blob(1) and not backend.contains(OLD)


@pytest.mark.parametrize("what", ["directory", "link", "fifo"])
def test_what_is_no_file_is_not_written_over(tmp_path: Path, open_backend: Open, what: str) -> None:
    backend = open_backend(tmp_path)
    backend.put(OLD, [blob(1)])
    path, outside = place(backend, OLD), tmp_path / "outside"
    outside.write_bytes(blob(3))
    path.unlink()
    {"directory": path.mkdir, "link": lambda: path.symlink_to(outside), "fifo": lambda: os.mkfifo(path)}[what]()
    backend.put_over(NEW, [blob(2)], [OLD])
    assert backend.get(NEW) == blob(2) and not backend.contains(OLD) and outside.read_bytes() == blob(3)
    audit(tmp_path)


@pytest.mark.parametrize("old", [True, False])
def test_a_write_that_fails_leaves_neither(tmp_path: Path, open_backend: Open, old: bool) -> None:
    backend = open_backend(tmp_path)
    backend.put(OLD, [blob(1)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(blob(2)) - 1, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            backend.put_over(NEW, [blob(2)], [OLD] if old else [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry.key for entry in backend.scan()] == [OLD] * (not old)
    audit(tmp_path)


def test_readers_who_come_at_any_moment_get_one_version_or_none(tmp_path: Path, open_backend: Open) -> None:
    """Short of one who has looked the name up and not opened it yet: that one sees that it is not whole."""
    backend, number = open_backend(tmp_path), 2 if LEASES else 1
    keys, blobs = [OLD, NEW], [blob(seed, 256 << 10) for seed in range(8)]
    whole = [bytes(one) for one in blobs]
    backend.put(keys[0], [blobs[0]])
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        rng = random.Random(number)
        while not done.is_set():
            try:
                got = backend.get(rng.choice(keys))
            except BackendError:
                continue  # cut short while it was being read: the core tries again
            if got is not None and bytes(got) not in whole:
                wrong.append("torn")

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(1, 100):
        backend.put_over(keys[turn % 2], [blobs[turn % 8]], [keys[(turn + 1) % 2]])
    done.set()
    for reader in readers:
        reader.join()
    assert len(wrong) <= 1, f"{len(wrong)} of some hundred reads"
    audit(tmp_path)


@pytest.mark.skipif(not LEASES, reason="file leases are Linux's; where there are none, no file is ever written over")
def test_a_leased_file_is_a_miss(tmp_path: Path, open_backend: Open) -> None:
    backend = open_backend(tmp_path)
    backend.put(OLD, [blob(1)])
    fd = os.open(place(backend, OLD), os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert backend.get(OLD) is None
        backend.touch_many([OLD])
    finally:
        os.close(fd)
    assert backend.get(OLD) == blob(1)


def test_scratch_takes_nothing_that_somebody_has_open(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "+tmp")
    (tmp_path / "+tmp").mkdir()
    path = tmp_path / "file"
    for reads in (False, True):
        path.write_bytes(b"x" * 8192)
        reader = os.open(path, os.O_RDONLY) if reads else -1
        taken = scratch.take(str(path))
        assert (taken is None) == (reads or not LEASES)
        assert not path.exists()
        if reads:
            os.close(reader)
        elif taken:
            os.close(taken[1])
