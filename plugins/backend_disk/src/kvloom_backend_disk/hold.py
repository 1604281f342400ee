"""Rights that one process at a time has in a store: locks (flock) on files in its root, which die with the process.

A user who may read a file may lock it. So only users who may write to the directory may read a lock file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
import weakref
from pathlib import Path

logger = logging.getLogger("kvloom.backend_disk")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
# Without O_NONBLOCK, opening a FIFO would wait.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# What opening a symbolic link or a socket says, on one system or another.
_NO_FILE = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EOPNOTSUPP)
_ATTEMPTS = 8
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
        """Try to take the right; return whether this instance has it now.

        Raises ValueError for a bad name, OSError if it cannot be told or can never be.
        """
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
        """Give every right back. A forked child gives nothing back, because the rights are its parent's."""
        self._drop_inherited()
        with self._lock:
            while self._held:
                _release(self._held.popitem()[1])

    def __del__(self) -> None:
        self.release()

    def _locked(self, path: Path) -> int | None:
        fd = _open(path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                # NFS locks only what is open for writing; elsewhere that would keep the file system from becoming
                # read-only for as long as the right is held.
                read_only, fd = fd, _open(path, os.O_RDWR)
                os.close(read_only)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
            self._warn(f"no file locks in {self._root} ({error.strerror}): every process acts as the only one")
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
    """Open a lock file. Anything else in its place, or a file that users without write permission could lock, is
    replaced."""
    for _ in range(_ATTEMPTS):
        try:
            fd = _opened(path, mode)
        except FileNotFoundError:
            fd = _made(path, mode)
        if fd is not None:
            return fd
    raise OSError(errno.EEXIST, f"another process keeps replacing {path}")


def _opened(path: Path, mode: int) -> int | None:
    """None if it is not our file, which then is gone."""
    try:
        fd = os.open(path, mode | _FLAGS)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    else:
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and not _is_too_open(fd, status, _writers(path.parent)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.unlink(path)
    return None


def _made(path: Path, mode: int) -> int | None:
    """Make a lock file; None if another process has made one meanwhile."""
    os.makedirs(path.parent, exist_ok=True)
    try:
        fd = os.open(path, mode | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    except FileExistsError:
        return None
    try:
        writers = _writers(path.parent)
        group = os.stat(path.parent).st_gid
        if writers & stat.S_IRWXG and os.fstat(fd).st_gid != group:
            try:
                os.fchown(fd, -1, group)
            except OSError:
                writers &= ~stat.S_IRWXG  # another group than the one that may write there
        with contextlib.suppress(PermissionError):  # of a file system that keeps no modes
            os.fchmod(fd, 0o600 | writers)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _writers(directory: Path) -> int:
    """Permission bits of group and others that allow reading and writing for those who may write to `directory`."""
    mode = os.stat(directory).st_mode
    return (0o060 if mode & stat.S_IWGRP else 0) | (0o006 if mode & stat.S_IWOTH else 0)


def _is_too_open(fd: int, status: os.stat_result, writers: int) -> bool:
    """Return whether more than `writers` may read the file, on a file system that could keep them out."""
    if not _readers(status.st_mode) & ~writers:
        return False
    try:
        os.fchmod(fd, 0o600 | writers)
    except OSError:
        return os.geteuid() not in (0, status.st_uid)  # another user's; refused to its owner: modes are not kept
    return not _readers(os.fstat(fd).st_mode) & ~writers


def _readers(mode: int) -> int:
    return mode & (stat.S_IRGRP | stat.S_IROTH)


def _is_still(fd: int, path: Path) -> bool:
    """Return whether the locked file is still the one that others would lock."""
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
