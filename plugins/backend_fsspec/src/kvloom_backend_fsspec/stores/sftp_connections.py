"""Connections to a server that speaks SFTP, by paramiko: a few, opened when needed, and again when they were lost."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvloom import BackendError, KVLoomError, pip_install
from kvloom_backend_fsspec.config import Config
from kvloom_backend_fsspec.errors import explained
from kvloom_backend_fsspec.pace import Pace, PacedChannel

_CONNECTIONS = 4
"""Per process: OpenSSH begins to refuse at ten that have not logged in yet."""
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


class SftpConnections:
    """The connections of one store, for all threads of the process that made it."""

    def __init__(self, config: Config) -> None:
        try:
            import paramiko
        except ModuleNotFoundError:
            remedy = pip_install("kvloom-backend-fsspec", "sftp")
            raise ImportError(f"url: {config.place.scheme}:// needs another package: {remedy}") from None
        self._paramiko: Any = paramiko
        self._place, self._timeout, self._retries = config.place, config.timeout, config.retries
        self._login, self._known_hosts = _login(config)
        self._idle: deque[_Connection] = deque()
        self._turns = _Turns(min(_CONNECTIONS, config.threads))
        self._closed = False

    def close(self) -> None:
        """Close all connections, those in use once they are given back."""
        self._closed = True
        self._forget()

    def ask(self, call: Callable[[Any], T]) -> T:
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
            connection = self._unused() or self._connect()
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
        except TimeoutError as error:  # a busy server's queue of connections is full: nothing was asked of it yet
            client.close()
            raise ConnectionAbortedError("timed out: it took no connection") from error
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
            client._read_response = partial(_careful, client._read_response)
            client._convert_status = partial(_lenient_status, client._convert_status)
            client.listdir_iter = partial(_listdir, client)
            return client
        finally:
            timer.cancel()

    def _forget(self) -> None:
        """Close unused connections."""
        while connection := self._unused():
            connection.close()

    def _unused(self) -> _Connection | None:
        try:
            return self._idle.pop()
        except IndexError:  # none, or another thread was quicker
            return None


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


def _careful(read: Callable[..., tuple[Any, Any]], *given: Any) -> tuple[Any, Any]:
    """An answer that raises OSError where it ends before what it announces: paramiko goes on with zeros.

    A name in it may be no UTF-8: no blob's, and no reason to end a listing.
    """
    kind, message = read(*given)
    if message is None:
        return kind, message
    take = message.packet.read

    def exactly(num_bytes: int) -> bytes:
        data = bytes(take(num_bytes))
        if len(data) < num_bytes:
            raise OSError("the server's answer is shorter than it says")
        return data

    message.get_bytes = exactly
    _lenient(message)
    return kind, message


def _lenient(message: Any) -> None:
    message.get_text = lambda: message.get_string().decode("utf-8", "replace")


def _lenient_status(convert: Callable[[Any], None], message: Any) -> None:
    """An error whose text may be no UTF-8: its number says what it is."""
    _lenient(message)
    convert(message)


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
