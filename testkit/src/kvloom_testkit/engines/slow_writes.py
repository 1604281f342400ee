"""Two processes on one store: one keeps the files that it writes empty for a while, and the other reads them then."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvloom_testkit.engines.process import Engine

_WAIT_SECONDS = 2.0
_MAX_MISSED = 4
"""Waits in vain, after which a process waits no more in this meeting: the other one does something else."""
_MAX_ANSWERS = 60
_WRITES = os.O_WRONLY | os.O_RDWR
_MAKES = os.O_CREAT | os.O_TRUNC


class Meeting:
    """Messages between two processes: how often each event has happened, as the size of a file.

    Events: `opened` a file to write it, `renaming` a file, `answered` a request, `done` with writing.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(exist_ok=True)
        self._missed = 0

    def tell(self, event: str) -> None:
        """Say that an event has happened."""
        with (self._folder / event).open("ab") as file:
            file.write(b".")

    def count(self, event: str) -> int:
        """The number of times that an event has happened."""
        with suppress(FileNotFoundError):
            return (self._folder / event).stat().st_size
        return 0

    def wait(self, happened: Callable[[], object]) -> None:
        """Wait until something is true, but not for ever."""
        until = time.monotonic() + _WAIT_SECONDS
        while self._missed < _MAX_MISSED and not happened():
            if time.monotonic() >= until:
                self._missed += 1
                return
            time.sleep(0.001)


class SlowFiles:
    """Acts between a process and the files of a store, as an audit hook. Files of native code are left alone.

    The writer opens a file, which makes it or empties it; the bytes come when the reader has answered two requests, of
    which the second began after that. Where both write, the reader renames its first file, which it has written,
    when the writer has opened one: if that is the same, it is empty then.
    """

    def __init__(self, store: str) -> None:
        self._prefix = os.path.join(store, "")
        self.writer: Meeting | None = None
        """The meeting in which this process writes."""
        self.reader: Meeting | None = None
        """The meeting in which this process reads, or reads and writes."""
        self.both = False

    def on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Wait if the event is one of a file in the store."""
        if event == "open" and self.writer is not None:
            path, _, flags = args
            makes = flags & _WRITES and flags & _MAKES and not flags & os.O_EXCL
            if makes and isinstance(path, str | bytes) and self._is_ours(path):
                self._open(os.fsdecode(path), flags, self.writer)
        elif event == "os.rename" and self.reader is not None and self._is_ours(args[1]):
            meeting = self.reader
            meeting.tell("renaming")
            meeting.wait(lambda: meeting.count("opened") or meeting.count("done"))

    def _is_ours(self, path: Any) -> bool:
        return os.fsdecode(path).startswith(self._prefix)

    def _open(self, path: str, flags: int, meeting: Meeting) -> None:
        if self.both and not meeting.count("opened"):
            meeting.wait(lambda: meeting.count("renaming") or meeting.count("answered"))
        with suppress(OSError):  # the open itself will say so
            if not os.path.exists(path):
                os.mknod(path, 0o666 | stat.S_IFREG)
            elif flags & os.O_TRUNC:
                os.truncate(path, 0)
        answered = meeting.count("answered")
        meeting.tell("opened")
        meeting.wait(lambda: meeting.count("answered") >= answered + 2)


class WritesSlowly:
    """The calls of an engine's driver for a meeting. Each names the store, the folder of the meeting, and a request.

    A request is the arguments of the driver's own `write_one`, which stores something, or `read_one`, which loads it.
    Both return a list of answers.
    """

    _slow: SlowFiles | None = None
    write_one: Callable[..., list[Any]]
    read_one: Callable[..., list[Any]]

    def write_slowly(self, store: str, meeting: str, request: dict[str, Any], both: bool) -> list[Any]:
        """Store something, and keep files empty for a while. both: where the other process writes, too."""
        slow, met = self._files_of(store), Meeting(meeting)
        slow.writer, slow.both = met, both
        try:
            return self.write_one(**request)
        finally:
            slow.writer = None
            met.tell("done")

    def read_meanwhile(self, store: str, meeting: str, request: dict[str, Any], both: bool) -> list[Any]:
        """Load something again and again until the writer is done.

        both: from the start; else when the writer has opened a file.
        """
        slow, met = self._files_of(store), Meeting(meeting)
        if both:
            slow.reader = met
        else:
            met.wait(lambda: met.count("opened") or met.count("done"))
        answers: list[Any] = []
        times = 0
        try:
            while times < _MAX_ANSWERS and not (times and met.count("done")):
                answers += self.read_one(**request)
                times += 1
                met.tell("answered")
        finally:
            slow.reader = None
        return answers

    def _files_of(self, store: str) -> SlowFiles:
        if self._slow is None:
            self._slow = SlowFiles(store)
            sys.addaudithook(self._slow.on_audit)
        return self._slow


def write_while_read(
    writer: Engine, reader: Engine, store: Path, number: int, *, write: dict[str, Any], read: dict[str, Any]
) -> list[Any]:
    """The answers of two engines, whose drivers are `WritesSlowly`, to a request each; number: of the meeting.

    In meetings with an odd number the reader writes, too. Raises EngineError.
    """
    about = {"store": str(store), "meeting": f"{store}.meeting-{number}", "both": bool(number % 2)}
    writing = writer.begin("write_slowly", request=write, **about)
    answers: list[Any] = reader.call("read_meanwhile", request=read, **about)
    return answers + writing()
