"""Results of items, in a file of JSON lines to which a run adds, so that an interrupted one goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from kvloom import KVLoomError, replace_file

Row = Mapping[str, Any]

EXACT, WITHOUT, FULL = "exact", "no context", "full prefill"
"""Values of `by` besides codecs and executors: exact KV, none, and the prefill that executors are compared with."""
TEXT = "text"
"""Predictions of real text; it is no task, and is measured beside them."""

_BEGINNING = b'{"about": '
_MOST_BYTES = 256 << 20
_ANSWERS = ("right", "exact", "probability", "nll", "kl")
"""Lists with a number for each question."""
_PREDICTIONS = ("nll", "kl", "same")
_FIGURES = ("tokens", "chance", "bits", "share", "seconds")
_LARGEST = 1e12


def check(file: Path, about: Mapping[str, Any]) -> None:
    """Raise KVLoomError if a file is no file of rows, or has rows of another run, as far as `about` says."""
    content = _content(file)
    # Nothing, or a header that was cut off, which `Rows` writes again.
    if b"\n" in content or content[: len(_BEGINNING)] != _BEGINNING[: len(content)]:
        theirs, _, _ = _parsed(file, content)
        _check_same(file, theirs, about, about)


def _content(file: Path) -> bytes:
    """The content of a file, nothing if there is none. Raises KVLoomError."""
    try:
        with file.open("rb") as source:
            content = source.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _unusable(file, error) from None
    if len(content) > _MOST_BYTES:
        raise _no_rows(file)
    return content


def _parsed(file: Path, content: bytes) -> tuple[dict[str, Any], dict[tuple[str, str], Row], int]:
    """Read what rows depend on, the rows by item and codec, and the bytes of a row that was cut off. KVLoomError."""
    whole = content.rfind(b"\n") + 1
    lines = BytesIO(content[:whole])
    try:
        theirs = dict(json.loads(lines.readline())["about"])
        rows = {_key(row): row for row in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _no_rows(file) from None
    return theirs, rows, len(content) - whole


def _key(row: Row) -> tuple[str, str]:
    """Item and codec. Raises ValueError, KeyError or TypeError for what is no row."""
    item, by = row["item"], row["by"]
    if not (isinstance(item, str) and isinstance(by, str)):
        raise TypeError(item, by)
    _number(item)
    if item.partition("/")[0] == TEXT:
        numbers = [row[name] for name in _PREDICTIONS]
    else:
        answers = [row[name] for name in _ANSWERS]
        if not all(isinstance(each, list) and len(each) == len(answers[0]) for each in answers):
            raise TypeError(item, by)
        right, exact, *rest = answers
        if not right or not {*right, *exact} <= {0, 1}:
            raise ValueError(item, by)
        numbers = [number for each in rest for number in each]
        if by in (EXACT, FULL) and not 0 <= row["chance"] <= 1:
            raise ValueError(item, by)
    figures = [row[name] for name in _FIGURES if name in row]
    if not all(_is_number(each) for each in numbers) or not all(_is_number(each) and each >= 0 for each in figures):
        raise ValueError(item, by)
    return item, by


def _is_number(value: object) -> bool:
    """A damaged codec, or a model that is, may give NaN."""
    return type(value) in (int, float) and not abs(value) > _LARGEST


def _number(item: str) -> int:
    return int(item.rpartition("/")[2])


def _no_rows(file: Path) -> KVLoomError:
    return KVLoomError(f"{file} is no file of rows; name another folder with --out")


def _unusable(file: Path, error: OSError) -> KVLoomError:
    return KVLoomError(f"{file}: {error.strerror}; name another folder with --out")


def _check_same(file: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if theirs.get(name) != ours.get(name):
            raise KVLoomError(
                f"{file} is of another run: {name} was {theirs.get(name)!r} and is {ours.get(name)!r}; name another "
                "folder with --out"
            )


class Rows:
    """The rows of one model and one set of items. Each is of an item, `needle/1024/3`, by a codec or executor."""

    def __init__(self, file: Path, about: Mapping[str, Any]) -> None:
        """about: what rows depend on besides their names. Raises KVLoomError if the file's is another, or if it is no
        file of rows."""
        self.file = file
        self._rows: dict[tuple[str, str], Row] = {}
        header = json.dumps({"about": about}) + "\n"
        content = _content(file)
        try:
            if header.encode().startswith(content):  # nothing, or a header that was cut off
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, header)
                return
        except OSError as error:
            raise _unusable(file, error) from None
        theirs, self._rows, cut_off = _parsed(file, content)
        _check_same(file, theirs, about, dict.fromkeys([*about, *theirs]))
        if cut_off:
            try:
                os.truncate(file, len(content) - cut_off)  # written anew, a full disk would take them all
            except OSError as error:
                raise _unusable(file, error) from None

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keep the rows of an item, in the file too."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._rows.update(((row["item"], row["by"]), row) for row in rows)

    def check(self, by: str, more: Mapping[str, Any]) -> None:
        """Raise KVLoomError unless all rows of a codec have these entries."""
        for name, value in more.items():
            if any(row.get(name) != value for (_, one), row in self._rows.items() if one == by):
                raise KVLoomError(f"{self.file} has rows of {by} with another {name}; name another folder with --out")

    def of(self, by: str, task: str) -> Iterator[tuple[str, Row]]:
        """Items and rows of a task, `needle/1024`, by a codec or executor, in the order of their numbers."""
        found = [
            (item, row) for (item, one), row in self._rows.items() if one == by and item.rpartition("/")[0] == task
        ]
        yield from sorted(found, key=lambda pair: _number(pair[0]))
