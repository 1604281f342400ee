"""Unfinished files: named after the process that writes them, and reclaimed when it is dead.

A name is `<host>.<pid>.<start time>.<random>`. `<host>` is a digest over host name, boot and pid namespace: a pid has
the same meaning here only if all three are ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import re
import signal
import stat
import time
from pathlib import Path

FOREIGN_SECONDS = 600.0
"""Time without a change after which a file counts as abandoned if it belongs to a host, or a container, whose processes
cannot be seen from here. A writer that has stood still for so long finds its file gone, and fails."""

_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NAME = re.compile(r"([0-9a-f]{12})\.([0-9]+)\.([0-9]*)\.[0-9a-f]{16}")


class Scratch:
    """The directory of unpublished files of one store, which other processes may share."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._pid = -1
        self._owner = ""

    def open(self) -> tuple[str, int]:
        """A new, empty file of this process's: its path and a descriptor to read and write. Makes the directory."""
        path = self._new_path()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return path, os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            self._make_directory()
            return path, os.open(path, flags, 0o666)

    def _make_directory(self) -> None:
        try:
            os.makedirs(self._directory, exist_ok=True)
        except FileExistsError:  # something else is in its place
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # another process was faster
                os.unlink(self._directory)
            os.makedirs(self._directory, exist_ok=True)

    def take(self, path: str) -> tuple[str, int] | None:
        """Take a file out of its place to overwrite it, like a result of `open`; None if that is impossible.

        Also None if it is open elsewhere, because a reader of the old blob must not see it change. A reader that has
        looked up the name but not opened it yet may still get it; its checksums fail, and the second attempt finds
        nothing.
        """
        draft = self._new_path()
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
                return None
            os.rename(path, draft)
            fd = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            return None
        if not _nobody_else_has(fd):
            drop(draft, fd)
            return None
        return draft, fd

    def reclaim(self) -> int:
        """Remove what dead processes left behind; how many files that was. Never touches a living process's."""
        host, removed, now = _host(), 0, None
        try:
            with os.scandir(self._directory) as found:
                entries = list(found)
        except FileNotFoundError:
            return 0
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            if match[1] != host:
                now = self._now() if now is None else now
                abandoned = now - _changed_at(entry) > FOREIGN_SECONDS
            else:
                abandoned = not _alive(int(match[2]), match[3])
            if abandoned:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
        return removed

    def _now(self) -> float:
        """The time of the file system, which another host's clock may differ from, as this one's may."""
        try:
            draft, fd = self.open()
        except OSError:  # it is full, or only read
            return time.time()
        try:
            return os.fstat(fd).st_ctime
        finally:
            drop(draft, fd)

    def _new_path(self) -> str:
        return f"{self._directory}/{self._prefix()}.{os.urandom(8).hex()}"

    def _prefix(self) -> str:
        # Asked for at every call: after a fork this object lives on in a process with another pid.
        pid = os.getpid()
        if pid != self._pid:
            self._owner = f"{_host()}.{pid}.{_start_time(pid)}"
            self._pid = pid
        return self._owner


def drop(draft: str, fd: int) -> None:
    """Give up a file of `Scratch`."""
    os.close(fd)
    with contextlib.suppress(OSError):
        os.unlink(draft)


def _nobody_else_has(fd: int) -> bool:
    """Return whether the file is open nowhere else. Only then does Linux grant a lease for writing."""
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        # Whoever opens a leased file has its holder sent a signal, which by default would kill it. This one is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False  # it is open elsewhere, or this file system has no leases
    return True


def _changed_at(entry: os.DirEntry[str]) -> float:
    """The time at which a file was last written or renamed: one that was taken to be written over has an old content.

    Infinity for one that is gone.
    """
    try:
        return entry.stat(follow_symlinks=False).st_ctime
    except OSError:
        return math.inf


def _alive(pid: int, start_time: str) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # alive, and another user's
    fields = _stat(pid)
    if fields and fields[_STATE] == "Z" and fields[_THREADS] in ("0", "1"):
        return False  # a zombie
    now = fields[_STARTED] if fields else ""
    return not now or not start_time or now == start_time


_STATE, _THREADS, _STARTED = 0, 17, 19
"""Fields of /proc/<pid>/stat, behind the name."""


def _start_time(pid: int) -> str:
    """Start time of `pid`, in the kernel's ticks since boot; empty where the system does not say."""
    fields = _stat(pid)
    return fields[_STARTED] if fields else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name; empty where there are none."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return []  # /proc shows another pid namespace's processes
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []
    return fields if len(fields) > _STARTED else []


def _host() -> str:
    parts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
