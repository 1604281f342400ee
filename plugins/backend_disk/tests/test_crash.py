"""Processes that die, processes that meet, disks that are full: every blob is one version, whole, or absent."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom_backend_disk.scratch import FOREIGN_SECONDS, Scratch

fork = multiprocessing.get_context("fork")
SIZES = (100, 4096, 70_000, 300_000, 1 << 20)


def stamped(content: bytes) -> list[bytes]:
    return [hashlib.sha256(content).digest(), content]


def is_whole(blob: Any) -> bool:
    return hashlib.sha256(blob[32:]).digest() == blob[:32]


def unfinished(path: Path) -> list[str]:
    return sorted(os.listdir(path / "+tmp"))


def write_until_killed(backend: Any, blobs: list[Any], started: Any) -> None:
    started.set()
    for turn in itertools.count():
        backend.put(f"fp/-/{turn % 4}-{'00' * 32}", blobs[turn % len(blobs)])


@pytest.mark.parametrize("direct", ["auto", "always"])
def test_killed_while_writing(direct_path: Path, open_backend: Any, direct: str) -> None:
    rng = random.Random(1)
    blobs = [stamped(rng.randbytes(256) * rng.randrange(1, 40_000)) for _ in range(9)]
    backend = open_backend(direct_path, direct)
    for kills in itertools.count(1):
        started = fork.Event()
        child = fork.Process(target=write_until_killed, args=(backend, blobs, started))
        child.start()
        started.wait()
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        if kills >= 8 and unfinished(direct_path):
            break
        assert kills < 200, "no kill hit a write: nothing was tested"
    again = open_backend(direct_path, direct)
    assert unfinished(direct_path) == []
    found = [again.get(entry.key) for entry in again.scan()]
    assert found and all(map(is_whole, found))


def hold_a_draft(backend: Any, ready: Any) -> None:
    backend._scratch.open()
    ready.set()
    time.sleep(600)


def test_a_living_process_keeps_its_unfinished_file(tmp_path: Path, open_backend: Any) -> None:
    ready = fork.Event()
    child = fork.Process(target=hold_a_draft, args=(open_backend(tmp_path), ready))
    child.start()
    try:
        ready.wait()
        (draft,) = unfinished(tmp_path)
        assert draft.split(".")[1] == str(child.pid), "named after the parent: the pid must be that of the call"
        open_backend(tmp_path)
        assert unfinished(tmp_path) == [draft]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    open_backend(tmp_path)
    assert unfinished(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="start times come from /proc")
def test_only_the_dead_are_reclaimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch(tmp_path)
    path, fd = scratch.open()
    os.close(fd)
    host, pid, start, _ = mine = os.path.basename(path).split(".")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    past = time.time() - FOREIGN_SECONDS - 60

    def make(name: str, modified: float | None = None) -> str:
        (tmp_path / name).write_bytes(b"x")
        if modified:
            os.utime(tmp_path / name, (modified, modified))
        return name

    token = "0123456789abcdef"
    kept = {
        ".".join(mine),
        make(f"{host}.{pid}.{start}.{token}", past),  # old, but its writer lives
        make(f"{host}.1.{Path('/proc/1/stat').read_text().rpartition(')')[2].split()[19]}.{token}"),
        make(f"{'f' * 12}.{dead.pid}.1.{token}"),  # another host's, and recent
        make(f"{'e' * 12}.{dead.pid}.1.{token}", past),  # so is this: an old blob that it took to write over
        make("not-one-of-ours", past),
    }
    make(f"{host}.{dead.pid}.{start}.{token}")
    make(f"{host}.{pid}.{int(start) + 1}.{token}")  # the pid lives again as another process
    make(f"{host}.{10**30}.1.{token}")
    assert scratch.reclaim() == 3
    assert set(os.listdir(tmp_path)) == kept
    monkeypatch.setattr(Scratch, "_now", lambda self: os.stat(tmp_path).st_ctime + FOREIGN_SECONDS + 60)
    assert scratch.reclaim() == 2, "those of other hosts, which have not changed since"


def test_the_time_is_the_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, there = Scratch(tmp_path), tmp_path / f"{'f' * 12}.1.1.0123456789abcdef"
    there.write_bytes(b"x")
    monkeypatch.setattr(time, "time", lambda: 2 * time_of(there))
    assert scratch.reclaim() == 0 and there.exists() and len(os.listdir(tmp_path)) == 1


def time_of(path: Path) -> float:
    return path.stat().st_ctime


def test_a_listing_reclaims_what_died_since_the_store_was_opened(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(tmp_path)
    backend.put("fp/-/0-a", [b"blob"])
    draft = tmp_path / "+tmp" / f"{'f' * 12}.1.1.0123456789abcdef"
    draft.write_bytes(b"x")
    monkeypatch.setattr(Scratch, "_now", lambda self: time_of(draft) + FOREIGN_SECONDS + 60)
    assert [entry.key for entry in backend.scan()] == ["fp/-/0-a"] and unfinished(tmp_path) == []
    (tmp_path / "+tmp").rmdir()
    (tmp_path / "+tmp").write_bytes(b"no directory")
    assert [entry.key for entry in backend.scan()] == ["fp/-/0-a"]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="who has ended is known from /proc")
def test_a_process_that_nobody_has_waited_for_is_dead(tmp_path: Path, open_backend: Any) -> None:
    ready = fork.Event()
    child = fork.Process(target=hold_a_draft, args=(open_backend(tmp_path), ready))
    child.start()
    try:
        ready.wait()
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays as it is
        open_backend(tmp_path)
        assert unfinished(tmp_path) == []
    finally:
        child.kill()
        child.join()


def put_and_get(backend: Any, seed: int) -> None:
    rng = random.Random(seed)
    keys = [f"fp/-/{i}-{i:02x}{'00' * 31}" for i in range(3)]
    for _ in range(120):
        key = rng.choice(keys)
        if rng.random() < 0.1:
            backend.delete_many([key])
        elif rng.random() < 0.5:
            backend.put(key, stamped(rng.randbytes(16) * (rng.choice(SIZES) // 16)))
        else:
            blob = backend.get(key)
            assert blob is None or is_whole(blob), f"torn: {len(blob)} bytes"
    assert all(entry.key in keys for entry in backend.scan())


@pytest.mark.parametrize("direct", ["auto", "always"])
def test_processes_that_meet_on_the_same_keys(direct_path: Path, open_backend: Any, direct: str) -> None:
    children = [fork.Process(target=put_and_get, args=(open_backend(direct_path, direct), seed)) for seed in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert unfinished(direct_path) == []


@contextlib.contextmanager
def mounted(path: Path, kind: str, options: str) -> Iterator[None]:
    done = subprocess.run(["mount", "-t", kind, "-o", options, "none", str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount {kind}: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def full_at_4_mib(tmp_path: Path) -> Iterator[None]:
    with mounted(tmp_path, "tmpfs", "size=4m"):
        yield


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounting needs root on Linux")
@pytest.mark.usefixtures("full_at_4_mib")
def test_a_full_disk(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    backend.put("fp/-/a", stamped(bytes(1 << 20)))
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            backend.put("fp/-/a", stamped(bytes(5 << 20)))
    assert unfinished(tmp_path) == []
    assert len(backend.get("fp/-/a")) == (1 << 20) + 32 and is_whole(backend.get("fp/-/a"))
    sizes = {"b": 1 << 20, "c": 5 << 20, "d": 1 << 20, "e": 5 << 20}
    requests = [(f"fp/-/{key}", stamped(bytes(size))) for key, size in sizes.items()]
    outcomes: list[tuple[int, Exception | None]] = []
    backend.put_many(requests, lambda number, outcome: outcomes.append((number, outcome)))
    assert [(number, getattr(outcome, "errno", None)) for number, outcome in outcomes] == [
        (0, None), (1, errno.ENOSPC), (2, None), (3, errno.ENOSPC),
    ]  # fmt: skip
    assert unfinished(tmp_path) == []
    assert is_whole(backend.get("fp/-/b")) and is_whole(backend.get("fp/-/d"))


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounting needs root on Linux")
@pytest.mark.usefixtures("full_at_4_mib")
def test_a_disk_that_is_full_at_the_start(tmp_path: Path, open_backend: Any, infos: Any) -> None:
    open_backend(tmp_path).put("fp/-/a", stamped(b"old"))
    infos.clear()
    with contextlib.suppress(OSError), open(tmp_path / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    backend = open_backend(tmp_path)
    assert infos.text == ""
    assert is_whole(backend.get("fp/-/a"))
    with pytest.raises(OSError, match="No space left"):
        backend.put("fp/-/b", stamped(bytes(4096)))


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_a_write_that_fails_half_way(direct_path: Path, open_backend: Any, direct: str) -> None:
    backend = open_backend(direct_path, direct)
    backend.put("fp/-/a", stamped(b"old"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            backend.put("fp/-/a", stamped(bytes(2 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert unfinished(direct_path) == []
    assert backend.get("fp/-/a")[32:] == b"old"


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounting needs root on Linux")
def test_a_file_system_without_o_direct_says_so(tmp_path: Path, open_backend: Any, infos: Any) -> None:
    with mounted(tmp_path, "ramfs", "rw"):
        backend = open_backend(tmp_path)
        assert [record.levelname for record in infos.records] == ["INFO"]
        assert f"no O_DIRECT in {tmp_path}" in infos.text
        backend.put("fp/-/a", stamped(bytes(1 << 20)))
        assert is_whole(backend.get("fp/-/a"))
        with pytest.raises(ValueError, match=r"direct: O_DIRECT does not work in .* use `direct: auto`"):
            open_backend(tmp_path, "always")
