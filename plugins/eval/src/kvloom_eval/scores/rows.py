"""Results of items, in a file of JSON lines to which a run adds, so that an interrupted one goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvloom import KVLoomError, replace_file

Row = Mapping[str, Any]

_BEGINNING = '{"about": '


def check(file: Path, about: Mapping[str, Any]) -> None:
    """Raise KVLoomError if a file is no file of rows, or has rows of another run, as far as `about` says."""
    text = _text(file)
    # Nothing, or a header that was cut off, which `Rows` writes again.
    if "\n" in text or text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
        theirs, _, _ = _parsed(file, text)
        _check_same(file, theirs, about, about)


def _text(file: Path) -> str:
    """The content of a file, "" if there is none. Raises KVLoomError."""
    try:
        return file.read_text(encoding="utf-8") if file.exists() else ""
    except OSError as error:
        raise _unusable(file, error) from None
    except UnicodeDecodeError:
        raise _no_rows(file) from None


def _parsed(file: Path, text: str) -> tuple[dict[str, Any], dict[tuple[str, str], Row], str]:
    """Read what rows depend on, the rows by item and codec, and a row that was cut off. Raises KVLoomError."""
    try:
        header, *lines, cut_off = text.split("\n")
        theirs = dict(json.loads(header)["about"])
        rows = {_key(row): row for row in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _no_rows(file) from None
    return theirs, rows, cut_off


def _key(row: Row) -> tuple[str, str]:
    """Item and codec. Raises ValueError, KeyError or TypeError for what is no row."""
    item, by = row["item"], row["by"]
    if not (isinstance(item, str) and isinstance(by, str)):
        raise TypeError(row)
    _number(item)
    return item, by


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
        text = _text(file)
        try:
            if header.startswith(text):  # nothing, or a header that was cut off
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, header)
                return
        except OSError as error:
            raise _unusable(file, error) from None
        theirs, self._rows, cut_off = _parsed(file, text)
        _check_same(file, theirs, about, dict.fromkeys([*about, *theirs]))
        if cut_off:
            try:
                os.truncate(file, len(text[: -len(cut_off)].encode()))  # written anew, a full disk would take them all
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
        self._rows.update((_key(row), row) for row in rows)

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
