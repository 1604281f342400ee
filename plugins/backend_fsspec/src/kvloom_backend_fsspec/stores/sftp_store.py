"""Files of a server that speaks SFTP, by paramiko.

fsspec's own implementation has one connection, which it never opens again once it was lost, and waits for an answer to
every 32 KiB: 1 MB/s written and 3 MB/s read, on one machine, where this does 130 and more.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvloom import BackendError, CorruptBlobError, KVLoomError, Sink, pip_install
from kvloom_backend_fsspec.config import Config
from kvloom_backend_fsspec.errors import explained
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.pace import Pace, PacedChannel
from kvloom_backend_fsspec.stores.base import MOST_DIRECTORIES, Listed, Memory
from kvloom_backend_fsspec.unread import Unread, is_refused

_CONNECTIONS = 4
"""Per process: OpenSSH begins to refuse at ten that have not logged in yet."""
_READ_BYTES = 128 << 10
"""Asked for at once. Servers give at least 32 KiB of it, OpenSSH's 64 or all: fewer round trips."""
_MOST_ENTRIES = 1 << 21
"""Most entries of one directory."""
_MOST_NAME_CHARS = 255
"""Entries with longer names are passed over: no key is as long."""
_LOG = "kvloom.backend_fsspec.paramiko"
_PAUSE_SECONDS = 0.1
_WAITS = 4
"""Multiple of `timeout` that a caller waits for a free connection."""
_OPTIONS = {
    "allow_agent", "compress", "disabled_algorithms", "gss_auth", "gss_deleg_creds", "gss_host", "gss_kex",
    "gss_trust_dns", "key_filename", "known_hosts", "look_for_keys",
}  # fmt: skip
T = TypeVar("T")

# paramiko prints a traceback of its thread for every login that fails, beside the error that it raises.
logging.getLogger(_LOG).setLevel(logging.CRITICAL)


