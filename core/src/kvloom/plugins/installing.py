"""Commands that install missing packages, in the form that works here."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def pip_install(dist: str, extra: str = "") -> str:
    """The command that installs one of kvloom's packages: from the clone, if kvloom was installed from one.

    dist: its name, such as `kvloom-backend-disk`.
    """
    here = _clone()
    folder = None if here is None else here / _folder(dist)
    what = dist if folder is None or not (folder / "pyproject.toml").is_file() else str(folder)
    return f"pip install {shlex.quote(what + (f'[{extra}]' if extra else ''))}"


def _folder(dist: str) -> str:
    word = dist.removeprefix("kvloom-").replace("-", "_")
    return {"kvloom": "core", "testkit": "testkit"}.get(word, f"plugins/{word}")


def _clone() -> Path | None:
    """The directory that pip installed kvloom from, if it is a clone and still exists."""
    try:
        url = json.loads(metadata.distribution("kvloom").read_text("direct_url.json") or "{}").get("url", "")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    parts = urlsplit(url)
    place = Path(unquote(parts.path)).parent
    return place if parts.scheme == "file" and (place / "core" / "pyproject.toml").is_file() else None
