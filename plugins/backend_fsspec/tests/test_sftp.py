"""Special files in the directories of an SFTP server: no FIFO is opened, and an unreadable place ends no listing."""

from __future__ import annotations

import errno
import stat
import threading
from collections import deque
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom import BackendError, CorruptBlobError, IncompleteListingError, UnreadableBlobError
from kvloom_backend_fsspec import pace
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.pace import Pace, PacedChannel
from kvloom_backend_fsspec.stores import base, sftp_connections, sftp_store
from kvloom_backend_fsspec.stores.base import Memory
from kvloom_backend_fsspec.unread import Unread

pytest.importorskip("paramiko")

FILE, DIRECTORY, FIFO = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFIFO | 0o644


class Server:
    """paramiko's client of a server whose directories hold `tree`: a mode, or the error of who looks into it."""

    def __init__(self, tree: dict[str, int | Exception]) -> None:
        self.tree = tree

    def stat(self, path: str) -> Any:
        if path not in self.tree:
            raise FileNotFoundError(errno.ENOENT, path)
        return SimpleNamespace(st_mode=self.tree[path], st_size=4)

    def listdir_iter(self, path: str, read_aheads: int) -> Any:
        inside = self.tree.get(path)
        if isinstance(inside, Exception):
            raise inside
        modes = {name: mode for name, mode in self.tree.items() if name.rpartition("/")[0] == path}
        return [
            SimpleNamespace(
                filename=name.rpartition("/")[2], st_mode=mode if isinstance(mode, int) else DIRECTORY, st_size=4,
                st_mtime=1,
            )
            for name, mode in modes.items()
        ]  # fmt: skip

    def remove(self, path: str) -> None:
        if path not in self.tree:
            raise FileNotFoundError(errno.ENOENT, path)
        del self.tree[path]

    def putfo(self, _: Any, path: str) -> None:
        if self.tree.get(path.rpartition("/")[0]) != DIRECTORY:
            raise FileNotFoundError(errno.ENOENT, path)
        self.tree[path] = FILE

    def mkdir(self, path: str) -> None:
        if path in self.tree:
            raise OSError("Failure")
        self.tree[path] = DIRECTORY

    def posix_rename(self, draft: str, path: str) -> None:
        self.tree[path] = self.tree.pop(draft)

    def open(self, path: str, *_: Any) -> Any:
        raise AssertionError(f"{path} was opened")


def backend(monkeypatch: pytest.MonkeyPatch, tree: dict[str, int | Exception]) -> FsspecBackend:
    found = FsspecBackend(FsspecBackend.Config(url="sftp://host/kv"))
    connection = SimpleNamespace(sftp=Server({"/kv": DIRECTORY, **tree}), begin=lambda: None, close=lambda: None)
    monkeypatch.setattr(found._store()._connections, "_connect", lambda: connection)
    return found


def test_what_is_no_file_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    it = backend(monkeypatch, {"/kv/fifo=kv": FIFO, "/kv/directory=kv": DIRECTORY, "/kv/a=kv": FILE})
    for key in ("fifo", "directory", "nothing"):
        assert it.get(key) is None and not it.contains(key) and not it.get_into(key, Memory())
        assert not it.get_range(key, 0, memoryview(bytearray(1)))
    assert it.contains("a")
    with pytest.raises(BackendError, match="was opened"):
        it.get("a")


def test_a_listing_goes_on_past_what_cannot_be_read_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    sound: dict[str, int | Exception] = {"/kv/a=kv": FILE, "/kv/z": DIRECTORY, "/kv/z/b=kv": FILE}
    it = backend(monkeypatch, {**sound, "/kv/lost+found": refused, "/kv/=hold": refused})
    assert [entry.key for entry in it.scan()] == ["a", "z/b"], "no key leads there"
    it = backend(monkeypatch, {**sound, "/kv/y": refused})
    seen: list[str] = []
    with pytest.raises(IncompleteListingError, match="1 places cannot be read, the first: kv/y"):
        seen.extend(map(attrgetter("key"), it.scan()))
    assert seen == ["a", "z/b"]
    for error in (OSError("Socket is closed"), OSError(errno.EIO, "Failure")):
        it = backend(monkeypatch, {**sound, "/kv/y": error})
        monkeypatch.setattr(it._store()._connections, "_retries", 0)
        with pytest.raises(BackendError) as caught:
            list(it.scan())
        assert not isinstance(caught.value, IncompleteListingError)
    with pytest.raises(BackendError, match="Permission denied"):
        list(backend(monkeypatch, {"/kv": refused}).scan())


