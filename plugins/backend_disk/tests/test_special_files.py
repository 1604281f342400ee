"""A special file at a blob's path: no call waits for it, and it is removed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom import CorruptBlobError, UnreadableBlobError
from kvloom_backend_disk import native_reads

KEY = f"{'0a' * 16}/-/7-{'3f' * 32}"


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the paths of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _full_directory(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "sub/file").write_bytes(b"x")
    (path / "link").symlink_to(path.parents[4] / "outside")


MAKE: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "full directory": _full_directory,
    "socket": _socket,
    "link to a file": lambda path: path.symlink_to(path.parents[4] / "outside/file"),
    "link to a directory": lambda path: path.symlink_to(path.parents[4] / "outside"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Whoever waits for the writer of a FIFO waits for ever: here that ends in a failure."""

    def stop(*_: Any) -> None:
        raise AssertionError("waits for ever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=MAKE)
def special(request: Any, tmp_path: Path, open_backend: Any) -> Any:
    """A store with something at the path of KEY that is not a blob, and that path."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_bytes(b"outside")
    backend = open_backend(tmp_path / "store")
    path = tmp_path / "store" / KEY.replace("/7-", "/+3f/7-")
    path.parent.mkdir(parents=True)
    MAKE[request.param](path)
    yield backend, path
    assert (tmp_path / "outside/file").read_bytes() == b"outside"


def test_reading_it_says_corrupt_and_does_not_wait(special: Any, target: Any) -> None:
    backend, path = special
    for read in (
        lambda: backend.get(KEY),
        lambda: backend.get_into(KEY, target()),
        lambda: backend.get_range(KEY, 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(CorruptBlobError, match="not a regular file"):
            read()
    assert os.path.lexists(path)


@pytest.mark.parametrize("many", [False, True])
def test_delete_removes_it(special: Any, many: bool) -> None:
    backend, path = special
    if many:
        backend.delete_many([KEY])
    else:
        backend.delete(KEY)
    assert not os.path.lexists(path)
    assert backend.get(KEY) is None


def test_put_replaces_it(special: Any) -> None:
    backend, path = special
    backend.put(KEY, [b"blob"])
    assert backend.get(KEY) == b"blob"
    assert path.is_file() and not path.is_symlink()


def test_a_directory_that_a_link_leads_to_outside_is_not_emptied(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path / "store")
    outside = tmp_path / "outside" / f"7-{'3f' * 32}"
    outside.mkdir(parents=True)
    (outside / "file").write_bytes(b"x")
    shard = tmp_path / "store" / KEY.replace(f"/7-{'3f' * 32}", "/+3f")
    shard.parent.mkdir(parents=True)
    shard.symlink_to(outside.parent)
    for change in (lambda: backend.delete(KEY), lambda: backend.put(KEY, [b"blob"])):
        with pytest.raises((OSError, CorruptBlobError), match="not empty"):
            change()
    assert (outside / "file").read_bytes() == b"x"
    assert not os.listdir(tmp_path / "store/+tmp")


@pytest.mark.parametrize("level", ["", "/-", "/-/+3f"])
@pytest.mark.parametrize("kind", ["file", "fifo", "link to nothing"])
def test_what_lies_where_a_directory_belongs_fails_nothing_and_gives_way(
    tmp_path: Path, open_backend: Any, target: Any, level: str, kind: str
) -> None:
    backend = open_backend(tmp_path / "store")
    path = tmp_path / "store" / (KEY.partition("/")[0] + level)
    path.parent.mkdir(parents=True, exist_ok=True)
    {**MAKE, "file": Path.touch}[kind](path)
    assert backend.get(KEY) is None and not backend.get_into(KEY, target()) and not backend.contains(KEY)
    backend.touch_many([KEY])
    backend.delete(KEY)
    backend.put(KEY, [b"blob"])
    assert backend.get(KEY) == b"blob"


@pytest.mark.parametrize("level", ["", "/-", "/-/+3f"])
@pytest.mark.parametrize("long", [False, True])
def test_a_link_that_can_lead_nowhere_where_a_directory_belongs_gives_way(
    tmp_path: Path, open_backend: Any, level: str, long: bool
) -> None:
    backend = open_backend(tmp_path)
    path = tmp_path / (KEY.partition("/")[0] + level)
    for put in (lambda: backend.put(KEY, [b"blob"]), lambda: backend.create(KEY, [b"blob"])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("z" * 300 if long else path.name)
        with pytest.raises(CorruptBlobError):
            backend.get(KEY)
        assert not backend.contains(KEY) and not [*backend.scan()]
        backend.touch_many([KEY])
        backend.delete_many([KEY])
        put()
        assert backend.get(KEY) == b"blob"
        shutil.rmtree(path)


@pytest.mark.parametrize("kind", ["file", "fifo", "socket", "link to nothing", "link to itself"])
def test_what_lies_where_drafts_belong_gives_way(tmp_path: Path, open_backend: Any, kind: str) -> None:
    itself = {"link to itself": lambda path: path.symlink_to(path.name), "file": Path.touch}
    for late in (False, True):
        (root := tmp_path / f"store-{late}").mkdir()
        if late:
            backend = open_backend(root)
            (root / "+tmp").rmdir()
        {**MAKE, **itself}[kind](root / "+tmp")
        if not late:
            backend = open_backend(root)
        backend.put(KEY, [b"blob"])
        assert backend.get(KEY) == b"blob"


@pytest.mark.parametrize("native", [True, False])
def test_a_file_that_this_user_may_not_read_is_no_failure_of_the_store(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Another user's, who writes with a narrow mask. A directory that may not be searched is a failure."""
    backend = open_backend(tmp_path)
    backend.put(KEY, [b"blob"])
    refused = PermissionError(errno.EACCES, "Permission denied")

    def refuse(path: str) -> int:
        raise refused

    monkeypatch.setattr(native_reads, "available", lambda: native)
    monkeypatch.setattr(native_reads, "_failed", lambda files, at, path, failure: failure(path, refused))
    monkeypatch.setattr(native_reads.Files, "error", lambda files, number: errno.EACCES)
    monkeypatch.setattr("kvloom_backend_disk.backend._open_to_read", refuse)
    for searched in (True, False):
        kind = UnreadableBlobError if searched else PermissionError
        if not searched:
            monkeypatch.setattr("os.lstat", refuse)
        with pytest.raises(kind, match="may not read the file" if searched else "Permission denied"):
            backend.get(KEY)
