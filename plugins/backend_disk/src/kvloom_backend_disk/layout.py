"""Maps keys to files and back: the only module that knows the shape of the directory.

The blob of `a/b/name` is the file `a/b/+hh/name`. `+` occurs in no key, so a key that is also the beginning of another
key is never a file where a directory is needed; `hh`, two hex digits, keeps every directory small.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from kvloom import Entry, IncompleteListingError

SCRATCH = "+tmp"
"""The directory of files that are still being written."""

_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._-]+"
_NAME = re.compile(_PART)
_KEY = re.compile(rf"((?:{_PART}/)*)({_PART})")
_SHARD = re.compile(r"\+[0-9a-f]{2}")
_CHUNK_NAME = re.compile(r"[0-9]+-([0-9a-f]{2})[0-9a-f]{62}")
_MAX_KEY_CHARS = 200
# A link to itself, or to an impossible name, cannot have a blob below it.
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class Layout:
    """Maps keys to files under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def path(self, key: str) -> str:
        """The file of `key`. Raises ValueError if it is not a key: such a path could lie outside the root."""
        match = _KEY.fullmatch(key)
        if match is None or len(key) > _MAX_KEY_CHARS:
            raise ValueError(f"not a key: {key!r}; expected parts of [A-Za-z0-9._-] joined by '/'")
        above, name = match.groups()
        return f"{self._root}/{above}+{_shard(name)}/{name}"

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Every blob whose key starts with `prefix`. Blobs that vanish meanwhile are left out.

        Skips places that cannot be read, and raises IncompleteListingError at the end if they may hold blobs.
        """
        above, slash, beginning = prefix.rpartition("/")
        if not slash or _KEY.fullmatch(above):
            listing = _Listing(self._root)
            yield from listing.walk(above + slash, beginning)
            if listing.unread:
                raise IncompleteListingError(f"{listing.unread} places cannot be read, the first: {listing.first}")

    def remove(self, path: str) -> None:
        """Remove the file at a key's path, if any: a blob, or anything else."""
        try:
            os.unlink(path)
        except (IsADirectoryError, PermissionError):  # POSIX says the latter of a directory, Linux the former
            if os.path.islink(path) or not os.path.isdir(path):
                raise
            # A directory above may be a link that leads out of the store, where nothing may be deleted.
            inside = os.path.realpath(path).startswith(os.path.realpath(self._root) + os.sep)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process was faster
                (shutil.rmtree if inside else os.rmdir)(path)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise

    def clear_above(self, path: str) -> None:
        """Remove anything that is in the place of a directory above `path`."""
        above = path
        while len(above := os.path.dirname(above)) > len(self._root):
            if os.path.lexists(above) and not os.path.isdir(above):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # another process was faster
                    os.unlink(above)
                return

    def prune(self, directory: str) -> None:
        """Remove `directory` and the ones above it, below the root, as long as they are empty."""
        while len(directory) > len(self._root):
            try:
                os.rmdir(directory)
            except OSError:
                return
            directory = os.path.dirname(directory)


def _belongs(name: str, shard: str) -> bool:
    """Return whether a file of that name in the directory `+<shard>` is a blob. One expression covers
    names of chunks."""
    match = _CHUNK_NAME.fullmatch(name)
    return match[1] == shard if match else _NAME.fullmatch(name) is not None and _shard(name) == shard


def _shard(name: str) -> str:
    match = _CHUNK_NAME.fullmatch(name)
    return match[1] if match else f"{crc32(name.encode()) & 0xFF:02x}"


class _Listing:
    """One walk through the directory, and what could not be read in it."""

    def __init__(self, root: str) -> None:
        self.unread = 0
        self.first = ""
        self._root = root
        self._real = os.path.realpath(root)
        self._linked: set[str] = set()

    def walk(self, above: str, beginning: str) -> Iterator[Entry]:
        for entry in self._entries(f"{self._root}/{above}", is_root=not above):
            name = entry.name
            if name.startswith("+"):
                if _SHARD.fullmatch(name):
                    yield from self._blobs(entry.path, above, beginning)
            # Where no key leads there is no blob: a file system's `lost+found` need not be readable.
            elif (
                name.startswith(beginning)
                and _NAME.fullmatch(name)
                and len(above) + len(name) < _MAX_KEY_CHARS
                and not (entry.is_symlink() and self._was_here(entry.path))
            ):
                yield from self.walk(f"{above}{name}/", "")

    def _was_here(self, path: str) -> bool:
        """Return whether a link's target is listed anyway: in the store, or by another link. Loops count as listed."""
        try:
            real = os.path.realpath(path)
        except OSError as error:  # a link on the way that may not be read, as many in /proc
            self._missed(path, error)
            return True
        if os.path.commonpath((real, self._real)) in (real, self._real) or real in self._linked:
            return True
        self._linked.add(real)
        return False

    def _blobs(self, directory: str, above: str, beginning: str) -> Iterator[Entry]:
        shard = directory[-2:]
        room = _MAX_KEY_CHARS - len(above)
        for entry in self._entries(directory):
            name = entry.name
            # A file that is not where `path` puts its key is not ours (an editor's, a network file system's).
            if not name.startswith(beginning) or len(name) > room or not _belongs(name, shard):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                self._missed(entry.path, error)
                continue
            yield Entry(above + name, status.st_blocks * 512, status.st_mtime, status.st_atime)

    def _entries(self, directory: str, *, is_root: bool = False) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(directory) as entries:
                return list(entries)
        except OSError as error:
            if is_root and error.errno not in _NOTHING_THERE:
                raise
            self._missed(directory, error)
            return []

    def _missed(self, path: str, error: OSError) -> None:
        if error.errno not in _NOTHING_THERE:
            self.unread += 1
            self.first = self.first or f"{path.rstrip('/')} ({error.strerror})"
