"""DiskBackend: one file per blob in a directory that any number of processes may share.

A blob is written to a new file and renamed into place, so that every reader sees one version or none, also if a process
dies. Blobs survive the process; nothing is synced, so a power cut may take the newest blobs or leave them unreadable,
which the core's checksums turn into misses.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from kvloom import (
    Buffer,
    Buffers,
    ByteSize,
    CorruptBlobError,
    Entry,
    KVSpec,
    MappedBlob,
    ReadDone,
    Sink,
    StorageBackend,
    UnreadableBlobError,
    WriteDone,
    one_line,
)
from kvloom import Config as BaseConfig
from kvloom_backend_disk import native_reads, window
from kvloom_backend_disk.hold import Holds
from kvloom_backend_disk.layout import SCRATCH, Layout
from kvloom_backend_disk.scratch import Scratch, drop
from kvloom_backend_disk.transfer import Mode, Transfer, probe_direct

logger = logging.getLogger("kvloom.backend_disk")

Publish = Callable[[str, str], None]
"""Moves a draft into place: over an existing file, or only if there is none."""

_PUBLISH_ATTEMPTS = 8
# Without O_NONBLOCK, opening a FIFO would wait for its writer.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
# A blob's time of access is when it was last used, as `touch_many` says: a reader who only checks it does not count.
_NO_ATIME = getattr(os, "O_NOATIME", 0)
# What opening a symbolic link or a socket says, on one system or another; the last of a link to an impossible name.
_NO_FILE = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EOPNOTSUPP, errno.ENAMETOOLONG)
# What a path says where there is no blob; the last: one that was evicted a moment ago, see `Scratch.take`.
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.EAGAIN)
# What a path says that has something else than a directory in it.
_BLOCKED = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
# Not there, just evicted, the file of another user (whose times only that user may set), or a store that is only read.
_NO_TOUCH = (errno.ENOENT, errno.ENOTDIR, errno.EAGAIN, errno.EPERM, errno.EACCES, errno.EROFS)

_MAY_NOT = (errno.EACCES, errno.EPERM)
# Said of a directory that may be read all the same.
_ONLY_READ = (*_MAY_NOT, errno.EROFS)


class DiskBackend(StorageBackend):
    """Keeps every blob as a file under `path`. Survives a fork: between calls it has no descriptor but those of `hold`,
    which a child does not take over."""

    type: ClassVar[str] = "disk"
    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    class Config(BaseConfig):
        """The `disk` tier's own settings."""

        path: Path
        """The directory; made if missing. `~` is the home directory."""
        direct: Mode = "auto"
        """Move blobs past the page cache (O_DIRECT): `always`, `never`, or `auto` where that is faster."""
        page_cache: Annotated[ByteSize, Field(ge=0)] = ByteSize(1 << 30)
        """With `direct: auto`, how much of what was written or read last stays in the page cache."""

        @field_validator("path", mode="before")
        @classmethod
        def _names_a_directory(cls, value: Any) -> Any:
            # As a Path, empty text is the working directory.
            if isinstance(value, str) and not value.strip():
                raise ValueError("empty; name a directory")
            if "\0" in str(value):
                raise ValueError("has a NUL character in it; name a directory without one")
            return value

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._root = root = _absolute(config.path)
        self._layout = Layout(root)
        self._scratch = Scratch(root / SCRATCH)
        self._holds = Holds(root)
        self._refusal = ""
        self._maps = False
        try:
            self._transfer = self._probed(root, config.direct, config.page_cache)
            reclaimed = self._scratch.reclaim()
            self._maps = native_reads.are_memory(str(root))
        except OSError as error:
            self._refusal = (
                f"path: cannot write to {root}: {error.strerror or error}; name a directory that this user may create "
                "or write to"
            )
            if error.errno not in _ONLY_READ or not os.access(root, os.R_OK | os.X_OK):
                raise ValueError(self._refusal) from error
            self._transfer = Transfer(config.direct, tried=False)
            return
        if reclaimed:
            logger.info("removed %d unfinished files of dead processes from %s", reclaimed, root)

    def _probed(self, root: Path, wanted: Mode, kept_bytes: int) -> Transfer:
        """Return a transfer in a mode that works in this directory. Raises OSError if nothing can be written there."""
        draft, fd = self._scratch.open()
        try:
            if wanted != "never":
                probe_direct(fd)
            windowed = wanted == "auto" and window.works(fd)
            return Transfer(wanted, window=window.Window(kept_bytes) if windowed else None)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return Transfer(wanted)  # a full disk says nothing about O_DIRECT
            if wanted == "always":
                raise ValueError(f"direct: O_DIRECT does not work in {root} ({error}); use `direct: auto`") from error
            logger.info("no O_DIRECT in %s (%s): reading and writing through the page cache", root, one_line(error))
            return Transfer("never")
        finally:
            os.close(fd)
            os.unlink(draft)

    def identity(self) -> str | None:
        try:
            status = os.stat(self._root)
        except OSError:  # removed just now
            return os.path.realpath(self._root)
        return f"{status.st_dev}:{status.st_ino}"

    def check_writable(self) -> None:
        if self._refusal:
            raise ValueError(f"{self._refusal}, or set `write: never` to only read it")

    def put(self, key: str, blob: Buffers) -> None:
        self._put(key, blob, *self._scratch.open())

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        """One after the other, which is worth a batch: between two blobs no other thread has to be woken."""
        super().put_many(requests, done)

    def put_over(self, key: str, blob: Buffers, victims: Sequence[str]) -> None:
        """Writing a large blob over a file takes half the time of writing a new one."""
        places = map(self._layout.path, victims) if self._transfer.writes_over(blob) else ()
        taken = next(filter(None, map(self._scratch.take, places)), None)
        try:
            self.delete_many(victims)
        except BaseException:
            if taken is not None:
                drop(*taken)
            raise
        self._put(key, blob, *(taken or self._scratch.open()))

    def create(self, key: str, blob: Buffers) -> bool:
        """By a hard link, which only one can make. Raises OSError where the file system has none."""
        try:
            self._put(key, blob, *self._scratch.open(), publish=os.link)
        except FileExistsError:
            return False
        return True

    def _put(self, key: str, blob: Buffers, draft: str, fd: int, *, publish: Publish = os.replace) -> None:
        path = self._layout.path(key)
        try:
            try:
                self._transfer.write(fd, blob)
            finally:
                os.close(fd)  # before publishing: network file systems report a full disk here
            self._publish(draft, path, publish)
            if publish is os.link:
                with contextlib.suppress(OSError):  # it is published; a draft of the dead is reclaimed
                    os.unlink(draft)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        self._transfer.written(path, blob)

    def get(self, key: str) -> Buffer | None:
        memory = _Memory()
        return memory.view if self.get_into(key, memory) else None

    def get_into(self, key: str, sink: Sink) -> bool:
        if self._reads_natively:
            outcomes: list[bool | Exception] = []
            self.get_many_into([(key, sink)], lambda _, outcome: outcomes.append(outcome))
            if isinstance(outcomes[0], Exception):
                raise outcomes[0]
            return outcomes[0]
        with self._opened(key) as blob:
            if blob is None:
                return False
            fd, size = blob
            self._transfer.read(fd, 0, sink.reserve(size)[:size], sink.filled, blob_bytes=size)
        self._transfer.were_read([(self._layout.path(key), size)])
        return True

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        if self._reads_natively:
            native_reads.read_many(requests, self._layout.path, self._transfer, _outcome_of, done)
        else:
            super().get_many_into(requests, done)

    @property
    def _reads_natively(self) -> bool:
        """There is native code, and it is known whether O_DIRECT works."""
        return self._transfer.tried and native_reads.available()

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return self.map_many([(key, most_bytes)])[0]

    def map_many(self, requests: Sequence[tuple[str, int]]) -> list[MappedBlob | None]:
        if not self._maps:
            return [None] * len(requests)
        return native_reads.mapped([(self._layout.path(key), most_bytes) for key, most_bytes in requests])

    def current_many(self, blobs: Sequence[MappedBlob]) -> list[bool]:
        return native_reads.are_current(blobs)

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        with self._opened(key) as blob:
            if blob is None:
                return False
            fd, size = blob
            if size < offset + len(into):
                return False
            self._transfer.read(fd, offset, into, lambda _: None, blob_bytes=size)
        self._transfer.were_read([(self._layout.path(key), size)])
        return True

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int] | None]:
        """The file of `key` and its bytes: the same version to the end, also if it is replaced or deleted meanwhile.

        Raises CorruptBlobError if there is something other than a file.
        """
        path = self._layout.path(key)
        try:
            fd = _open_to_read(path)
        except OSError as error:
            outcome = _outcome_of(path, error)
            if isinstance(outcome, Exception):
                raise outcome from error
            yield None
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptBlobError(f"not a regular file: {path}")
            yield fd, status.st_size
        finally:
            os.close(fd)

    def contains(self, key: str) -> bool:
        return os.access(self._layout.path(key), os.F_OK)

    def delete(self, key: str) -> None:
        self._layout.remove(self._layout.path(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)
        for directory in {os.path.dirname(self._layout.path(key)) for key in keys}:
            self._layout.prune(directory)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Also removes what the dead have left behind, which no listing shows and no bound counts."""
        with contextlib.suppress(OSError):  # who may only read leaves it to others
            self._scratch.reclaim()
        return self._layout.scan(prefix)

    def touch_many(self, keys: Sequence[str]) -> None:
        """Each blob's time of access becomes now; that of writing stays."""
        for key in keys:
            try:
                _touch(self._layout.path(key), time.time_ns())
            except OSError as error:
                if error.errno not in (*_NO_TOUCH, *_NO_FILE):
                    raise

    def hold(self, name: str) -> bool:
        return self._holds.take(name)

    def close(self) -> None:
        self._holds.release()

    def _publish(self, draft: str, path: str, publish: Publish) -> None:
        """Move a draft into place, and remove anything else that is there. Raises CorruptBlobError if it cannot be
        removed."""
        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                publish(draft, path)
                return
            except FileNotFoundError:
                # Not made yet, or just pruned by another process, perhaps again while it is being made.
                try:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                except (FileNotFoundError, FileExistsError):
                    self._make_way(path)
            except IsADirectoryError:
                self._make_way(path, all_of_it=True)
            except OSError as error:
                if error.errno not in _BLOCKED:
                    raise
                self._make_way(path)
        publish(draft, path)

    def _make_way(self, path: str, *, all_of_it: bool = False) -> None:
        try:
            (self._layout.remove if all_of_it else self._layout.clear_above)(path)
        except OSError as error:
            raise CorruptBlobError(f"the file in the way cannot be removed: {error}") from error


class _Memory:
    """The sink of `get`: memory of its own, page-aligned."""

    view = memoryview(b"")

    def reserve(self, num_bytes: int) -> memoryview:
        if num_bytes:
            self.view = memoryview(mmap.mmap(-1, num_bytes))
        return self.view

    def filled(self, num_bytes: int) -> None:
        pass


def _outcome_of(path: str, error: OSError) -> bool | Exception:
    """Return what an error at opening a file to read it comes to: there is no blob, or this exception."""
    if error.errno in _NOTHING:
        return False
    if error.errno in _MAY_NOT and _is_file(path):
        return UnreadableBlobError(f"this user may not read the file: {path}")
    return CorruptBlobError(f"not a regular file: {path}") if error.errno in (0, *_NO_FILE) else error


def _is_file(path: str) -> bool:
    """Return whether the directory may be searched and has a regular file of that name."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _open_to_read(path: str) -> int:
    try:
        return os.open(path, _READ_FLAGS | _NO_ATIME)
    except PermissionError:
        return os.open(path, _READ_FLAGS)  # only a file's owner may read it without a trace


def _touch(path: str, nanoseconds: int) -> None:
    # By descriptor: by path, the time of writing could be given to a version that has just replaced this one.
    fd = _open_to_read(path)
    try:
        os.utime(fd, ns=(nanoseconds, os.fstat(fd).st_mtime_ns))
    finally:
        os.close(fd)


def _absolute(path: Path) -> Path:
    try:
        return Path(os.path.abspath(path.expanduser()))
    except RuntimeError as error:
        raise ValueError(f"path: unknown home directory: {path}; name a directory") from error
