"""Copies and faults of a store that is a directory. Links are left alone: they may lead out of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PIECE_BYTES = 1 << 20


def copy(folder: Path, into: Path) -> None:
    """Copy a directory, holes in files as holes. Neither special files nor those that vanish meanwhile."""
    into.mkdir(parents=True, exist_ok=True)
    for place, _, names in os.walk(folder):
        target = into / Path(place).relative_to(folder)
        target.mkdir(exist_ok=True)
        for path in map(Path(place).joinpath, names):
            with suppress(FileNotFoundError, PermissionError):
                if _is_own(path):
                    _copy_file(path, target / path.name)


def damage(folder: Path, how: str, every: int = 1) -> int:
    """Remove files of a directory, cut them in half, or flip bits in their second half; the number of files.

    how: `remove`, `cut` or `flip`. every: 2 for every other file.
    """
    # The step is odd: every byte of a number is hit sooner or later, exponents too.
    files = sorted(path for path in folder.rglob("*") if _is_own(path))[::every]
    for path in files:
        size = path.stat().st_size
        if how == "remove":
            path.unlink()
        elif how == "cut":
            os.truncate(path, size // 2)
        else:
            _flip(path, range(size // 2, size, size // 64 | 1))
    return len(files)


def _is_own(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _copy_file(path: Path, into: Path) -> None:
    with path.open("rb") as source, into.open("wb") as target:
        size = os.fstat(source.fileno()).st_size
        end = 0
        with suppress(OSError):  # behind the last data
            while end < size:
                at = os.lseek(source.fileno(), end, os.SEEK_DATA)
                end = os.lseek(source.fileno(), at, os.SEEK_HOLE)
                target.seek(at)
                for start in range(at, end, _PIECE_BYTES):
                    target.write(os.pread(source.fileno(), min(_PIECE_BYTES, end - start), start))
        target.truncate(size)


def _flip(path: Path, places: range) -> None:
    with path.open("r+b") as file:  # the same file, for those who have it open
        for place in places:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes(one ^ 0x41 for one in byte))
