"""Native libraries of plugins: built when the plugin is installed, found beside its modules, called through ctypes."""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path


def load(package: str, name: str) -> ctypes.CDLL:
    """The library `lib<name>` that lies in an installed package. Raises ImportError, which makes the plugin `broken`.

    Calls through it let other threads run. Its functions take plain pointers and sizes, so that one build serves every
    version of Python and of torch.
    """
    places = [Path(place) for place in import_module(package).__path__]
    found = [file for place in places for suffix in ("so", "dylib") if (file := place / f"lib{name}.{suffix}").exists()]
    if not found:
        where = " or ".join(map(str, places))
        raise ImportError(
            f"lib{name} is not in {where}: it is built when the package is installed, which needs a C++ compiler; "
            f"install {package.replace('_', '-')} again"
        )
    try:
        return ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise ImportError(f"{found[0]} cannot be loaded: {error}") from error
