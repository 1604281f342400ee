"""Files that processes share a directory for: each process that learns has one of its own, locked while it lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import weakref
from pathlib import Path

logger = logging.getLogger("kvloom.tokens_radix")


_NO_LOCK = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO)


class Slot:
    """One process's file: `<name>.<number>.journal`, and a lock beside it that goes with the process."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        _everybody.add(self)

    def release(self) -> None:
        """Idempotent. A process that has written nothing leaves nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if not os.path.lexists(self.path):
                    os.unlink(self.path.with_suffix(".lock"))
            # Not left to closing: a child that was forked a moment ago may still have a copy.
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_everybody: weakref.WeakSet[Slot] = weakref.WeakSet()


def take(directory: Path, name: str) -> tuple[Slot | None, Path | None]:
    """A slot that no living process has, and the file to start from, which may be another slot's.

    It is the most recently written of the free slots, so that the newest sequences are not lost. There is no slot if
    the file system has no locks. Raises OSError.
    """
    written = _written(directory, name)
    numbers = [number for number, _, _ in written]
    free = next(number for number in range(len(numbers) + 1) if number not in numbers)
    for number in [*numbers, free, *range(max(numbers, default=0) + 1, max(numbers, default=0) + 1000)]:
        slot = _locked(directory / f"{name}.{number}")
        if slot is not None:
            break
    else:
        raise OSError(f"a thousand processes learn in {directory}")
    files = [path for _, _, path in written if path.is_file() and not path.is_symlink()]
    return slot, slot.path if slot.path in files else files[0] if files else None


def regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file. Raises OSError, without waiting, for anything else.

    A writable file is only accessible to users who may write to the directory: a journal holds prompts and salts, and a
    user who may read a lock file may lock it.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if flags & (os.O_WRONLY | os.O_RDWR):
            _keep_to_writers(fd, status, path.parent.stat())
    except BaseException:
        os.close(fd)
        raise
    return fd


def _keep_to_writers(fd: int, status: os.stat_result, directory: os.stat_result) -> None:
    """Whatever the umask took, or an earlier release gave."""
    mode = 0o600 | (0o006 if directory.st_mode & stat.S_IWOTH else 0)
    with contextlib.suppress(PermissionError):  # another user's, or of a file system that keeps no modes
        if directory.st_mode & stat.S_IWGRP:
            with contextlib.suppress(PermissionError):  # of a group that this user is not in
                if status.st_gid != directory.st_gid:
                    os.fchown(fd, -1, directory.st_gid)
            if os.fstat(fd).st_gid == directory.st_gid:
                mode |= 0o060
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(fd, mode)


def _written(directory: Path, name: str) -> list[tuple[int, int, Path]]:
    """Number, time of writing and path of each file, the latest first."""
    found = []
    for path in directory.glob(f"{name}.*.journal"):
        number = path.name[len(name) + 1 : -len(".journal")]
        with contextlib.suppress(OSError):
            if number.isdecimal():
                found.append((int(number), path.lstat().st_mtime_ns, path))
    return sorted(found, key=lambda one: -one[1])


def _locked(stem: Path) -> Slot | None:
    """The slot, unless another process has it."""
    lock = Path(f"{stem}.lock")
    try:
        fd = regular(lock, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno in _NO_LOCK:  # something else is there
            return None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.lstat(lock)):  # a later process has another file
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError):  # released at this moment
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return Slot(Path(f"{stem}.journal"), fd)


def _after_fork_in_child() -> None:
    for slot in tuple(_everybody):
        slot._close()  # without unlocking: the lock is the parent's


os.register_at_fork(after_in_child=_after_fork_in_child)
