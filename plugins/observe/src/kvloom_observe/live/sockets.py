"""Unix sockets of live views, in a directory of the user's own, each with a lock that its engine holds."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import logging
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ending import Ending, in_time
from .snapshot import VERSION

log = logging.getLogger("kvloom.observe")

SUFFIX = ".sock"
LOCK_SUFFIX = ".lock"
"""Suffix of the lock file of a socket. The holder of its lock owns the socket; the lock ends with the process."""
_MAX_PATH_BYTES = 100
"""A Unix socket's path has 108 bytes at most, 104 on macOS."""
_BACKLOG = 16
_MAX_ANSWER_BYTES = 16 << 20
"""Many times as much as a snapshot has."""
_LOCK_ATTEMPTS, _LOCK_SECONDS = 20, 0.01
"""`running` of another process holds the lock of a dead engine for a moment."""


class UnixHTTPConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: Path, timeout: float = 5.0) -> None:
        super().__init__("kvloom", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _Unix(Ending, UnixHTTPConnection):
    pass


# -- directories -------------------------------------------------------------------------------------------------------


def directory(name: str) -> Path:
    """Return the directory for a socket of this name by default, made for the user alone.

    If the usual one belongs to another user, or cannot be made, it is another one, with a warning. Raises OSError if
    there is none.
    """
    usual = _usual()
    with contextlib.suppress(OSError):
        usual.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _is_own(usual) and len(os.fsencode(usual / name)) <= _MAX_PATH_BYTES:
        return usual
    other = next(_others(), None) or Path(tempfile.mkdtemp(prefix=_prefix() + "-"))
    log.warning(
        "%s is not private to this user, or too long for a socket; %s is used, and `top` finds it", usual, other
    )
    return other


def _usual() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvloom" if runtime else Path(tempfile.gettempdir()) / _prefix()


def _prefix() -> str:
    return f"kvloom-{os.getuid()}"


def _others() -> Iterator[Path]:
    """Directories that stand in for the usual one."""
    yield from filter(_is_own, sorted(Path(tempfile.gettempdir()).glob(f"{_prefix()}-*")))


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


# -- an engine's own socket --------------------------------------------------------------------------------------------


class Bound:
    """A socket at a path, and the lock beside it, until `close`."""

    def __init__(self, path: Path, lock: int, listener: socket.socket) -> None:
        self.path, self.listener = path, listener
        self._lock = lock
        self._file = path.lstat().st_ino
        _bound.add(self)

    def close(self) -> None:
        """Remove both. In a forked child they are the parent's, and stay."""
        if self not in _bound:
            return
        _bound.discard(self)
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._file:
                self.path.unlink()
        _unlock(self.path, self._lock)

    def leave(self) -> None:
        """In a forked child: release the lock, which would otherwise outlive the parent."""
        _bound.discard(self)
        os.close(self._lock)


def bind_default(instance_id: str) -> Bound:
    """Listen at a free name for this process's engine. Raises OSError."""
    word = re.sub(r"[^A-Za-z0-9_.-]", "_", instance_id)[:40]
    names = [f"{word}-{os.getpid()}{end}{SUFFIX}" for end in ("", *(f"-{number}" for number in range(2, 1000)))]
    place = directory(names[-1])
    for path in (place / name for name in names):
        if not path.exists():
            return bind(path)
    raise OSError("too many engines in this process")


def bind(path: Path) -> Bound:
    """Listen at `path`, readable and writable by the user alone; what a dead engine left there is taken over.

    Raises OSError if it is in use, is something else, or is too long.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(f"{path}: too long for a socket ({_MAX_PATH_BYTES} bytes at most); set a shorter `path`")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} exists and is not a socket; set another `path`")
    lock = _locked(path)
    if lock is None:
        raise OSError(f"{path} is another engine's; set another `path`")
    try:
        with contextlib.suppress(FileNotFoundError):
            if _is_listened_to(path):
                raise OSError(f"{path} is another program's; set another `path`")
            path.unlink()
        return Bound(path, lock, _listening(path))
    except BaseException:
        _unlock(path, lock)
        raise


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(OSError):  # Linux makes the file with the socket's own mode
            os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        if stat.S_IMODE(path.lstat().st_mode) != 0o600:
            path.chmod(0o600)
        listener.listen(_BACKLOG)  # before that, connecting fails
    except BaseException:
        listener.close()
        raise
    return listener


def _is_listened_to(path: Path) -> bool:
    """Return whether a program has a socket open there. Only a refusal says that none has. Raises FileNotFoundError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except FileNotFoundError:
            raise
        except OSError:
            return True
    return True


# -- locks -------------------------------------------------------------------------------------------------------------


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + LOCK_SUFFIX)


def _locked(path: Path) -> int | None:
    """Take the lock of a socket; None if it is held. Raises OSError if it cannot be made, or belongs
    to another user."""
    file = _lock_path(path)
    for _ in range(_LOCK_ATTEMPTS):
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        found = os.fstat(lock)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            os.close(lock)
            raise OSError(f"{file} belongs to another user; set another `path`")
        if _try_lock(lock):
            with contextlib.suppress(OSError):
                if file.lstat().st_ino == found.st_ino:
                    return lock
        os.close(lock)
        time.sleep(_LOCK_SECONDS)
    return None


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(path: Path, lock: int) -> None:
    with contextlib.suppress(OSError):
        _lock_path(path).unlink()
    os.close(lock)


_bound: set[Bound] = set()


def _forked() -> None:
    for bound in tuple(_bound):
        bound.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


# -- everybody's -------------------------------------------------------------------------------------------------------


def running() -> list[Path]:
    """The sockets of engines that run, whether they answer or not; those that dead ones left are removed."""
    places = [place for place in (_usual(), *_others()) if _is_own(place)]
    return [path for place in places for path in sorted(place.glob(f"*{SUFFIX}")) if _is_running(path)]


def _is_running(path: Path) -> bool:
    try:
        lock = os.open(_lock_path(path), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no engine of this version made it
        return False
    if not _try_lock(lock):
        os.close(lock)
        return True
    with contextlib.suppress(OSError):
        path.unlink()
    _unlock(path, lock)
    return False


def ask(path: Path, *, series: bool = False, timeout: float = 5.0) -> dict[str, Any]:
    """The snapshot of the engine behind a socket. Raises OSError, or ValueError if it is no engine's."""
    try:
        with in_time(), contextlib.closing(_Unix(path, timeout)) as connection:
            connection.request("GET", "/snapshot?series=1" if series else "/snapshot")
            with connection.getresponse() as answer:
                told = json.loads(answer.read(_MAX_ANSWER_BYTES)) if answer.status == 200 else None
    except (http.client.HTTPException, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no engine of kvloom answers there") from error
    if not isinstance(told, dict) or "version" not in told:
        raise ValueError(f"{path}: no engine of kvloom answers there")
    if told["version"] != VERSION:
        raise ValueError(f"{path}: its engine is of another version of kvloom; use the command that came with it")
    return told
