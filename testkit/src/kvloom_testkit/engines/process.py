"""An engine in a process of its own, from outside: every answer has a deadline, and nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvloom import ConfigError

_IMPORT_SECONDS = 180.0
_LAST_WORDS, _LAST_LINES = 600, 6
_LAST_BYTES = 16 << 10
_STACK_SECONDS = 5.0
"""Bound of the time that a process may take to say where it hangs; usually it is milliseconds."""
_ENDING_SECONDS = 5.0


class EngineError(Exception):
    """The engine did not do what it was asked to; the message says what happened."""


class RefusedError(EngineError):
    """The engine did not start."""


class RaisedError(EngineError):
    """The engine, or the connector in it, raised an exception; the process goes on."""


class EndedError(EngineError):
    """The process ended."""


class HangError(EngineError):
    """No answer within the time; the process was killed."""


class Host:
    """A process that has imported the engine, and forks one for each that is asked for.

    module: run with `-m`; it is told the path of a socket. environment: added to this process's own.
    """

    def __init__(self, module: str, *, environment: Mapping[str, str], seconds: float = _IMPORT_SECONDS) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvloom-check-"))
        self._listening = socket.socket(socket.AF_UNIX)
        self._count = 0
        self._orders: _Lines | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._listening.bind(str(self.folder / "socket"))
            self._listening.listen()
            with (self.folder / "host.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(self.folder / "socket")], stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, env={**os.environ, "TMPDIR": str(self.folder), **environment}, start_new_session=True,
                )  # fmt: skip
            self._orders = self._connection(time.monotonic() + seconds, self._process.poll)
            hello = self._orders.read(time.monotonic() + seconds)
        except BaseException as error:  # Ctrl-C, too: importing an engine takes a while
            self.close()
            if isinstance(error, EOFError | TimeoutError):
                raise RefusedError(f"the engine could not be imported: {self._last_words() or error}") from error
            if self._process is None and isinstance(error, OSError):
                raise ConfigError("TMPDIR", f"no socket can be made in {self.folder.parent}: {error}") from error
            raise
        if "error" in hello:
            self.close()
            raise RefusedError(f"the engine could not be imported: {hello['error']}")
        self.about: Mapping[str, Any] = hello["ok"]
        """`version`, of the engine."""

    def order(self, name: str, /, **arguments: Any) -> Any:
        """Have the host do something itself. Raises EngineError."""
        return self._ask({"order": name, "args": arguments})

    def _ask(self, order: Mapping[str, Any], seconds: float = _IMPORT_SECONDS) -> Any:
        """The host's answer to a line. Raises EngineError."""
        assert self._orders is not None
        try:
            self._orders.write(order)
            return self._orders.read(time.monotonic() + seconds)["ok"]
        except (EOFError, TimeoutError, BrokenPipeError) as error:
            raise EngineError(f"the process that engines are forked from is gone: {self._last_words()}") from error

    def fork(self, seconds: float) -> Engine:
        """A process for an engine. seconds: the deadline of each call. Raises EngineError."""
        self._count += 1
        log, stack = self.folder / f"{self._count}.log", self.folder / f"{self._count}.stack"
        process = self._ask({"id": str(self._count), "log": str(log), "stack": str(stack)})
        until = time.monotonic() + seconds
        try:
            lines = self._connection(until, lambda: None)
            lines.read(until)
        except (EOFError, TimeoutError) as error:
            _kill(process)
            raise EngineError("a forked process did not answer") from error
        return Engine(self, process, lines, log=log, stack=stack, seconds=seconds)

    def close(self) -> None:
        """End the process; its engines must have been closed."""
        if self._orders is not None:
            self._orders.close()
        self._listening.close()
        if self._process is not None:
            try:
                self._process.wait(_ENDING_SECONDS)  # it ends by itself, and removes what engines left in shared memory
            except subprocess.TimeoutExpired:
                _kill(self._process.pid)
                self._process.wait()
        self._words = _end_of(self.folder / "host.log")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _connection(self, until: float, ended: Any) -> _Lines:
        while True:
            self._listening.settimeout(0.2)
            try:
                return _Lines(self._listening.accept()[0])
            except TimeoutError:
                if ended() is not None:
                    raise EOFError("it ended") from None
                if time.monotonic() > until:
                    raise

    def _last_words(self) -> str:
        return getattr(self, "_words", "") or _end_of(self.folder / "host.log")


