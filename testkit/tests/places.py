"""Directories whose files need no disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 2 << 30  # containers often have 64 MiB


@contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A directory in memory, which is deleted at the end, where there is room for the files of a test."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _NEEDED_BYTES:
        yield otherwise
        return
    with TemporaryDirectory(prefix="kvloom-", dir=_MEMORY) as place:
        yield Path(place)
