"""Faults of a store that is a directory."""

from __future__ import annotations

import os
from pathlib import Path


def damage(folder: Path, how: str, every: int = 1) -> int:
    """Remove files of a directory, cut them in half, or flip bits in their second half; the number of files.

    how: `remove`, `cut` or `flip`. every: 2 for every other file.
    """
    # The step is odd: every byte of a number is hit sooner or later, exponents too.
    files = sorted(path for path in folder.rglob("*") if path.is_file())[::every]
    for path in files:
        size = path.stat().st_size
        if how == "remove":
            path.unlink()
        elif how == "cut":
            os.truncate(path, size // 2)
        else:
            _flip(path, range(size // 2, size, size // 64 | 1))
    return len(files)


def _flip(path: Path, places: range) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0x41
    with path.open("r+b") as file:  # the same file, for those who have it open
        file.write(data)
