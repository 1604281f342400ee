"""Where live views are: Unix sockets in a directory that is the user's own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

SUFFIX = ".sock"
_MOST_BYTES = 16 << 20
"""Of an answer: a snapshot has some 100 KiB."""
_LONGEST = 100
"""A Unix socket's path has 108 bytes at most, 104 on macOS."""


class UnixHTTPConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: Path, timeout: float = 5.0) -> None:
        super().__init__("kvloom", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def directory() -> Path:
    """Where sockets are by default. Made, for the user alone; raises OSError if it is somebody else's."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "kvloom" if runtime else Path(tempfile.gettempdir()) / f"kvloom-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{path} is not a directory of this user's alone; remove it, or set `path`")
    return path


def default_path(instance_id: str) -> Path:
    """A free name for this process's engine."""
    word = re.sub(r"[^A-Za-z0-9_.-]", "_", instance_id)[:40]
    for number in range(1, 1000):
        name = f"{word}-{os.getpid()}{'' if number == 1 else f'-{number}'}{SUFFIX}"
        path = directory() / name
        if not path.exists():
            return path
    raise OSError("too many engines in this process")


def bind(path: Path) -> socket.socket:
    """Listen at `path`, readable and writable by the user alone; what a dead engine left there is taken over.

    Raises OSError if it is in use, is something else, or is too long.
    """
    if len(os.fsencode(path)) > _LONGEST:
        raise OSError(f"{path}: too long for a socket ({_LONGEST} bytes at most); set a shorter `path`")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} is there, and no socket; set another `path`")
        if alive(path):
            raise OSError(f"{path} is another engine's; set another `path`")
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    listening.listen(16)
    return listening


def alive(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except PermissionError:
            return True
        except OSError:
            return False
    return True


def running() -> list[Path]:
    """The sockets of engines that run; those that dead ones left are removed."""
    try:
        found = sorted(directory().glob(f"*{SUFFIX}"))
    except OSError:
        return []
    here = []
    for path in found:
        if alive(path):
            here.append(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return here


def ask(path: Path, *, series: bool = False, timeout: float = 5.0) -> dict[str, Any]:
    """The snapshot of the engine behind a socket. Raises OSError, or ValueError if it is no engine's."""
    connection = UnixHTTPConnection(path, timeout)
    try:
        connection.request("GET", "/snapshot?series=1" if series else "/snapshot")
        answer = connection.getresponse()
        told = json.loads(answer.read(_MOST_BYTES)) if answer.status == 200 else None
    except http.client.HTTPException as error:
        raise ValueError(f"{path}: no engine of kvloom answers there") from error
    finally:
        connection.close()
    if not isinstance(told, dict) or "version" not in told:
        raise ValueError(f"{path}: no engine of kvloom answers there")
    return told