class Engine:
    """An engine's process. Made by `Host.fork`; its calls are the methods of the engine's driver."""

    def __init__(self, host: Host, process: int, lines: _Lines, *, log: Path, stack: Path, seconds: float) -> None:
        self._host, self.process, self._lines = host, process, lines
        self._log, self._stack, self._seconds = log, stack, seconds
        self.alive = True
        self._unread: Callable[[], Any] | None = None

    def start(self, **settings: Any) -> Any:
        """Start the engine. Raises RefusedError, EndedError or HangError."""
        try:
            return self.call("start", **settings)
        except RaisedError as error:
            self.kill()
            raise RefusedError(f"the engine refused to start: {error}") from error

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a method of the driver. Raises RaisedError, EndedError or HangError."""
        return self.begin(name, **arguments)()

    def begin(self, name: str, /, **arguments: Any) -> Callable[[], Any]:
        """Begin a call; the function that is returned waits for the answer. The next call waits for it, too."""
        if self._unread is not None:
            with contextlib.suppress(RaisedError):
                self._unread()
        if not self.alive:
            raise EndedError("the process has ended before")
        until = time.monotonic() + self._seconds
        with contextlib.suppress(ConnectionError):  # it has ended, and waiting says how
            self._lines.write({"call": name, "args": arguments})
        self._unread = lambda: self._answer(name, until)
        return self._unread

    def _answer(self, name: str, until: float) -> Any:
        self._unread = None
        try:
            answer = self._lines.read(until)
        except TimeoutError:
            where = self._where_it_hangs()
            self.kill()
            raise HangError(f"no answer to {name} after {self._seconds:g} s{where}") from None
        except (EOFError, ConnectionError):
            status = self._reap()
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            where = _innermost(self._stack) or f": {_end_of(self._log)}".removesuffix(": ")
            raise EndedError(f"the process ended {how} in {name}{where}") from None
        if "error" in answer:
            raise RaisedError(f"{name}: {answer['error']}{_origin(answer.get('where', ''))}")
        return answer["ok"]

    def close(self) -> None:
        """End the engine in order, or else kill it. Raises HangError or EndedError where it does not end well."""
        if self.alive:
            try:
                self.call("close")
                self._lines.close()
                self._end()
            finally:
                self.kill()

    def kill(self) -> None:
        """Kill the process and its children, whatever they do."""
        if self.alive:
            _kill(self.process)
            self._reap()

    def _end(self) -> None:
        """Wait until the process has ended; it has nothing more to do."""
        until = time.monotonic() + self._seconds
        while not _has_ended(self.process):
            if time.monotonic() > until:
                raise HangError(f"the process did not end {self._seconds:g} s after it was closed")
            time.sleep(0.01)
        status = self._reap()
        if status:
            raise EndedError(f"the process ended with status {status} after it was closed: {_end_of(self._log)}")

    def _reap(self) -> int:
        self.alive = False
        self._lines.close()
        with contextlib.suppress(EngineError):
            # It may have closed its connection and go on, and so may its children. Later its number may be another's.
            _kill(self.process)
            return int(self._host._ask({"wait": self.process}))
        return -signal.SIGKILL

    def _where_it_hangs(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGUSR1)
            until = time.monotonic() + _STACK_SECONDS
            while not _innermost(self._stack) and time.monotonic() < until:
                time.sleep(0.01)
        return _innermost(self._stack)


class _Lines:
    """JSON lines on a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    def write(self, message: Mapping[str, Any]) -> None:
        self._connection.settimeout(_IMPORT_SECONDS)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self, until: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError, or EOFError where the other side is gone."""
        while b"\n" not in self._rest:
            self._connection.settimeout(max(until - time.monotonic(), 0.001))
            data = self._connection.recv(1 << 16)
            if not data:
                raise EOFError("the other side is gone")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._connection.close()


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # before it had a group of its own
        os.kill(process, signal.SIGKILL)


def _has_ended(process: int) -> bool:
    """Return whether a process is gone, or waits to be reaped."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def _end_of(path: Path) -> str:
    """The last words that a process printed."""
    try:
        with path.open("rb") as file:
            file.seek(-min(_LAST_BYTES, path.stat().st_size), os.SEEK_END)
            lines = file.read(_LAST_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    kept = lines[-_LAST_LINES:]
    while len("\n".join(kept)) > _LAST_WORDS and len(kept) > 1:
        kept = kept[1:]
    return "\n".join(kept)[-_LAST_WORDS:]


def _origin(trace: str) -> str:
    """The innermost place of a traceback, as ` (at FILE:LINE in NAME)`."""
    places = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    return f" (at {_short(places[-1])})" if places else ""


def _innermost(path: Path) -> str:
    """The innermost places of the main thread in a dump of faulthandler, but for the kit's own."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    lines = text.rpartition("Current thread")[2].splitlines()[1:]
    current: Sequence[str] = [line for line in lines if "engines/hosting.py" not in line][:3]
    return "; it was at " + ", called by ".join(_short(line.strip()) for line in current) if current else ""


def _short(place: str) -> str:
    """`File "/a/b/c/d.py", line 3 in f` with the last two parts of the path."""
    before, quote, rest = place.partition('"')
    path, _, after = rest.partition('"')
    return "/".join(path.split("/")[-2:]) + after if quote else before
