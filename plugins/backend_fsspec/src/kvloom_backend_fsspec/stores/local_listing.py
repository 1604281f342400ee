"""Listing a local directory past what cannot be read: obstore's own listing ends there."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvloom_backend_fsspec.stores.base import Listed
from kvloom_backend_fsspec.unread import NOTHING_THERE, Unread


class LocalListing:
    """One walk. Names are paths from the root of the file system, without the first slash."""

    def __init__(self, directory: str, unread: Unread) -> None:
        self._root = f"/{directory}"
        self._real = os.path.realpath(self._root)
        self._linked: set[str] = set()
        self._unread = unread

    def files(self) -> Iterator[Listed]:
        """Every file below. Raises OSError if the directory itself cannot be read; nothing if it is not there."""
        pending = [self._root]
        while pending:
            directory = pending.pop()
            for entry in self._entries(directory):
                try:
                    if entry.is_dir():
                        if not (entry.is_symlink() and self._was_here(entry.path)):
                            pending.append(entry.path)
                    elif entry.is_file():
                        status = entry.stat()
                        yield Listed(entry.path.lstrip("/"), status.st_size, status.st_mtime, "")
                except OSError as error:
                    self._unread.note(entry.path.lstrip("/"), error)

    def _entries(self, directory: str) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(directory) as entries:  # one at a time: all blobs of a tenant are in one directory
                yield from entries
        except OSError as error:
            if directory == self._root and error.errno not in NOTHING_THERE:
                raise
            self._unread.note(directory.lstrip("/"), error)

    def _was_here(self, path: str) -> bool:
        """Return whether a link's target is listed anyway: in the directory, or by another link. Loops
        count as listed."""
        real = os.path.realpath(path)
        if os.path.commonpath((real, self._real)) in (real, self._real) or real in self._linked:
            return True
        self._linked.add(real)
        return False