def test_old_drafts_of_killed_processes_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = f"/kv/=tmp/{'0f' * 16}"
    it = backend(monkeypatch, {"/kv/a=kv": FILE, "/kv/=tmp": DIRECTORY, draft: FILE, "/kv/=tmp/other": FILE})
    assert [entry.key for entry in it.scan()] == ["a"]
    with it._store()._connections._connection() as connection:  # type: ignore[attr-defined]
        assert draft not in connection.sftp.tree and "/kv/=tmp/other" in connection.sftp.tree


@pytest.mark.parametrize("there", [FILE, FIFO, None])
def test_what_lies_where_drafts_belong_keeps_nobody_from_writing(
    monkeypatch: pytest.MonkeyPatch, there: int | None
) -> None:
    it = backend(monkeypatch, {} if there is None else {"/kv/=tmp": there})
    for _ in range(2):
        it.put("a", [b"blob"])
    assert it.contains("a")
    with it._store()._connections._connection() as connection:  # type: ignore[attr-defined]
        names = [path for path in connection.sftp.tree if path.startswith("/kv/=tmp")]
    assert len(names) == (1 if there is None else 2)


class SilentClient:
    """paramiko's `SSHClient` of a server that never starts the subsystem; closing it ends whoever waits."""

    def __init__(self) -> None:
        self.over = threading.Event()
        transport = SimpleNamespace(
            sock=SimpleNamespace(setsockopt=lambda *_: None), open_session=lambda timeout: transport,
            invoke_subsystem=self._wait,
        )  # fmt: skip
        self.get_transport = lambda: transport
        self.set_log_channel = self.load_system_host_keys = lambda _: None
        self.connect = lambda **_: None
        self.close = self.over.set

    def _wait(self, name: str) -> None:
        assert self.over.wait(20), "nobody has closed the connection"
        raise EOFError("Channel closed.")


def test_a_server_that_never_starts_sftp_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    it = FsspecBackend(FsspecBackend.Config(url="sftp://host/kv", timeout="50ms", retries=0))
    monkeypatch.setattr(it._store()._connections._paramiko, "SSHClient", SilentClient)  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="Channel closed"):
        it.get("a")


def test_a_server_that_sends_byte_by_byte_is_not_listened_to_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def recv(most: int) -> bytes:
        clock.now += 0.9
        return bytes(min(most, speed))

    channel = PacedChannel(SimpleNamespace(recv=recv, settimeout=lambda seconds: None), Pace(1.0))
    speed = 256 << 10
    assert all(channel.recv(speed) for _ in range(100))
    channel.pace.begin()
    speed = 1
    with pytest.raises(TimeoutError, match="too slowly"):
        [channel.recv(100) for _ in range(3)]
    with pytest.raises(OSError, match="announces a message of 4294967295 bytes"):
        channel.recv((1 << 32) - 1)


def test_a_directory_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    it = backend(monkeypatch, {f"/kv/{number}=kv": FILE for number in range(11)})
    monkeypatch.setattr(sftp_store, "_MOST_ENTRIES", 10)
    with pytest.raises(BackendError, match="more than 10 files"):
        list(it.scan())
    it = backend(monkeypatch, {f"/kv/{number}": DIRECTORY for number in range(11)})
    monkeypatch.setattr(sftp_store, "_MOST_ENTRIES", 100)
    monkeypatch.setattr(base, "MOST_DIRECTORIES", 10)
    with pytest.raises(IncompleteListingError, match="behind 10 directories"):
        list(it.scan())


def test_names_that_can_be_no_blobs_end_no_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """paramiko raises for one that is not UTF-8. A long one takes memory."""
    import paramiko
    from paramiko.message import Message

    answer = Message()
    for text in (b"a=kv", b"\xff", b"x" * 1000):
        answer.add_string(text)
    answer.rewind()
    _, message = sftp_connections._careful(lambda *_: (104, answer))
    names = [message.get_text() for _ in range(3)]
    assert isinstance(message, paramiko.Message) and names[:2] == ["a=kv", "\ufffd"]
    it = backend(monkeypatch, {f"/kv/{name}": FILE for name in names})
    assert [entry.key for entry in it.scan()] == ["a"]
    server = it._store()._connections._connect().sftp
    assert [entry.name for entry in sftp_store._entries(server, "/kv")] == names[:2]


