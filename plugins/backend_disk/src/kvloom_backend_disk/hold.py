"""Rights that one process at a time has in a store: locks (flock) on files in its root, which die with the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import weakref
from pathlib import Path

logger = logging.getLogger("kvloom.backend_disk")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_everybody: weakref.WeakSet[Holds] = weakref.WeakSet()


class Holds:
    """The rights that one instance of the backend has."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._warned = False
        _everybody.add(self)

    def take(self, name: str) -> bool:
        """Whether the right is this instance's now. Raises ValueError for a bad name, OSError if it cannot be told."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"hold: {name!r} should be up to 100 of [A-Za-z0-9._-]")
        self._drop_inherited()
        path = self._root / f"+hold-{name}"
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                if _is_still(held, path):
                    return True
                _release(self._held.pop(name))  # the directory was removed, and with it the right
            fd = self._locked(path)
            if fd is not None:
                self._held[name] = fd
            return fd is not None and _is_still(fd, path)

    def release(self) -> None:
        """Give every right back. A forked child gives back nothing: what it inherited is its parent's."""
        self._drop_inherited()
        with self._lock:
            while self._held:
                _release(self._held.popitem()[1])

    def __del__(self) -> None:
        self.release()

    def _locked(self, path: Path) -> int | None:
        try:
            fd = _open(path, os.O_RDONLY)
        except PermissionError as error:
            self._warn(f"cannot open {path} ({error.strerror}): this process will never have the right")
            return None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                # NFS locks only what is open for writing; elsewhere that would keep the file system from becoming
                # read-only for as long as the right is held.
                os.close(fd)
                fd = _open(path, os.O_RDWR)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
            self._warn(f"no file locks in {self._root} ({error.strerror}): every process takes itself for the only one")
        return fd

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)

    def _drop_inherited(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.Lock()  # another thread of the parent may have held it
            # Closing a copy leaves the parent's lock alone; keeping it would let the lock outlive the parent.
            while self._held:
                _close(self._held.popitem()[1])


def _open(path: Path, mode: int) -> int:
    flags = mode | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(path.parent, exist_ok=True)
        return os.open(path, flags, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # another user's, which is good enough


def _is_still(fd: int, path: Path) -> bool:
    """Whether the locked file is the one that others would lock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _release(fd: int) -> None:
    # Not left to closing: a child that was forked a moment ago may still have a copy.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    _close(fd)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _after_fork_in_child() -> None:
    for holds in tuple(_everybody):
        holds._drop_inherited()


os.register_at_fork(after_in_child=_after_fork_in_child)
