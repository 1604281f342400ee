"""SGLang's sources where it is not installed: it needs a GPU, and its storages do not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "0.5.23"
_SECONDS = 300


def path(into: Path) -> Path:
    """A directory for the path of imports, with `sglang` in it. Raises ImportError if there is none to be had.

    It is that of an installed SGLang; or else `into`, with the sources of the wheel that SGLANG_WHEEL names or of one
    from the package index.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    wheel = os.environ.get("SGLANG_WHEEL") or _downloaded(into)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        wanted = [name for name in names if name.startswith("sglang/srt/") and name.endswith(".py")]
        archive.extractall(into, [*wanted, *(name for name in names if name.endswith(".dist-info/METADATA"))])
    return into


def _downloaded(into: Path) -> str:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", into, f"sglang=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    found = list(into.glob("sglang-*.whl"))
    if done.returncode or not found:
        raise ImportError(f"no wheel of sglang {VERSION}: {done.stderr.strip()[-200:]}")
    return str(found[0])
