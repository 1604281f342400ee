"""What a log says of an error is one line, escaped and cut: its text may come from a store or a client."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LOGGERS = ("log", "logger")
_ERRORS = ("error", "exc", "exception")
"""The names that an error has where it is caught."""


def raw_errors(source: str) -> Iterator[int]:
    """The lines of calls of a logger that are handed an error as it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.value
            if isinstance(name, ast.Name) and name.id in _LOGGERS:
                given = [part for one in node.args for part in (one.values if isinstance(one, ast.BoolOp) else [one])]
                if any(isinstance(one, ast.Name) and one.id in _ERRORS for one in given):
                    yield node.lineno


def test_no_error_is_logged_as_it_is() -> None:
    assert list(raw_errors('log.warning("%s", error)\nlogger.info("%s", error or 1)\nlog.info("%s", str)')) == [1, 2]
    files = [file for folder in ("core", "plugins/*") for file in ROOT.glob(f"{folder}/src/**/*.py")]
    found = {f"{file.relative_to(ROOT)}:{line}" for file in files for line in raw_errors(file.read_text("utf-8"))}
    assert len(files) > 200 and not found