def test_an_answer_that_announces_more_than_it_holds_is_refused() -> None:
    """paramiko goes on with zeros: four billion extensions of a file take most of an hour."""
    from paramiko.message import Message
    from paramiko.sftp_attr import SFTPAttributes

    answer = Message()
    for number in (SFTPAttributes.FLAG_EXTENDED, 1 << 20):
        answer.add_int(number)
    answer.rewind()
    _, message = sftp_connections._careful(lambda *_: (105, answer))
    with pytest.raises(OSError, match="shorter than it says"):
        SFTPAttributes._from_msg(message)


def test_an_error_in_another_encoding_is_what_its_number_says() -> None:
    import paramiko
    from paramiko.message import Message

    answer = Message()
    answer.add_int(paramiko.sftp.SFTP_NO_SUCH_FILE)
    answer.add_string(b"n'est pas l\xe0")
    answer.rewind()
    client = object.__new__(paramiko.SFTPClient)
    with pytest.raises(FileNotFoundError):
        sftp_connections._lenient_status(client._convert_status, answer)


def test_directories_that_wait_to_be_listed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One directory may show a million, and so may each of them."""
    monkeypatch.setattr(base, "MOST_DIRECTORIES", 20)
    unread = Unread(Names("kv"))
    directories, most = base.Directories("kv", unread), 0
    for inside in directories:
        for number in range(100):
            directories.add(f"{inside}/{number}")
        most = max(most, len(directories))
    assert most == 20
    with pytest.raises(IncompleteListingError, match="behind 20 directories"):
        unread.end()


def test_what_lies_in_the_way_of_a_blob_is_no_failure_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(Server):
        def posix_rename(self, draft: str, path: str) -> None:
            if self.tree.get(path.rpartition("/")[0]) != DIRECTORY:
                raise FileNotFoundError(errno.ENOENT, path)
            if self.tree.get(path) == DIRECTORY:
                raise OSError("Failure")
            super().posix_rename(draft, path)

        rename = posix_rename

    it = backend(monkeypatch, {})
    server = Strict({"/kv": DIRECTORY, "/kv/a=kv": DIRECTORY, "/kv/b": FILE})
    connection = SimpleNamespace(sftp=server, begin=lambda: None, close=lambda: None)
    monkeypatch.setattr(it._store()._connections, "_connect", lambda: connection)  # type: ignore[attr-defined]
    for key, what in (("a", "a directory lies in the place of a blob"), ("b/c", "a file lies in the place of a dir")):
        with pytest.raises(CorruptBlobError, match=what):
            it.put(key, [b"blob"])
        with pytest.raises(CorruptBlobError, match=what):
            it._store().create(f"kv/{key}=kv", b"blob")
    it.put("d/e", [b"blob"])
    assert sorted(server.tree) == ["/kv", "/kv/=tmp", "/kv/a=kv", "/kv/b", "/kv/d", "/kv/d/e=kv"]


def test_a_connection_that_another_thread_takes_first_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    it = backend(monkeypatch, {"/kv/a=kv": FILE})
    connections = it._store()._connections  # type: ignore[attr-defined]

    class Taken(deque[Any]):
        """It looks as if there were one, and the other thread was quicker."""

        def __bool__(self) -> bool:
            return True

    connections._idle = Taken()
    assert it.contains("a") and len(connections._idle) == 1


@pytest.mark.parametrize("failures", [2, 3])
def test_a_server_that_takes_no_connection_in_time_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    times = 0

    def connect(client: Any, **_: Any) -> None:
        nonlocal times
        times += 1
        raise TimeoutError("timed out") if times <= failures else FileNotFoundError("no such key")

    monkeypatch.setattr("paramiko.SSHClient.connect", connect)
    monkeypatch.setattr(sftp_connections, "_PAUSE_SECONDS", 0)
    it = FsspecBackend(FsspecBackend.Config(url="sftp://host/kv", retries=2))
    with pytest.raises(BackendError, match="took no connection" if failures == 3 else "no such key"):
        it.contains("key")
    assert times == 3


def test_a_file_that_this_user_may_not_read_is_no_failure_of_the_store() -> None:
    server: Any = Server({"/kv/a": FILE})

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    server.open = refuse
    for read in (
        lambda: sftp_store._read(server, "kv/a", Memory()),
        lambda: sftp_store._read_range(server, "kv/a", 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(UnreadableBlobError, match="may not read the file: /kv/a"):
            read()
