"""Which weights a model has: two fine-tunes of one model differ here and nowhere else."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WHOLE_BYTES = 1 << 20
"""Files up to this size are read as a whole: headers, configurations, small adapters."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model")


def folder_digest(folder: Path) -> str:
    """32 hex digits over names, sizes, beginnings and samples of the files that decide what a model computes.

    Reads some 300 KiB of each large file. Raises FileNotFoundError for a folder without weights.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _SUFFIXES)
    if not any(path.suffix not in (".json", ".model") for path in files):
        raise FileNotFoundError(f"{folder}: no weights ({', '.join(_SUFFIXES[:5])})")
    return _digest(files)


def file_digest(path: Path) -> str:
    """The same of one file."""
    return _digest([path])


def _digest(files: list[Path]) -> str:
    state = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode(errors="surrogateescape"))
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                state.update(file.read())
                continue
            state.update(file.read(_SAMPLES * _SAMPLE_BYTES))
            for number in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * (number + 1) // _SAMPLES)
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:32]