class SftpStore:
    """A few connections, for all threads of the process that made it: opened when needed, again when they were lost."""

    def __init__(self, config: Config) -> None:
        try:
            import paramiko
        except ModuleNotFoundError:
            remedy = pip_install("kvloom-backend-fsspec", "sftp")
            raise ImportError(f"url: {config.place.scheme}:// needs another package: {remedy}") from None
        self._paramiko: Any = paramiko
        self._place, self._timeout, self._retries = config.place, config.timeout, config.retries
        self._drafts = Names(config.place.prefix)
        self._login, self._known_hosts = _login(config)
        self._idle: deque[_Connection] = deque()
        self._turns = _Turns(min(_CONNECTIONS, config.threads))
        self._closed = False

    def put(self, name: str, data: bytes) -> None:
        self._ask(lambda sftp: self._publish(sftp, data, name, sftp.posix_rename))

    def create(self, name: str, data: bytes) -> bool:
        """OpenSSH's plain rename fails where there is something already."""

        def create(sftp: Any) -> bool:
            try:
                self._publish(sftp, data, name, sftp.rename)
            except OSError:
                if _size(sftp, name) is None:
                    raise
                return False
            return True

        return self._ask(create)

    def _publish(self, sftp: Any, data: bytes, name: str, rename: Callable[[str, str], None]) -> None:
        """Write a draft and rename it; their directories are made where they are missing."""
        draft = self._drafts.draft()
        try:
            try:
                _in_its_directory(sftp, draft, lambda: sftp.putfo(io.BytesIO(data), f"/{draft}"))
            except OSError:
                if not _is_file(sftp, draft.rpartition("/")[0]):
                    raise
                self._drafts.draft_elsewhere()  # something else is in the place of the directory of drafts
                draft = self._drafts.draft()
                _in_its_directory(sftp, draft, lambda: sftp.putfo(io.BytesIO(data), f"/{draft}"))
            _in_its_directory(sftp, name, lambda: rename(f"/{draft}", f"/{name}"))
        except BaseException:
            with contextlib.suppress(Exception):
                sftp.remove(f"/{draft}")
            raise

    def get(self, name: str) -> bytes | None:
        memory = Memory()
        return memory.data if self.read(name, memory) else None

    def read(self, name: str, sink: Sink) -> bool:
        return self._found(lambda sftp: _read(sftp, name, sink)) is not None

    def read_range(self, name: str, offset: int, into: memoryview) -> bool:
        return self._found(lambda sftp: _read_range(sftp, name, offset, into)) is True

    def size(self, name: str) -> int | None:
        return self._found(lambda sftp: _length(sftp, name))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._found(lambda sftp, path=f"/{name}": sftp.remove(path))

    def list(self, directory: str) -> Iterator[Listed]:
        """List directory by directory; one that vanishes meanwhile is skipped.

        Skips those that this user may not read, and raises IncompleteListingError at the end.
        """
        unread = Unread(self._drafts)
        pending, left = [directory], MOST_DIRECTORIES
        while pending:
            inside = pending.pop()
            left -= 1
            if left < 0:
                unread.note(inside, BackendError(f"behind {MOST_DIRECTORIES} directories: a link loop?"))
                break
            try:
                entries = self._found(partial(_entries, path=f"/{inside}")) or ()
            except BackendError as error:
                if inside == directory or not is_refused(error.__cause__ or error):
                    raise
                unread.note(inside, error)
                continue
            for found in entries:
                name = f"{inside}/{found.name}".lstrip("/")
                if not stat.S_ISDIR(found.mode):
                    yield Listed(name, found.bytes, float(found.modified), "")
                elif self._drafts.is_worth_a_look(name):
                    pending.append(name)
        unread.end()

    def close(self) -> None:
        self._closed = True
        self._forget()

    def _found(self, call: Callable[[Any], T]) -> T | None:
        """The result of `call`, or None if there is no such file."""

        def found(sftp: Any) -> T | None:
            try:
                return call(sftp)
            except FileNotFoundError:
                return None

        return self._ask(found)

    def _ask(self, call: Callable[[Any], T]) -> T:
        """One request, again if its connection was lost: the server may have been restarted since the last one."""
        until = time.monotonic() + self._timeout
        for attempt in range(self._retries + 1):
            try:
                with self._connection() as connection:
                    return call(connection.sftp)
            except KVLoomError:
                raise
            except Exception as error:
                pause = _PAUSE_SECONDS * 2**attempt
                if not self._is_lost(error) or attempt == self._retries or time.monotonic() + pause > until:
                    raise BackendError(explained(error, self._place)) from error
                self._forget()
                time.sleep(pause)
        raise AssertionError("not reached")

    def _is_lost(self, error: Exception) -> bool:
        """Return whether the error is about the connection. Errors about a file are OSErrors of another kind."""
        if isinstance(error, (self._paramiko.AuthenticationException, self._paramiko.BadHostKeyException)):
            return False
        lost = (EOFError, ConnectionError, self._paramiko.SSHException)
        return (isinstance(error, lost) and "known_hosts" not in str(error)) or "Socket is closed" in str(error)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """One for the caller alone; closed if the server or the way fails, as answers may still come."""
        if not self._turns.take(_WAITS * self._timeout):
            raise BackendError(f"{self._place.scheme}://{self._place.host}: timed out: all connections are busy")
        try:
            connection = self._idle.pop() if self._idle else self._connect()
            connection.begin()
            try:
                yield connection
            except KVLoomError:  # of who has no room, or verifies: no answer is outstanding
                self._idle.append(connection)
                raise
            except BaseException:
                connection.close()
                raise
            else:
                self._idle.append(connection)
            finally:
                if self._closed:
                    self._forget()
        finally:
            self._turns.give()

    def _connect(self) -> _Connection:
        client = self._paramiko.SSHClient()
        client.set_log_channel(_LOG)
        for path in self._known_hosts:
            client.load_system_host_keys(path)
        try:
            client.connect(**self._login)
            # Without it every request waits 40 ms for the acknowledgement of the one before.
            client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sftp = self._open_sftp(client)
        except FileNotFoundError as error:  # of this machine, such as a key's file: no miss
            client.close()
            raise BackendError(explained(error, self._place)) from error
        except BaseException:
            client.close()
            raise
        return _Connection(client, sftp)

    def _open_sftp(self, client: Any) -> Any:
        """paramiko's own `open_sftp` waits for the server without a bound."""
        timer = threading.Timer(self._timeout, client.close)
        timer.daemon = True
        timer.start()
        try:
            channel = client.get_transport().open_session(timeout=self._timeout)
            channel.invoke_subsystem("sftp")
            client = self._paramiko.SFTPClient(PacedChannel(channel, Pace(self._timeout)))
            client._read_response = partial(_lenient, client._read_response)
            client.listdir_iter = partial(_listdir, client)
            return client
        finally:
            timer.cancel()

    def _forget(self) -> None:
        """Close unused connections."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            connection.close()


class _Turns:
    """A fair semaphore: with Python's own, a thread that releases it can take it again before a
    waiting one has woken."""

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._free = number
        self._waiting: deque[threading.Event] = deque()

    def take(self, seconds: float) -> bool:
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            mine = threading.Event()
            self._waiting.append(mine)
        if not mine.wait(seconds):
            with self._lock:
                if not mine.is_set():
                    self._waiting.remove(mine)
                    return False
        return True

    def give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._free += 1


class _Connection:
    def __init__(self, client: Any, sftp: Any) -> None:
        self._client, self.sftp = client, sftp

    def begin(self) -> None:
        """The next request begins."""
        self.sftp.get_channel().pace.begin()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.close()


def _login(config: Config) -> tuple[dict[str, Any], Sequence[str | None]]:
    """The arguments of paramiko's `connect`, and the files with keys of hosts. Raises ValueError."""
    options = dict(config.options)
    if unknown := sorted(set(options) - _OPTIONS):
        raise ValueError(f"options: sftp:// has no {', '.join(unknown)}; it has {', '.join(sorted(_OPTIONS))}")
    for name in ("known_hosts", "key_filename"):
        given = options.get(name, ())
        for path in [given] if isinstance(given, str) else given:
            if not Path(path).is_file():
                raise ValueError(f"options.{name}: there is no file {path}")
    known = options.pop("known_hosts", None)
    system = Path("/etc/ssh/ssh_known_hosts")
    host = urlsplit(f"//{config.place.host}")
    try:
        port = host.port or 22
    except ValueError as error:
        raise ValueError(f"url: {error}") from None
    login = {
        "hostname": host.hostname, "port": port, "username": host.username,
        "timeout": config.connect_timeout, "banner_timeout": config.timeout, "auth_timeout": config.timeout,
        "channel_timeout": config.timeout,
    }  # fmt: skip
    return {**login, **options}, [known] if known else [None, *([str(system)] if system.is_file() else [])]


