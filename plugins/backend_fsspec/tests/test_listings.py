"""A directory is listed whatever happens in it meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom import BackendError, IncompleteListingError
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.stores import base, fsspec_store


class ServerError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status_code = status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The store's own: only sleeping takes time."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: vars(clock).update(now=clock.now + seconds)
    monkeypatch.setattr(fsspec_store, "time", clock)
    return clock


@pytest.fixture
def backend() -> FsspecBackend:
    backend = FsspecBackend(FsspecBackend.Config(url=f"memory://{uuid.uuid4().hex}", timeout="5s"))
    backend.put("a/b", [b"blob"])
    return backend


def failing(backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch, verb: str, status: int, times: int) -> list[int]:
    """Have the store's client answer `status` so many times; a list of the calls."""
    fs: Any = backend._store()._fs  # type: ignore[attr-defined]
    usual, calls = getattr(fs, verb), []

    def call(*args: Any, **more: Any) -> Any:
        calls.append(status)
        if len(calls) <= times:
            raise ServerError(status)
        return usual(*args, **more)

    monkeypatch.setattr(fs, verb, call)
    return calls


def test_a_server_that_cannot_list_while_files_vanish_is_asked_until_the_timeout(
    backend: FsspecBackend, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(backend, monkeypatch, "ls", 500, 20)
    assert [entry.key for entry in backend.scan()] == ["a/b"]
    failing(backend, monkeypatch, "ls", 500, 10_000)
    with pytest.raises(BackendError, match="answered 500"):
        list(backend.scan())
    assert clock.now < 2 * 5.0, "one timeout for each listing"


def test_what_a_client_did_wrong_is_not_asked_again(
    backend: FsspecBackend, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in (403, 507):
        calls = failing(backend, monkeypatch, "ls", status, 10_000)
        with pytest.raises(BackendError):
            list(backend.scan())
        assert len(calls) == 1
        monkeypatch.undo()


def test_other_requests_are_repeated_as_often_as_the_settings_say(
    backend: FsspecBackend, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = failing(backend, monkeypatch, "cat_file", 500, 10_000)
    with pytest.raises(BackendError):
        backend.get("a/b")
    assert len(calls) == 3


CHUNK = f"{'0a' * 16}/-/0-{'5b' * 32}"


def local(tmp_path: Path) -> FsspecBackend:
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}"))
    backend.put(CHUNK, [b"blob"])
    return backend


def test_a_local_listing_goes_past_links_that_lead_nowhere(tmp_path: Path) -> None:
    backend = local(tmp_path)
    above = (tmp_path / CHUNK).parent
    (above / "loop").symlink_to("loop")
    (above / "back").symlink_to(tmp_path)
    (above / "root").symlink_to("/")
    (above / "gone").symlink_to("nowhere")
    (above / "again=kv").symlink_to(f"{CHUNK.rpartition('/')[2]}=kv")
    assert sorted(entry.key for entry in backend.scan()) == sorted([CHUNK, f"{'0a' * 16}/-/again"])
    for driver in ("auto", "fsspec"):
        for nothing in (f"{tmp_path}/none", f"{above}/loop", f"{tmp_path}/{CHUNK}=kv"):
            assert not [*FsspecBackend(FsspecBackend.Config(url=f"file://{nothing}", driver=driver)).scan()]
    assert not [*backend.scan(f"{'0a' * 16}/-/loop/")]


def test_a_local_listing_goes_past_what_it_cannot_read_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, scandir = local(tmp_path), os.scandir
    (tmp_path / "abc").mkdir()
    (tmp_path / "lost+found").mkdir()
    denied = {f"{tmp_path}/lost+found"}

    def guarded(path: str) -> Any:
        if path in denied:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert [entry.key for entry in backend.scan()] == [CHUNK], "no key leads there"
    denied.add(f"{tmp_path}/abc")
    found = []
    with pytest.raises(IncompleteListingError, match=re.escape("/abc (Permission denied)")):
        found.extend(backend.scan())
    assert [entry.key for entry in found] == [CHUNK]
    denied.add(str(tmp_path))
    with pytest.raises(BackendError) as failure:
        list(backend.scan())
    assert not isinstance(failure.value, IncompleteListingError), "nothing was listed at all"


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), ServerError(403)], ids=["EACCES", "403"])
def test_a_listing_goes_past_a_directory_that_a_server_does_not_show(
    backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    backend.put("hidden/c", [b"blob"])
    fs: Any = backend._store()._fs  # type: ignore[attr-defined]
    usual = fs.ls

    def call(path: str, **more: Any) -> Any:
        if path.endswith("hidden"):
            raise error
        return usual(path, **more)

    monkeypatch.setattr(fs, "ls", call)
    found = []
    with pytest.raises(IncompleteListingError, match="hidden"):
        found.extend(backend.scan())
    assert [entry.key for entry in found] == ["a/b"]


def test_a_server_that_goes_away_ends_a_listing(backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.put("c/d", [b"blob"])
    fs: Any = backend._store()._fs  # type: ignore[attr-defined]
    usual, calls = fs.ls, []

    def call(path: str, **more: Any) -> Any:
        calls.append(path)
        if len(calls) > 1:
            raise ConnectionRefusedError(111, "Connection refused")
        return usual(path, **more)

    monkeypatch.setattr(fs, "ls", call)
    with pytest.raises(BackendError) as failure:
        list(backend.scan())
    assert not isinstance(failure.value, IncompleteListingError) and len(calls) == 2


class SftpServer:
    """Answers of paramiko's client for a directory that partly belongs to another user."""

    def listdir_iter(self, path: str, read_aheads: int) -> Any:
        if path == "/srv/theirs":
            raise PermissionError(errno.EACCES, "Permission denied")
        mode = stat.S_IFDIR if path == "/srv" else stat.S_IFREG
        names = ["theirs", "ours"] if path == "/srv" else ["b=kv"]
        return [SimpleNamespace(filename=name, st_mode=mode, st_size=4, st_mtime=1) for name in names]


def test_a_listing_by_sftp_goes_past_a_directory_that_it_may_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paramiko")
    backend = FsspecBackend(FsspecBackend.Config(url="sftp://host/srv"))
    connection = contextlib.nullcontext(SimpleNamespace(sftp=SftpServer()))
    monkeypatch.setattr(backend._store()._connections, "_connection", lambda: connection)
    found = []
    with pytest.raises(IncompleteListingError, match="srv/theirs"):
        found.extend(backend.scan())
    assert [entry.key for entry in found] == ["ours/b"]


def test_a_listing_of_a_server_that_follows_links_in_a_circle_ends(
    backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory but that of the blob has two links to the first one, and what no key leads to."""
    fs: Any = backend._store()._fs  # type: ignore[attr-defined]
    usual, asked = fs.ls, []

    def following(path: str, detail: bool) -> Any:
        asked.append(path)
        if path.endswith("/a"):
            return usual(path, detail=detail)
        return [
            {"name": f"{path.rstrip('/')}/{name}", "type": "directory", "size": 0} for name in ("l", "m", "a", "b c")
        ]

    monkeypatch.setattr(fs, "ls", following)
    monkeypatch.setattr(base, "MOST_DIRECTORIES", 100)
    found: list[Any] = []
    with pytest.raises(IncompleteListingError, match="behind 100 directories: a link loop"):
        found.extend(backend.scan())
    assert [entry.key for entry in found] == ["a/b"]
    assert len(asked) == 100 and not any("b c" in path for path in asked)
