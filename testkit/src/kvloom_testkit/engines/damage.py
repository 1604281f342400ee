"""Faults of a store that is a directory."""

from __future__ import annotations

import os
from pathlib import Path


def damage(folder: Path, how: str) -> int:
    """Remove every file of a directory, cut it in half, or flip bits in its second half; the number of files.

    how: `remove`, `cut` or `flip`.
    """
    # The step is odd: every byte of a number is hit sooner or later, exponents too.
    files = [path for path in folder.rglob("*") if path.is_file()]
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
