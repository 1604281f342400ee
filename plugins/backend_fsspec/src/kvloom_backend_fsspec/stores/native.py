"""obstore's compiled module, also in a process that was forked after it had been used.

obstore runs on threads of its own (a tokio runtime, one for each loaded copy of its shared library), which a forked
child does not have: there every call would wait for ever. A second copy of the library brings a runtime of its own;
loading it takes 8 ms with obstore 0.12.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
from functools import cache
from types import ModuleType

from kvloom import BackendError

_first: list[int] = []
"""The process that used obstore first."""


def native() -> ModuleType:
    """The module with obstore's functions (`put`, `get`, ...), its stores (`_store`) and its errors (`exceptions`)."""
    if not _first:
        _first.append(os.getpid())
    return _loaded(os.getpid())


@cache
def _loaded(pid: int) -> ModuleType:
    try:
        module = importlib.import_module("obstore._obstore")
    except ModuleNotFoundError:
        raise ImportError("obstore is not installed; pip install obstore, or set `driver: fsspec`") from None
    return module if pid == _first[0] else _copy(str(module.__file__))


def _copy(library: str) -> ModuleType:
    # The linker knows a library by its file: only another file is loaded once more.
    with tempfile.TemporaryDirectory(prefix="kvloom-obstore-") as directory:
        try:
            copy = shutil.copy(library, directory)
            spec = importlib.util.spec_from_file_location("_obstore", copy)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (OSError, ImportError) as error:
            raise BackendError(
                f"obstore cannot be used in a forked process: loading a second copy of it from {directory} failed "
                f"({error}); point TMPDIR at a directory whose files may be executed, or open the engine after the fork"
            ) from error
    return module
