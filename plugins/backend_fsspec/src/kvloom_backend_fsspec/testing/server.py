"""Starts real servers: a free port, a directory, and processes that end with this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

START_SECONDS = 60.0
ACCESS_KEY, SECRET_KEY = "KVLOOMTESTKEY", "kvloom-test-secret"
"""Credentials of S3 servers."""
_PR_SET_PDEATHSIG = 1
_LAST_WORDS = 1000
S = TypeVar("S", bound="Server")


def free_port() -> int:
    """A free TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def need(program: str, package: str) -> str:
    """The path of `program`. Raises RuntimeError that names the package to install."""
    if path := shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent)):
        return path
    raise RuntimeError(f"{program} is not installed; install it with: {package}")


def wait_until(ready: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Return once `ready`. Raises RuntimeError after `seconds`."""
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} is not ready after {seconds:.0f} s")
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Return whether something accepts connections at `port` of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def answers(url: str) -> bool:
    """Return whether a server speaks HTTP there, whatever it answers."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    return True


def s3_client(endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
    """A client of boto3, to look at a store round the backend."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
    )  # fmt: skip


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """One or several processes in a temporary directory; `main` is the one that clients talk to."""

    main = ""

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="kvloom-server-"))
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start everything and return when it answers."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL to the one that clients talk to."""
        self._end(self.main)

    def freeze(self) -> None:
        """SIGSTOP: connections are still accepted, by the kernel, and nothing is answered."""
        self._running[self.main].send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._running[self.main].send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Restart a killed server, with the same port and data."""
        raise NotImplementedError

    def run(self, *command: str, environment: Mapping[str, str] | None = None, seconds: float = START_SECONDS) -> str:
        """The output of a command. Raises RuntimeError with its last words if it fails."""
        told = subprocess.run(
            command, capture_output=True, timeout=seconds, text=True, env=self._environment(environment)
        )
        if told.returncode:
            raise RuntimeError(f"{' '.join(command[:3])} failed: {told.stderr.strip()[-500:]}")
        return told.stdout

    def spawn(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a process of this server; its output goes to `<name>.out` in its directory."""
        out: IO[bytes]
        with open(self.directory / f"{name}.out", "ab") as out:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=_die_with_parent, env=self._environment(environment),
            )  # fmt: skip

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, **(more or {})}

    def _end(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self: S) -> S:
        try:
            self.start()
        except BaseException as error:
            said = {path.name: path.read_text(errors="replace")[-_LAST_WORDS:] for path in self.directory.glob("*.out")}
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(f"{error}; its last words: {said}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything and remove the directory."""
        for name in list(self._running)[::-1]:
            self._end(name)
        shutil.rmtree(self.directory, ignore_errors=True)
