"""Local directories, without the clients where they cause trouble.

Both block on a FIFO, in a thread that is then lost. obstore ends a listing at an unreadable place, and never deletes
its abandoned drafts. fsspec lists a link as a file, and moves a file into a directory of its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvloom import BackendError, CorruptBlobError, Sink, UnreadableBlobError
from kvloom_backend_fsspec.errors import explained
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.stores.base import Listed, Memory
from kvloom_backend_fsspec.stores.fsspec_store import FsspecStore
from kvloom_backend_fsspec.stores.local_listing import LocalListing
from kvloom_backend_fsspec.stores.obstore_store import ObstoreStore
from kvloom_backend_fsspec.unread import Unread

if TYPE_CHECKING:
    from kvloom_backend_fsspec.config import Place

_PIECE_BYTES = 256 << 10
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EOPNOTSUPP)
"""A link may lead to too long a name; the last two are what opening a socket says."""


_MAY_NOT = (errno.EACCES, errno.EPERM)


class _LocalFiles:
    """Treats only regular files as blobs. A put raises CorruptBlobError where a directory or file is in the way."""

    _place: Place

    def put(self, name: str, data: bytes) -> None:
        with _looked_at(name, self._place.prefix):
            super().put(name, data)  # type: ignore[misc]

    def create(self, name: str, data: bytes) -> bool:
        with _looked_at(name, self._place.prefix):
            if super().create(name, data):  # type: ignore[misc]
                return True
            # No listing shows special files, so they would never be removed.
            if not _is_special(f"/{name}") or self.size(name) is not None:
                return False
            self.delete([name])
            return bool(super().create(name, data))  # type: ignore[misc]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                os.unlink(f"/{name}")
            except OSError as error:
                if error.errno not in (*_NOTHING, errno.EISDIR):
                    raise BackendError(explained(error, self._place)) from error

    def get(self, name: str) -> bytes | None:
        memory = Memory()
        return memory.data if self.read(name, memory) else None

    def read(self, name: str, sink: Sink) -> bool:
        with self._opened(name) as found:
            if found is None:
                return False
            file, size = found
            if not size:
                raise CorruptBlobError(f"an empty file: {name}")
            _fill(sink.reserve(size)[:size], file, 0, sink.filled)
        return True

    def read_range(self, name: str, offset: int, into: memoryview) -> bool:
        with self._opened(name) as found:
            if found is None or found[1] < offset + len(into):
                return False
            _fill(into, found[0], offset, lambda _: None)
        return True

    def size(self, name: str) -> int | None:
        try:
            status = os.stat(f"/{name}")
        except OSError as error:
            if error.errno not in _NOTHING:
                raise BackendError(explained(error, self._place)) from error
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, directory: str) -> Iterator[Listed]:
        unread = Unread(Names(self._place.prefix))
        try:
            yield from LocalListing(directory, unread).files()
        except OSError as error:
            raise BackendError(explained(error, self._place)) from None
        unread.end()

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int] | None]:
        """A descriptor, and how long the file is: the same version to the end."""
        try:
            file = os.open(f"/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _MAY_NOT and self.size(name) is not None:
                raise UnreadableBlobError(f"this user may not read the file: /{name}") from error
            if error.errno not in _NOTHING:
                raise BackendError(explained(error, self._place)) from error
            yield None
            return
        try:
            status = os.fstat(file)
            yield (file, status.st_size) if stat.S_ISREG(status.st_mode) else None
        except OSError as error:
            raise BackendError(explained(error, self._place)) from error
        finally:
            os.close(file)


class LocalObstoreStore(_LocalFiles, ObstoreStore):
    """`file://` by obstore."""


class LocalFsspecStore(_LocalFiles, FsspecStore):
    """`file://` and `local://` by fsspec."""


def _is_special(path: str) -> bool:
    """Return whether something is there that is neither a regular file nor a directory."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def _looked_at(name: str, prefix: str) -> Iterator[None]:
    """Raises CorruptBlobError if something below `prefix` is in the way, which does not concern other blobs."""
    path = f"/{name}"
    if os.path.isdir(path):
        raise CorruptBlobError(f"a directory lies in the place of a blob: {path}")
    try:
        yield
    except BackendError as error:
        while len(path := os.path.dirname(path)) > len(f"/{prefix}"):
            if os.path.lexists(path) and not os.path.isdir(path):
                raise CorruptBlobError(f"a file lies in the place of a directory: {path}") from error
        raise


def _fill(view: memoryview, file: int, offset: int, filled: Callable[[int], object]) -> None:
    at = 0
    while at < len(view):
        got = os.preadv(file, [view[at : at + _PIECE_BYTES]], offset + at)
        if not got:
            raise BackendError(f"the file has {offset + at} bytes of {offset + len(view)}")
        at += got
        filled(at)
