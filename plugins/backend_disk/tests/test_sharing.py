"""Needs of several processes on one directory: the last use of a blob, and rights that one of them has."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvloom_backend_disk import hold

KEYS = [f"{'0a' * 16}/-/{depth}-{depth:02x}{'3f' * 31}" for depth in range(5)]
LONG_AGO = 1_000_000_000


def file_of(root: Path, key: str) -> Path:
    (path,) = root.rglob(key.rpartition("/")[2])
    return path


def used(backend: Any) -> dict[str, float]:
    return {entry.key: entry.used for entry in backend.scan()}


def in_child(work: Callable[[], bool]) -> bool:
    """Fork, work, and exit without any clean-up but the collector's."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users reach: pytest closes its own to them whenever it starts, a test's pytest too."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


HOLDER = """
import sys
from kvloom_backend_disk.backend import DiskBackend
backend = DiskBackend(DiskBackend.Config(path=sys.argv[1]))
print(backend.hold("evict"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Another process that asks for the right; what it was told is on its stdout."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, process.stdout.readline().strip()
        process.kill()


# -- touch_many --------------------------------------------------------------------------------------------------------


def test_a_touch_says_when_a_blob_was_used_and_nothing_else(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    for key in KEYS:
        backend.put(key, [b"blob"])
        os.utime(file_of(tmp_path, key), (LONG_AGO, LONG_AGO + 0.123456789))
    before = {entry.key: entry for entry in backend.scan()}
    assert set(used(backend).values()) == {LONG_AGO}
    backend.touch_many([KEYS[3], "no/such/blob", KEYS[1], KEYS[0]])
    after = {entry.key: entry for entry in backend.scan()}
    assert LONG_AGO < after[KEYS[3]].used < after[KEYS[1]].used < after[KEYS[0]].used <= time.time() + 60
    assert after[KEYS[0]].used > time.time() - 60
    assert after[KEYS[2]] == before[KEYS[2]]
    assert {key: entry.modified for key, entry in after.items()} == {
        key: entry.modified for key, entry in before.items()
    }
    assert set(after) == set(KEYS)


def test_a_chain_of_any_length_keeps_its_order(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    chain = [f"fp/-/{depth}-{depth % 256:02x}{depth:062x}" for depth in range(300)]
    for key in chain:
        backend.put(key, [b"blob"])
    backend.touch_many(chain[::-1])
    times = used(backend)
    assert sorted(chain, key=times.__getitem__, reverse=True) == chain


def test_reading_is_no_use(tmp_path: Path, open_backend: Any, target: Any) -> None:
    backend = open_backend(tmp_path)
    backend.put(KEYS[0], [b"blob"])
    file = file_of(tmp_path, KEYS[0])
    os.utime(file, (LONG_AGO, LONG_AGO + 1))  # older than the time of writing: any plain read would move it
    assert backend.get(KEYS[0]) == b"blob" and backend.contains(KEYS[0])
    assert backend.get_into(KEYS[0], target()) and backend.get_range(KEYS[0], 0, memoryview(bytearray(2)))
    assert file.stat().st_atime == LONG_AGO


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of another user")
def test_the_files_of_another_user_are_read_and_not_touched(open_path: Path, open_backend: Any) -> None:
    backend = open_backend(open_path)
    for key in KEYS[:2]:
        backend.put(key, [b"blob"])
        os.utime(file_of(open_path, key), (LONG_AGO, LONG_AGO))
    for folder, _, _ in os.walk(open_path):
        os.chmod(folder, 0o755)
    os.chown(file_of(open_path, KEYS[1]), 12345, 12345)

    def as_other(work: Callable[[], bool]) -> bool:
        return in_child(lambda: os.setuid(12345) is None and work())

    assert as_other(lambda: backend.touch_many(KEYS[:2]) is None)
    times = used(backend)
    assert times[KEYS[0]] == LONG_AGO < times[KEYS[1]]
    assert as_other(lambda: all(backend.get(key) == b"blob" for key in KEYS[:2]))


def test_a_touch_that_fails_otherwise_says_so(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(tmp_path)
    backend.put(KEYS[0], [b"blob"])
    (tmp_path / "elsewhere").write_bytes(b"")
    file = file_of(tmp_path, KEYS[0])
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    backend.touch_many(KEYS)
    with pytest.raises(ValueError, match="not a key"):
        backend.touch_many(["../elsewhere"])

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    file.unlink()
    file.write_bytes(b"blob")
    monkeypatch.setattr(os, "utime", broken)
    with pytest.raises(OSError, match="Input/output"):
        backend.touch_many(KEYS)


# -- hold --------------------------------------------------------------------------------------------------------------


def test_one_instance_at_a_time(tmp_path: Path, open_backend: Any) -> None:
    first, second = open_backend(tmp_path), open_backend(tmp_path)
    assert first.hold("evict") and first.hold("evict")
    assert not second.hold("evict")
    assert second.hold("other") and not first.hold("other"), "another right"
    second.put("a", [b"x"])
    assert [entry.key for entry in first.scan()] == ["a"], "a lock is not a blob"
    first.close()
    first.close()
    assert second.hold("evict") and not first.hold("evict")
    second.close()
    assert first.hold("evict")


def test_the_right_of_a_backend_that_is_collected_is_free(tmp_path: Path, open_backend: Any) -> None:
    first = open_backend(tmp_path)
    assert first.hold("evict")
    del first
    gc.collect()
    assert open_backend(tmp_path).hold("evict")


def test_another_process_and_its_death(tmp_path: Path, open_backend: Any, holder: Any) -> None:
    process, told = holder
    assert told == "True"
    backend = open_backend(tmp_path)
    assert not backend.hold("evict")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert backend.hold("evict")


def test_another_process_is_told_no(tmp_path: Path, open_backend: Any, request: pytest.FixtureRequest) -> None:
    backend = open_backend(tmp_path)
    assert backend.hold("evict")
    _, told = request.getfixturevalue("holder")
    assert told == "False"
    assert backend.hold("evict")


def test_a_forked_child_has_no_right_and_takes_none_away(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    assert backend.hold("evict")
    assert in_child(lambda: not backend.hold("evict"))
    assert in_child(lambda: backend.close() is None)

    def collected() -> bool:
        nonlocal backend
        del backend
        gc.collect()
        return True

    assert in_child(collected)
    assert not open_backend(tmp_path).hold("evict"), "the parent still has it"
    assert backend.hold("evict")


def test_the_right_ends_with_the_process_though_its_children_live(tmp_path: Path, open_backend: Any) -> None:
    """Workers forked from a server that dies must not keep its right for ever."""
    out, back = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        backend = open_backend(tmp_path)
        held = backend.hold("evict")
        if os.fork() == 0:
            os.write(out[1], b"y" if held else b"n")
            os.read(back[0], 1)  # the grandchild lives on
            os._exit(0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(out[0], 1) == b"y"
    try:
        assert open_backend(tmp_path).hold("evict")
    finally:
        os.write(back[1], b"x")
        for fd in (*out, *back):
            os.close(fd)


def test_a_started_program_does_not_inherit_it(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    assert backend.hold("evict")
    with subprocess.Popen(["sleep", "60"], close_fds=False) as program:
        try:
            os.close(backend._holds._held.pop("evict"))  # as when this process dies: nobody unlocks
            assert open_backend(tmp_path).hold("evict")
        finally:
            program.kill()


def test_two_threads_of_one_instance(tmp_path: Path, open_backend: Any) -> None:
    for _ in range(20):
        backend = open_backend(tmp_path)
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda _, backend=backend: backend.hold("evict"), range(32)))
        backend.close()


def test_a_directory_that_is_removed_takes_the_right_with_it(tmp_path: Path, open_backend: Any) -> None:
    store = tmp_path / "store"
    first = open_backend(store)
    assert first.hold("evict")
    shutil.rmtree(store)
    second = open_backend(store)
    assert second.hold("evict")
    assert not first.hold("evict")
    second.close()
    assert first.hold("evict")


@pytest.mark.parametrize("name", ["", "a/b", "..\0", "ä", "x" * 101, "a b"])
def test_a_bad_name(tmp_path: Path, open_backend: Any, name: str) -> None:
    with pytest.raises(ValueError, match="hold: "):
        open_backend(tmp_path).hold(name)


def test_a_file_system_without_locks_says_so_once(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    caplog.set_level(logging.INFO, "kvloom.backend_disk")
    backend = open_backend(tmp_path)
    assert backend.hold("evict") and backend.hold("other") and backend.hold("evict")
    (record,) = caplog.records
    assert "no file locks in" in record.message


def lock(directory: Path) -> Path:
    return directory / "+hold-evict"


@pytest.mark.parametrize(("directory", "file"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666)])
def test_only_who_may_write_to_the_directory_may_open_the_lock(
    tmp_path: Path, open_backend: Any, directory: int, file: int
) -> None:
    backend = open_backend(tmp_path)
    tmp_path.chmod(directory)
    assert backend.hold("evict")
    assert stat.S_IMODE(lock(tmp_path).stat().st_mode) == file


def test_a_lock_that_readers_may_have_is_replaced(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    tmp_path.chmod(0o755)
    lock(tmp_path).touch()
    lock(tmp_path).chmod(0o644)
    with lock(tmp_path).open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        assert backend.hold("evict") and backend.hold("evict")
    assert not open_backend(tmp_path).hold("evict"), "the new one is a lock like any other"


def test_where_no_modes_are_kept_the_lock_of_another_stays(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    lock(tmp_path).touch()
    lock(tmp_path).chmod(0o644)
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    first = open_backend(tmp_path)
    assert first.hold("evict") and not open_backend(tmp_path).hold("evict") and first.hold("evict")


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_lies_in_the_place_of_a_lock_is_replaced(tmp_path: Path, open_backend: Any, put: Any) -> None:
    backend = open_backend(tmp_path)
    put(lock(tmp_path))
    assert backend.hold("evict")
    assert stat.S_ISREG(lock(tmp_path).lstat().st_mode) and not (tmp_path / "elsewhere").exists()


def test_who_is_shut_out_says_so(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    lock(tmp_path).mkdir()
    with pytest.raises(OSError, match="hold-evict"):
        backend.hold("evict")


def test_a_lock_that_cannot_be_taken_closes_each_descriptor_once(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(tmp_path)
    closed: list[int] = []
    opened, close = hold._open, os.close

    def only_to_read(path: Path, mode: int) -> int:
        if mode != os.O_RDONLY:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, mode)

    def nfs(*_: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    def closing(fd: int) -> None:
        closed.append(fd)
        close(fd)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", nfs)
        patched.setattr(hold, "_open", only_to_read)
        patched.setattr(os, "close", closing)
        with pytest.raises(OSError, match="Read-only file system"):
            backend.hold("evict")
    assert len(closed) == len(set(closed)), "the number may be another file's by then"


def test_no_descriptor_is_left_where_the_directory_vanishes_meanwhile(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(tmp_path)
    lock(tmp_path).touch(0o600)

    def vanished(_: Path) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(hold, "_writers", vanished)
        with pytest.raises(OSError, match="keeps replacing"):
            backend.hold("evict")
    assert len(os.listdir("/proc/self/fd")) == len(before)
