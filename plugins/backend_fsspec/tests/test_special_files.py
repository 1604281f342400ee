"""Special files in a local directory count as absent, and no call waits for them."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvloom import BackendError, CorruptBlobError, UnreadableBlobError
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.stores.base import Memory

DRIVERS = ("obstore", "fsspec")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{(directory := os.open(path.parent, os.O_PATH))}/{path.name}")
    os.close(directory)


MAKE: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": _socket,
    "link to a fifo": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to too long a name": lambda path: path.symlink_to("x" * 300),
}


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Whoever waits for the writer of a FIFO waits for ever: here the process ends, as no handler of Python's runs."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("what", MAKE)
def test_it_is_a_miss_and_is_written_over(tmp_path: Path, driver: str, what: str) -> None:
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}", driver=driver))
    MAKE[what](tmp_path / "a=kv")
    assert backend.get("a") is None and not backend.contains("a")
    assert not backend.get_range("a", 0, memoryview(bytearray(1)))
    assert not backend.get_range("a", 0, memoryview(b""))
    assert not backend.get_into("a", Memory())
    backend.put("a", [b"blob"])
    assert backend.get("a") == b"blob"
    backend.delete("a")


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_cannot_be_opened_is_an_error_and_what_is_empty_is_corrupt(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}", driver=driver))
    (tmp_path / "a=kv").touch()
    with pytest.raises(CorruptBlobError, match="an empty file"):
        backend.get("a")

    def no_open(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "open", no_open)
    with pytest.raises(BackendError, match="Input/output error"):
        backend.get("a")


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "a directory": lambda root: (root / "a/b=kv/c").mkdir(parents=True),
    "a link to a directory": lambda root: ((root / "a").mkdir(), (root / "a/b=kv").symlink_to(root)),
    "a file above": lambda root: (root / "a").touch(),
    "a link to itself above": lambda root: (root / "a").symlink_to("a"),
    "a link to too long a name above": lambda root: (root / "a").symlink_to("x" * 300),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_is_in_the_way_of_one_blob_is_no_failure_of_the_store(tmp_path: Path, driver: str, what: str) -> None:
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}", driver=driver))
    IN_THE_WAY[what](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptBlobError, match="lies in the place of a"):
        backend.put("a/b", [b"blob"])
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "=tmp") == before
    assert backend.get("a/b") is None
    if "link to a" not in what:
        backend.delete("a/b")
        backend.delete_many(["a/b", "c"])
    assert list(backend.scan()) == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_nothing_that_lies_there_is_in_the_way_of_a_probe(tmp_path: Path, driver: str) -> None:
    (tmp_path / "=probe").touch()
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}", driver=driver))
    backend.check_writable()
    assert backend.hold("evict")
    assert not list(tmp_path.glob("=probe-*"))
    backend.close()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("what", MAKE)
def test_what_lies_where_a_lease_belongs_keeps_nobody_from_it_for_good(tmp_path: Path, driver: str, what: str) -> None:
    (rights := tmp_path / "=hold/evict").mkdir(parents=True)
    MAKE[what](rights / "000000000001")
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}", driver=driver))
    assert backend.hold("evict") or backend.hold("evict")
    assert backend.hold("evict")
    backend.close()


@pytest.mark.parametrize("what", ["file", *MAKE])
def test_what_lies_where_drafts_belong_keeps_nobody_from_writing(tmp_path: Path, what: str) -> None:
    {**MAKE, "file": Path.touch}[what](tmp_path / "=tmp")
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}", driver="fsspec"))
    for _ in range(2):
        backend.put("a", [b"blob"])
    assert backend.get("a") == b"blob" and [entry.key for entry in backend.scan()] == ["a"]
    (drafts,) = tmp_path.glob("=tmp-*")
    (draft := drafts / ("0f" * 16)).touch()
    os.utime(draft, (1, 1))
    assert [entry.key for entry in backend.scan()] == ["a"] and not draft.exists()


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_file_that_this_user_may_not_read_is_no_failure_of_the_store(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, who writes with a narrow mask. A directory that may not be searched is a failure."""
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}", driver=driver))
    backend.put("a", [b"blob"])

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert backend.contains("a")
        for read in (lambda: backend.get("a"), lambda: backend.get_range("a", 0, memoryview(bytearray(1)))):
            with pytest.raises(UnreadableBlobError, match="may not read the file"):
                read()
        patch.setattr(os, "stat", refuse)
        with pytest.raises(BackendError, match="Permission denied"):
            backend.get("a")
    backend.put("a", [b"another"])
    assert backend.get("a") == b"another"
