"""Progress over blobs, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvloom import output


class ByteStep(Protocol):
    def __call__(self, num_bytes: int) -> None: ...


@contextmanager
def byte_progress(what: str, total_bytes: int | None = None) -> Iterator[ByteStep]:
    """A bar on a terminal, of bytes done and bytes and blobs per second; nothing elsewhere. Call it once per blob."""
    if not output.watched():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True, markup=False, highlight=False), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes, done="")
        blobs = 0

        def step(num_bytes: int) -> None:
            nonlocal blobs
            blobs += 1
            at = bar.tasks[0]
            nbytes, seconds = int(at.completed) + num_bytes, max(at.elapsed or 0.0, 1e-3)
            rates = f"{output.rate(nbytes / seconds)}, {blobs / seconds:,.0f} blobs/s"
            bar.update(task, advance=num_bytes, done=f"{output.size(nbytes)}, {rates}")

        yield step
