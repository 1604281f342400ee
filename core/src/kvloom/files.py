"""Files of users: replaced as a whole, and places that are tried before the work whose result goes there."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_STREAMS = (1, 2)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write all of `content` to a file, text as UTF-8. A file that was there is kept if that fails.

    The file keeps its mode and, where that is allowed, its owner. A link stays, and its target is replaced. Pipes,
    devices, and files that are standard output or error are written to. Raises OSError, which names `path`.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        old = _opened(path)
        if old is not None and not _is_replaceable(old):
            with open(old, "ab") as file:
                file.write(data)
            return
        _replace(Path(os.path.realpath(path)), data, old)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_folder(path: Path) -> None:
    """Write a file in a folder, which is made if need be, and remove what was made. Raises OSError."""
    missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        draft = path / _draft_name()
        try:
            draft.write_bytes(b"kvloom")
        finally:
            draft.unlink(missing_ok=True)
    finally:
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()


def _opened(path: Path) -> int | None:
    """A file that is there, open to be written to: one that is not allowed to be is not replaced either."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _is_replaceable(file: int) -> bool:
    """Return whether a file is a regular one that this process does not print to."""
    status = os.fstat(file)
    for stream in _STREAMS:
        with contextlib.suppress(OSError):  # a stream that is closed
            if os.path.samestat(status, os.fstat(stream)):
                return False
    return stat.S_ISREG(status.st_mode)


def _replace(path: Path, data: bytes, old: int | None) -> None:
    """Write a draft beside `path`, and put it into its place. old: the open file that is replaced; it is closed."""
    draft = path.with_name(_draft_name())
    try:
        with open(draft, "xb") as file:
            if old is not None:
                status = os.fstat(old)
                with contextlib.suppress(OSError):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        if old is not None:
            os.close(old)


def _draft_name() -> str:
    return f".{os.urandom(8).hex()}.partial"
