"""Results of items, in a file of JSON lines to which a run adds, so that an interrupted one goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvloom import KVLoomError

Row = Mapping[str, Any]


_MOST_HEADER_BYTES = 1 << 20


def check(file: Path, about: Mapping[str, Any]) -> None:
    """Raise KVLoomError if a file has rows of another run, as far as `about` says; all else is left to `Rows`."""
    try:
        with file.open("rb") as lines:
            theirs = dict(json.loads(lines.readline(_MOST_HEADER_BYTES))["about"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    _check_same(file, theirs, about, about)


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
        try:
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            if header.startswith(text):  # nothing, or a header that was cut off
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(header, encoding="utf-8")
                return
            lines = text.split("\n")
            theirs = dict(json.loads(lines[0])["about"])
            for line in lines[1:-1]:
                self._keep(json.loads(line))
        except OSError as error:
            raise KVLoomError(f"{file}: {error.strerror}; name another folder with --out") from None
        except (ValueError, KeyError, TypeError):
            raise KVLoomError(f"{file} is no file of rows; name another folder with --out") from None
        _check_same(file, theirs, about, dict.fromkeys([*about, *theirs]))
        if lines[-1]:  # a row that was cut off
            file.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keep the rows of an item, in the file too."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        for row in rows:
            self._keep(row)

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
        yield from sorted(found, key=lambda pair: int(pair[0].rpartition("/")[2]))

    def _keep(self, row: Row) -> None:
        self._rows[row["item"], row["by"]] = row
