"""File systems that fill up, become read-only, vanish, or refuse: serving goes on, and recovers by itself."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from outage import open_hurried, serve_through, serve_without_permission
from reliability_children import processes
from reliability_support import GENEROUS_SECONDS, eventually

NOBODY = 65534
Tally = Callable[..., None]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "kvloom")


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], capture_output=True, check=True)


def set_up(*command: str | Path) -> None:
    """`run`, where a machine that cannot do it (a container without the right to mount) says nothing about kvloom."""
    try:
        run(*command)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        pytest.skip(f"this machine lets nobody make a file system to fill: {error} {said.decode().strip()}")


@pytest.fixture(params=["tmpfs", pytest.param("ext4", marks=pytest.mark.slow)])
def small_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The root of a file system of its own, of 16 MiB."""
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("mounting needs root on Linux")
    path = tmp_path / "mounted"
    path.mkdir()
    if request.param == "tmpfs":
        set_up("mount", "-t", "tmpfs", "-o", "size=16m", "none", path)
    else:
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(16 << 20)
        set_up("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
        set_up("mount", "-o", "loop", image, path)
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path: Path, leave_bytes: int) -> None:
    """Take the file system's room up to `leave_bytes`, which the file system keeps for somebody else."""
    free = os.statvfs(path.parent)
    with open(path, "wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave_bytes)


def test_a_full_disk(small_path: Path, tally: Tally) -> None:
    store, filler = small_path / "kv", small_path / "filler"
    with open_hurried(store, None) as engine:
        tally(outages=1, **serve_through(engine, store, lambda: fill(filler, 300_000), filler.unlink))


def test_a_disk_smaller_than_the_capacity(small_path: Path, tally: Tally) -> None:
    store, filler = small_path / "kv", small_path / "filler"
    with open_hurried(store, "1GiB") as engine:
        tally(outages=1, **serve_through(engine, store, lambda: fill(filler, 300_000), filler.unlink))


def remount(path: Path, how: str) -> None:
    def done() -> bool:  # busy as long as a file is open for writing
        return subprocess.run(["mount", "-o", f"remount,{how}", path], capture_output=True, check=False).returncode == 0

    eventually(done, f"remounted {how}")


def test_a_disk_that_becomes_read_only(small_path: Path, tally: Tally) -> None:
    store = small_path / "kv"
    with open_hurried(store) as engine:
        seen = serve_through(engine, store, lambda: remount(small_path, "ro"), lambda: remount(small_path, "rw"))
    assert seen["prompts_hit_meanwhile"], "reading goes on"
    tally(outages=1, **seen)


def test_a_directory_that_is_removed(tmp_path: Path, tally: Tally) -> None:
    store = tmp_path / "kv"
    with open_hurried(store) as engine:
        tally(outages=1, **serve_through(engine, store, lambda: shutil.rmtree(store), lambda: None))


def test_a_directory_whose_place_a_file_takes(tmp_path: Path, tally: Tally) -> None:
    store, away = tmp_path / "kv", tmp_path / "away"

    def begin() -> None:
        store.rename(away)
        while not store.is_file():
            try:
                store.write_bytes(b"not a directory")
            except IsADirectoryError:  # made again meanwhile, for the lock file
                shutil.rmtree(store, ignore_errors=True)

    def end() -> None:
        store.unlink()
        away.rename(store)

    with open_hurried(store) as engine:
        tally(outages=1, **serve_through(engine, store, begin, end))


@pytest.mark.parametrize("small_path", ["ext4"], indirect=True)  # a tmpfs does not outlive its mount
def test_a_file_system_that_is_not_mounted_any_more(small_path: Path, tally: Tally) -> None:
    """Unmounting uncovers the empty directory below the mount point."""
    store, device = small_path, small_path.parent / "image"

    def unmount() -> None:
        run("umount", "--lazy", store)  # or the lock file, which is open, would keep it

    with open_hurried(store) as engine:
        tally(outages=1, **serve_through(engine, store, unmount, lambda: run("mount", "-o", "loop", device, store)))


@pytest.mark.parametrize("what", ["the directory", "writing", "the files"])
def test_permission_denied(ram_path: Path, what: str, tally: Tally) -> None:
    mine, theirs = processes.Pipe(duplex=False)
    user = NOBODY if os.getuid() == 0 else os.getuid()
    child = processes.Process(target=serve_without_permission, args=(str(ram_path), user, what, theirs), daemon=True)
    child.start()
    try:
        assert mine.poll(3 * GENEROUS_SECONDS), "it hangs"
        seen = mine.recv()
    finally:
        child.kill()
        child.join()
    assert isinstance(seen, dict), seen
    tally(outages=1, **seen)
