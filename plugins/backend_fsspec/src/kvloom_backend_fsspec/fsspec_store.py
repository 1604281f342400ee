"""Objects by fsspec's own implementations: whatever obstore does not serve."""

from __future__ import annotations

import contextlib
import importlib
import netrc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvloom import BackendError, Sink
from kvloom_backend_fsspec.config import Config, Place
from kvloom_backend_fsspec.errors import explained, says_no_bucket
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.store import Listed

_WHOLE_AT_ONCE = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2", "hf"}
"""Where a put is one request, or one assignment, that readers see whole or not at all. Elsewhere a draft is renamed."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "sftp": "sftp",
           "ssh": "sftp", "webdav": "webdav", "dav": "webdav"}  # fmt: skip
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_TAGS = ("ETag", "etag", "e_tag")
_NO_DIRECTORY = ("ResourceConflict", "ResourceNotFound")  # what webdav4 says of a directory that is not there
_MEMORY = threading.Lock()  # fsspec's memory looks a file up twice while it lists
_PAUSE_SECONDS = 0.1
T = TypeVar("T")
_SFTP = ("sftp", "ssh")
_WEBDAV = ("webdav", "dav")


class FsspecStore:
    """One file system of fsspec, for all threads of the process that made it."""

    def __init__(self, config: Config) -> None:
        self._place = place = config.place
        self._drafts = Names(place.prefix)
        try:
            self._fs, self._root = _open(place, config)
        except ImportError:
            raise
        except (ValueError, TypeError) as error:
            raise ValueError(str(error) if str(error).startswith("url:") else f"options: {error}") from error
        except Exception as error:
            raise ValueError(f"url: {explained(error, place)}") from error
        self._timeout, self._retries = config.timeout, config.retries
        self._making = threading.Lock()
        self._whole = place.scheme in _WHOLE_AT_ONCE
        self._directories: set[str] = set()
        self._turn = _MEMORY if place.scheme == "memory" else contextlib.nullcontext()

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if self._whole:
            self._ask(lambda: self._write(path, data))
        else:
            self._publish(data, self._path(self._drafts.draft()), path)

    def _publish(self, data: bytes, draft: str, path: str) -> None:
        try:
            self._in_its_directory(draft, lambda: self._write(draft, data))
            self._in_its_directory(path, lambda: _rename(self._fs, draft, path))
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(draft)
            raise

    def _write(self, path: str, data: bytes) -> None:
        with self._turn:
            self._fs.pipe_file(path, data)

    def _in_its_directory(self, path: str, act: Callable[[], None]) -> None:
        """Act where there is a directory: it is made when it is first met, and again if somebody removed it."""
        directory = path.rpartition("/")[0]
        if directory not in self._directories:
            self._make(directory)
        try:
            self._ask(act)
        except Exception as error:
            self._directories.discard(directory)
            if (
                not isinstance(error.__cause__ or error, FileNotFoundError)
                and type(error.__cause__).__name__ not in _NO_DIRECTORY
            ):
                raise
            self._make(directory)
            self._ask(act)

    def _make(self, directory: str) -> None:
        with self._making:  # some implementations ask whether it is there, and then make it
            if directory not in self._directories:
                self._ask(lambda: self._fs.makedirs(directory, exist_ok=True))
                self._directories.add(directory)

    def create(self, name: str, data: bytes) -> bool:
        raise NotImplementedError(f"{self._place.scheme}:// by fsspec has no exclusive create")

    def get(self, name: str) -> bytes | None:
        try:
            return self._ask(lambda: _cat(self._fs, self._path(name)))
        except FileNotFoundError:
            return None

    def read(self, name: str, sink: Sink) -> bool:
        data = self.get(name)
        if data is None:
            return False
        sink.reserve(len(data))[: len(data)] = data
        sink.filled(len(data))
        return True

    def read_range(self, name: str, offset: int, into: memoryview) -> bool:
        size = self.size(name)
        if size is None or size < offset + len(into):
            return False
        try:
            data = self._ask(lambda: _cat(self._fs, self._path(name), offset, offset + len(into)))
        except FileNotFoundError:
            return False
        if len(data) > len(into):
            raise BackendError(f"{self._place.scheme}://{self._place.host}: the server ignores ranges")
        if len(data) < len(into):
            return False
        into[:] = data
        return True

    def size(self, name: str) -> int | None:
        try:
            return int(self._ask(lambda: self._fs.info(self._path(name)))["size"])
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._ask(lambda name=name: self._remove(self._path(name)))

    def _remove(self, path: str) -> None:
        with self._turn:
            self._fs.rm_file(path)

    def list(self, directory: str) -> Iterator[Listed]:
        """Directory by directory: one that vanishes meanwhile is passed over."""
        pending = [self._path(directory)]
        while pending:
            for found in self._entries(pending.pop()):
                path = str(found["name"])
                if found["type"] == "directory":
                    pending.append(path)
                else:
                    yield Listed(self._name(path), int(found["size"] or 0), _modified(found), _tag(found))

    def _entries(self, path: str) -> list[dict[str, Any]]:
        def listed() -> list[dict[str, Any]]:
            with self._turn:
                return list(self._fs.ls(path or "/", detail=True))

        try:
            found = self._ask(listed)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some implementations list a directory as its own entry.
        return [one for one in found if self._name(str(one["name"])) != self._name(path)]

    def close(self) -> None:
        for give_back in (_close_sftp, _close_webdav, _close_session):
            with contextlib.suppress(Exception):
                give_back(self._fs)

    def _path(self, name: str) -> str:
        return f"{self._root}{name}"

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root.strip("/")) if not self._root.startswith("/") else path.strip("/")

    def _ask(self, call: Callable[[], T]) -> T:
        """One request, again if the server said that it had failed. Errors become those of `ObjectStore`."""
        until = time.monotonic() + self._timeout
        for attempt in range(self._retries + 1):
            try:
                return call()
            except Exception as error:
                if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not says_no_bucket(str(error)):
                    raise
                pause = _PAUSE_SECONDS * 2**attempt
                if not _is_a_servers(error) or attempt == self._retries or time.monotonic() + pause > until:
                    raise BackendError(explained(error, self._place)) from error
                time.sleep(pause)
        raise AssertionError("not reached")


def _is_a_servers(error: BaseException) -> bool:
    """Whether a server that was reached has failed (5xx)."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status_code", 0)
    return isinstance(status, int) and status >= 500 and status != 507