def _in_its_directory(sftp: Any, name: str, act: Callable[[], object]) -> None:
    """Act, and once more where its directory was missing."""
    try:
        act()
    except FileNotFoundError:
        _make(sftp, name.rpartition("/")[0])
        try:
            act()
        except FileNotFoundError as error:
            raise OSError(f"/{name}: {error}") from error  # no miss: a directory that vanishes all the time


def _make(sftp: Any, directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        sftp.stat(f"/{directory}")
        return
    _make(sftp, directory.rpartition("/")[0])
    try:
        sftp.mkdir(f"/{directory}")
    except OSError as error:
        if _size(sftp, directory) is None:  # else another one made it
            raise OSError(f"the directory /{directory} cannot be made: {error}") from error


def _length(sftp: Any, name: str) -> int | None:
    """The length of a regular file; None for anything else. A server that opens a FIFO waits for its writer."""
    status = sftp.stat(f"/{name}")
    return int(status.st_size) if stat.S_ISREG(status.st_mode) else None


def _read(sftp: Any, name: str, sink: Sink) -> bool | None:
    if _length(sftp, name) is None:
        return None
    with sftp.open(f"/{name}", "rb", 0) as file:
        size = file.stat().st_size
        if not size:
            raise CorruptBlobError(f"an empty file: {name}")
        _fill(sink.reserve(size)[:size], file, sink.filled)
    return True


def _read_range(sftp: Any, name: str, offset: int, into: memoryview) -> bool:
    if _length(sftp, name) is None:
        return False
    with sftp.open(f"/{name}", "rb", 0) as file:
        if file.stat().st_size < offset + len(into):
            return False
        file.seek(offset)
        _fill(into, file, lambda _: None)
    return True


def _fill(view: memoryview, file: Any, filled: Callable[[int], None]) -> None:
    """Read without paramiko's `prefetch`, whose thread is slower, and prints its errors."""
    file.MAX_REQUEST_SIZE = _READ_BYTES
    at = 0
    while at < len(view):
        piece = file.read(min(_READ_BYTES, len(view) - at))
        if not piece:
            raise BackendError(f"the server sent {at} bytes of {len(view)}")
        view[at : at + len(piece)] = piece
        at += len(piece)
        filled(at)


def _size(sftp: Any, name: str) -> int | None:
    try:
        return int(sftp.stat(f"/{name}").st_size)
    except FileNotFoundError:
        return None


def _is_file(sftp: Any, name: str) -> bool:
    try:
        return not stat.S_ISDIR(sftp.stat(f"/{name}").st_mode)
    except OSError:
        return False


def _lenient(read: Callable[..., tuple[Any, Any]], *given: Any) -> tuple[Any, Any]:
    """An answer of which a name may be no UTF-8: no blob's, and no reason to end a listing."""
    kind, message = read(*given)
    if message is not None:
        message.get_text = lambda: message.get_string().decode("utf-8", "replace")
    return kind, message


def _listdir(sftp: Any, path: str, read_aheads: int) -> Iterator[Any]:
    """In place of paramiko's, which reads answers by another way than all others."""
    from paramiko.sftp import CMD_CLOSE, CMD_OPENDIR, CMD_READDIR
    from paramiko.sftp_attr import SFTPAttributes

    _, answer = sftp._request(CMD_OPENDIR, path)
    handle = answer.get_binary()
    try:
        while True:
            _, answer = sftp._request(CMD_READDIR, handle)
            for _ in range(answer.get_int()):
                name, shown = answer.get_text(), answer.get_text()
                one = SFTPAttributes._from_msg(answer, name, shown)
                if name not in (".", ".."):
                    yield one
    except EOFError:
        sftp._request(CMD_CLOSE, handle)


class _Entry(NamedTuple):
    """One entry of a directory, in a third of the memory of paramiko's."""

    name: str
    mode: int
    bytes: int
    modified: int


def _entries(sftp: Any, path: str) -> Sequence[_Entry]:
    """Raises BackendError for a directory that does not end."""
    found = []
    for number, one in enumerate(sftp.listdir_iter(path, read_aheads=1)):
        if number == _MOST_ENTRIES:
            raise BackendError(f"more than {_MOST_ENTRIES} files are listed in {path}")
        if len(one.filename) <= _MOST_NAME_CHARS:
            found.append(_Entry(one.filename, one.st_mode or 0, one.st_size or 0, one.st_mtime or 0))
    return found
