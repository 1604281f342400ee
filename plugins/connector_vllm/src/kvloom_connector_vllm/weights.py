"""Identifies a model's weights: two fine-tunes of one model differ here and nowhere else."""

from __future__ import annotations

import errno
import hashlib
import json
import operator
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SAMPLE_BYTES = 512
_WHOLE_BYTES = 1 << 20
"""Files up to this size are read as a whole: headers, configurations, small adapters."""
_STRIDE_BYTES = 256 << 10
"""Distance between samples of a large file or tensor."""
_MOST_HEADER_BYTES = 8 << 20
"""Limit for a safetensors file: some 60,000 tensors. Parsing takes 25 times as much memory, and stops all threads."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ABOUT = (".json", ".model", ".py")
"""Suffixes of files that say how to compute with the weights, remote code included."""


def has_weights(place: Path) -> bool:
    """Return whether it is a file, or a folder with files of weights."""
    return place.is_file() or (place.is_dir() and any(path.suffix in _WEIGHTS for path in place.iterdir()))


def folder_digest(folder: Path) -> str:
    """32 hex digits over names, sizes and samples of the files that decide what a model computes.

    Of each tensor of a safetensors file, its beginning, its end and half a KiB of every 256 KiB between; of other large
    files the same, as a whole. An edit of a few elements between may go unseen. FileNotFoundError without weights.
    """
    files = _files(folder)
    if not any(path.suffix in _WEIGHTS for path in files):
        raise FileNotFoundError(f"{folder}: no weights ({', '.join(_WEIGHTS)})")
    return _digest(files)


def file_digest(path: Path) -> str:
    """The same of one file."""
    return _digest([path])


def versions(place: Path) -> list[tuple[str, int, int, int]]:
    """Name, inode, size and time of change of each of these files, which are others if one was written since."""
    files = _files(place) if place.is_dir() else [place]
    found = [(path.name, path.stat()) for path in files]
    return [(name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in (*_WEIGHTS, *_ABOUT))


def _digest(files: list[Path]) -> str:
    state = hashlib.sha256()
    for path in files:
        # Without O_NONBLOCK, opening a FIFO would wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            size = status.st_size
            state.update(f"{path.name} {size}\n".encode(errors="surrogateescape"))
            if size <= _WHOLE_BYTES:
                state.update(file.read())
                continue
            for start, end in _parts(file, size, path.suffix):
                for at in (*range(start, max(end - _SAMPLE_BYTES, start + 1), _STRIDE_BYTES), end - _SAMPLE_BYTES):
                    file.seek(max(at, start))
                    state.update(file.read(min(_SAMPLE_BYTES, end - start)))
    return state.hexdigest()[:32]


def _parts(file: BinaryIO, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """Header and tensors of a safetensors file, from where to where; the whole of any other."""
    header = int.from_bytes(file.read(8), "little")
    data = 8 + header
    if suffix == ".safetensors" and header <= min(_MOST_HEADER_BYTES, size - 8):
        found = _tensors(file.read(header), size - data)
        if found is not None:
            yield 0, data
            yield from ((data + start, data + end) for start, end in found)
            return
    yield 0, size


def _tensors(header: bytes, most: int) -> list[tuple[int, int]] | None:
    """Begin and end of each tensor; None for an invalid header, or if tensors share bytes."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        found = [
            (operator.index(start), operator.index(end)) for start, end in (one["data_offsets"] for one in entries)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    found = [(start, end) for start, end in found if 0 <= start < end <= most]
    # Each is sampled: many that claim to be all of a large file would take for ever.
    return found if sum(end - start for start, end in found) <= most else None
