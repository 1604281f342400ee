"""Real masters and peers for tests, benches and examples, on free ports and in a directory of their own.

Each is a context manager. Its processes end with it, and with the process that started it (on Linux the kernel kills
them).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_PEER = """
import sys, time
from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.config import MooncakeConfig
backend = MooncakeBackend(MooncakeConfig.model_validate_json(sys.argv[1]))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def free_port() -> int:
    """A free TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Server:
    """One process in a group of its own."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvloom-mooncake-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return when it answers. Raises RuntimeError if it does not."""
        raise NotImplementedError

    @property
    def said(self) -> str:
        """The server's output."""
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / "out").read_text(errors="replace")
        return ""

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections are still accepted, by the kernel, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill the server and start it again on the same port, empty."""
        self.kill()
        self.start()

    def _spawn(self, command: Sequence[str]) -> None:
        with open(self.directory / "out", "wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=self.directory,
                preexec_fn=_die_with_parent,
            )  # fmt: skip

    def _await(self, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + START_SECONDS
        while not ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{type(self).__name__} did not start: {self.said[-500:]}")
            time.sleep(0.02)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill it and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class MooncakeMaster(_Server):
    """`mooncake_master`. lease: milliseconds for which a blob is protected after a lookup; options: more of its flags.

    host: the address to listen on.
    """

    def __init__(self, *, lease: int = 10_000, host: str = "127.0.0.1", options: Sequence[str] = ()) -> None:
        super().__init__()
        self.host, self.port = host, free_port()
        self._options = [f"--default_kv_lease_ttl={lease}", *options]

    @property
    def address(self) -> str:
        """`host:port`, as the setting `master` wants it."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        program = shutil.which("mooncake_master") or shutil.which("mooncake_master", path=Path(sys.executable).parent)
        if program is None:
            raise RuntimeError("mooncake_master is not installed; pip install mooncake-transfer-engine-non-cuda")
        ports = [f"--rpc_address={self.host}", f"--rpc_port={self.port}"]
        self._spawn([program, *ports, f"--metrics_host={self.host}", f"--metrics_port={free_port()}", *self._options])
        self._await(self._listens)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
            return True
        return False


class MooncakePeer(_Server):
    """A process that contributes a segment of `segment` bytes, and does nothing else."""

    def __init__(self, master: str, *, segment: int = 256 << 20, local_host: str = "127.0.0.1") -> None:
        super().__init__()
        self._settings = {"master": master, "segment": segment, "local_host": local_host, "buffer": 1 << 20}

    def start(self) -> None:
        self._spawn([sys.executable, "-P", "-c", _PEER, json.dumps(self._settings)])
        self._await(lambda: "ready" in self.said)
