"""Without a C++ compiler there is no codec; then there is nothing to test here, and that is said."""

from __future__ import annotations

from kvloom import PluginError, native

try:
    native.load("kvloom_serde_cachegen", "kvz")
    missing = ""
except PluginError as error:
    missing = str(error)
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return f"serde_cachegen is not tested: {missing}" if missing else None