def _open(place: Place, config: Config) -> tuple[Any, str]:
    """The file system, and what comes before a name in its paths."""
    import fsspec
    from fsspec.registry import known_implementations, registry

    if place.scheme not in known_implementations and place.scheme not in registry:
        raise ValueError(
            f"url: nothing serves {place.scheme}://; `python -m fsspec` and its packages say what there is"
        )
    try:
        settings = {"skip_instance_cache": True, **_defaults(place, config), **config.options}
        if place.scheme in _WEBDAV:
            return fsspec.filesystem("webdav", **settings), ""
        if place.scheme in _SFTP:
            return _sftp(place, config, settings), "/"
        fs, path = fsspec.core.url_to_fs(config.url, **settings)
    except ImportError as error:
        extra = _EXTRAS.get(place.scheme)
        remedy = f"pip install 'kvloom-backend-fsspec[{extra}]'" if extra else str(error)
        raise ImportError(f"url: {place.scheme}:// needs another package: {remedy}") from error
    if hasattr(fs, "retries"):
        fs.retries = config.retries + 1
    return fs, path[: len(path) - len(place.prefix)] if place.prefix else f"{path.rstrip('/')}/"


def _sftp(place: Place, config: Config, settings: dict[str, Any]) -> Any:
    """By paramiko, also where a package has registered another implementation for the scheme."""
    from fsspec.implementations.sftp import SFTPFileSystem

    host = urlsplit(f"//{place.host}")
    if host.port is not None:
        settings["port"] = host.port
    if host.username is not None:
        settings["username"] = host.username
    fs = SFTPFileSystem(host.hostname, **settings)
    fs.ftp.get_channel().settimeout(config.timeout)
    return fs


def _defaults(place: Place, config: Config) -> dict[str, Any]:
    """What makes an implementation give up in time, and where it finds credentials, as far as is known."""
    if place.scheme in ("s3", "s3a"):
        return {
            "use_listings_cache": False,
            "config_kwargs": {
                "connect_timeout": config.connect_timeout,
                "read_timeout": config.timeout,
                "retries": {"max_attempts": config.retries + 1},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        }
    if place.scheme in _SFTP:
        waits = {"timeout": config.connect_timeout, "banner_timeout": config.timeout, "auth_timeout": config.timeout}
        return {"channel_timeout": config.timeout, **waits}
    if place.scheme in _WEBDAV:
        httpx = importlib.import_module("httpx")
        return {
            "base_url": f"{'http' if config.allow_http else 'https'}://{place.host}",
            "timeout": httpx.Timeout(config.timeout, connect=config.connect_timeout),
            "retry": False,
            "auth": _from_netrc(place.host),
        }
    return {"use_listings_cache": False}


def _from_netrc(host: str) -> tuple[str, str] | None:
    try:
        found = netrc.netrc().authenticators(host.rpartition("@")[2].partition(":")[0])
    except (OSError, netrc.NetrcParseError):
        return None
    return (found[0], found[2]) if found else None


def _cat(fs: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
    """A file, or a range of it, by one request. Raises FileNotFoundError."""
    if "webdav" not in _protocols(fs):
        return bytes(fs.cat_file(path, start=start, end=end))
    # webdav4's own reading asks for the file's properties first: it may be another file by then, or gone.
    ranged = {"Range": f"bytes={start}-{end - 1}"} if start is not None and end is not None else {}
    answer = fs.client.http.get(fs.client.join_url(path), headers=ranged)
    if answer.status_code == 404:
        raise FileNotFoundError(path)
    if ranged and answer.status_code == 200:
        return bytes(answer.content[start:end])
    if answer.status_code != (206 if ranged else 200):
        answer.raise_for_status()
        raise BackendError(f"an answer of another kind than was asked for: {answer.status_code}")
    return bytes(answer.content)


def _rename(fs: Any, draft: str, path: str) -> None:
    """Over what is there, in one step."""
    if hasattr(fs, "ftp") and hasattr(fs.ftp, "posix_rename"):
        fs.ftp.posix_rename(draft, path)
    elif "webdav" in _protocols(fs):
        fs.client.move(draft, path, overwrite=True)
    else:
        fs.mv(draft, path)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _modified(found: dict[str, Any]) -> float:
    when = next((found[name] for name in _TIMES if found.get(name)), 0.0)
    return when.timestamp() if isinstance(when, datetime) else float(when) if isinstance(when, (int, float)) else 0.0


def _tag(found: dict[str, Any]) -> str:
    return next((str(found[name]) for name in _TAGS if found.get(name)), "")


def _close_sftp(fs: Any) -> None:
    fs.ftp.close()
    fs.client.close()


def _close_webdav(fs: Any) -> None:
    fs.client.http.close()


def _close_session(fs: Any) -> None:
    fs.close_session(fs.loop, fs.s3)
