"""Questions of why a prompt was a miss: each is checked, waits for its turn, and is answered by `kvloom why`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from ..http_messages import RequestError, Response
from ..http_server import Later
from .daemon_threads import DaemonThreads

_SECONDS = 60
"""For one answer."""
_MAX_WAITING = 8
"""Questions at a time, with the one that is being answered."""
_MAX_SALTS = 64
_MAX_SALT_BYTES = 4096

Answered = Callable[[int, dict[str, Any]], Response]


class Questions:
    """One process at a time looks into the tiers, however many ask."""

    def __init__(self, config: Path, spec: Path) -> None:
        self._config, self._spec = config, spec
        self._executor = DaemonThreads("kvloom-why")
        self._running: subprocess.Popen[str] | None = None
        self._closed = False

    def ask(self, body: bytes, answered: Answered) -> Later:
        """body: JSON. answered: makes the answer of a status and its content. Raises RequestError."""
        tokens, salts = parsed(body)
        return Later(self._executor, partial(self._looked, tokens, salts, answered), _MAX_WAITING)

    def close(self) -> None:
        """End the process that answers. It is not waited for."""
        self._closed = True
        if (running := self._running) is not None:
            running.kill()

    def _looked(self, tokens: list[int], salts: list[str], answered: Answered) -> Response:
        # In files without a name, which go with this process, and not in the command, which other users see.
        with tempfile.TemporaryFile("w") as prompt, tempfile.TemporaryFile("w") as others:
            for file, content in ((prompt, tokens), (others, salts)):
                json.dump(content, file)
                file.seek(0)
            command = [
                sys.executable, "-P", "-m", "kvloom", "why", str(self._config), "--tokens", _path(prompt),
                "--spec", str(self._spec), "--json", "--salts", _path(others),
            ]  # fmt: skip
            try:
                code, out, err = self._run(command, (prompt.fileno(), others.fileno()))
            except subprocess.TimeoutExpired:
                return answered(504, {"error": f"no answer within {_SECONDS} s"})
        if code:
            return answered(400, {"error": (err.strip().splitlines() or ["failed"])[-1]})
        return answered(200, json.loads(out))

    def _run(self, command: list[str], files: tuple[int, int]) -> tuple[int, str, str]:
        """Exit status, stdout and stderr. Raises TimeoutExpired. files: descriptors that the process inherits."""
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        with subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, text=True, pass_fds=files) as child:
            self._running = child
            if self._closed:  # while it was started
                child.kill()
            try:
                out, err = child.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
            finally:
                self._running = None
        return child.returncode, out, err


def _path(file: IO[str]) -> str:
    return f"/dev/fd/{file.fileno()}"


def parsed(body: bytes) -> tuple[list[int], list[str]]:
    """The tokens and salts of a question. Raises RequestError."""
    try:
        asked = json.loads(body)
        tokens, salts = asked["tokens"], asked.get("salts", [])
        if type(tokens) is not list or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(400, "tokens: a JSON list of token ids") from None
    if type(salts) is not list or not all(isinstance(salt, str) and "\0" not in salt for salt in salts):
        raise RequestError(400, "salts: a JSON list of strings")
    if len(salts) > _MAX_SALTS:
        raise RequestError(400, f"salts: {len(salts)}, and {_MAX_SALTS} at most are looked under")
    for salt in salts:
        try:
            num_bytes = len(salt.encode())
        except UnicodeEncodeError:
            raise RequestError(400, "salts: not valid UTF-8") from None
        if num_bytes > _MAX_SALT_BYTES:
            raise RequestError(400, f"salts: one of {num_bytes} bytes; {_MAX_SALT_BYTES} at most")
    return tokens, salts
