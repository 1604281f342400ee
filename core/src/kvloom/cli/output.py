"""Output of the verbs: tables, sizes, moments, and progress on a terminal."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

_ACTS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that move the cursor, change the direction, or cannot be printed."""
_CELL_CHARS = 300
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Progress(Protocol):
    def __call__(self) -> None: ...


def plain(text: str, *, most: int | None = None) -> str:
    """`text` with nothing in it that a terminal would act on: others may have written what a store says.

    most: characters to leave. Line ends stay.
    """
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    return "".join(
        character if character == "\n" or unicodedata.category(character) not in _ACTS else ascii(character)[1:-1]
        for character in text
    )


def say(text: str, *, stderr: bool = False) -> None:
    """Print a line, `plain`."""
    print(plain(text), file=sys.stderr if stderr else sys.stdout)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """right: the columns that hold numbers. As wide as the terminal; where there is none, a row is a line."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(plain(cell, most=_CELL_CHARS) for cell in row))
    screen = _console()
    if not screen.is_terminal:
        whole = Measurement.get(screen, screen.options.update(max_width=1 << 16), table)
        screen.width = max(screen.width, whole.maximum)
    screen.print(table)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Progress]:
    """A bar on a terminal, which goes away when done; nothing elsewhere. Call what it gives once per step."""
    if not watched():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def watched() -> bool:
    """Return whether stderr is a terminal, which shows progress bars."""
    return sys.stderr.isatty()


def _console(*, stderr: bool = False) -> Console:
    """The console for tables and progress. No markup: brackets in a path or a message are brackets."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False)


def rate(bytes_per_second: float) -> str:
    """`1.5GiB/s`"""
    return f"{size(round(bytes_per_second))}/s"


def seconds(value: float) -> str:
    """`12.5 ms`: in a unit that leaves few digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def size(num_bytes: int | None) -> str:
    """`20GiB`: in the largest unit that leaves a number of 1 or more."""
    if num_bytes is None:
        return "no limit"
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + _UNITS[unit]


def exact_size(num_bytes: int) -> str | int:
    """As YAML may have it: `20GiB` if that is exact, else the number of bytes."""
    text = size(num_bytes)
    units = _UNITS.index(text.lstrip("0123456789."))
    exact = float(text[: -len(_UNITS[units])]) * 1024**units == num_bytes and units
    return text if exact else int(num_bytes)  # of a ByteSize, which YAML cannot write


def moment(seconds: float | None) -> str:
    """A time since the epoch as local date and time; stores that keep none say 0, and others may say anything."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "seconds") if seconds else "-"
    except (OverflowError, ValueError, OSError):
        return "-"
