"""Objects by fsspec's own implementations: whatever obstore does not serve."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from kvloom import BackendError, CorruptBlobError, Sink
from kvloom_backend_fsspec.config import Config
from kvloom_backend_fsspec.errors import explained, says_no_bucket
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.stores.base import Directories, Listed
from kvloom_backend_fsspec.stores.fsspec_open import close_fs, open_fs
from kvloom_backend_fsspec.unread import Unread, is_refused

_WHOLE_AT_ONCE = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2", "hf"}
"""Schemes whose put is a single request or assignment, so that readers see all of it or nothing. Elsewhere a draft is
renamed."""

_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_TAGS = ("ETag", "etag", "e_tag")
_NO_DIRECTORY = ("ResourceConflict", "ResourceNotFound")  # what webdav4 says of a directory that is not there
_LOST = (
    "ReadError", "WriteError", "CloseError", "RemoteProtocolError", "ServerDisconnectedError",
    "ConnectTimeout", "ConnectionTimeoutError",
)  # fmt: skip
"""Errors of httpx and aiohttp on a connection that was made, of which httpx's pool may close one that it has just lent;
and on one that a busy server, whose queue of connections is full, did not take in time."""
_MEMORY, _NO_TURN = threading.Lock(), contextlib.nullcontext()
_MOST_BYTES = 1 << 30
"""Maximum size of a file for a read without a given limit."""
_READS = 8
"""Maximum number of reads of a file that is replaced each time."""
_PAUSE_SECONDS = 0.1
_LISTING_PAUSE_SECONDS = 0.05
_LISTINGS = 100
"""Maximum number of listings of a directory that changes each time. WsgiDAV answers 500 if a file
vanishes meanwhile."""
T = TypeVar("T")


class FsspecStore:
    """One file system of fsspec, for all threads of the process that made it."""

    def __init__(self, config: Config) -> None:
        self._place = place = config.place
        self._drafts = Names(place.prefix)
        try:
            self._fs, self._root = open_fs(place, config)
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
        # fsspec's memory looks a file up twice while it lists.
        self._turn: contextlib.AbstractContextManager[Any] = _MEMORY if place.scheme == "memory" else _NO_TURN

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if self._whole:
            self._ask(lambda: self._fs.pipe_file(path, data))
            return
        draft = self._path(self._drafts.draft())
        try:
            try:
                self._publish(data, draft, path)
            except Exception as error:
                if not self._is_shut_out(draft, error):
                    raise
                self._drafts.draft_elsewhere()
                self._publish(data, self._path(self._drafts.draft()), path)
        except BackendError as error:
            if what := self._in_the_way(name):
                raise CorruptBlobError(what) from error
            raise

    def _in_the_way(self, name: str) -> str:
        """The reason why a blob cannot be at its place, which does not concern others; empty if that is not known."""
        while len(name := name.rpartition("/")[0]) > len(self._place.prefix):
            with contextlib.suppress(Exception):  # it is not there, or the server has failed
                if not _is_directory(self._fs.info(self._path(name))):
                    return f"a file lies in the place of a directory: {name}"
        return ""

    def _is_shut_out(self, draft: str, error: Exception) -> bool:
        """Return whether `error` was caused by something in the place of the directory of drafts."""
        if not (_is_not_found(error) or isinstance(error.__cause__, FileExistsError | NotADirectoryError)):
            return False
        try:
            found = self._ask(lambda: self._fs.info(draft.rpartition("/")[0]))
        except Exception:  # a link that leads nowhere
            return isinstance(error.__cause__, FileExistsError)
        return not _is_directory(found)

    def _publish(self, data: bytes, draft: str, path: str) -> None:
        try:
            self._in_its_directory(draft, lambda: self._fs.pipe_file(draft, data))
            try:
                self._in_its_directory(path, lambda: _rename(self._fs, draft, path))
            except Exception as error:  # the answer to a rename may have been lost, and the draft is gone
                if not _is_not_found(error) or self.size(path) != len(data):
                    raise
        except BaseException:
            with contextlib.suppress(Exception):
                self._ask(lambda: self._fs.rm_file(draft))
            raise

    def _in_its_directory(self, path: str, act: Callable[[], None]) -> None:
        """Act inside a directory: it is made at first use, and again if it was removed."""
        directory = path.rpartition("/")[0]
        if directory not in self._directories:
            self._make(directory)
        try:
            self._ask(act)
        except Exception as error:
            self._directories.discard(directory)
            if not _is_not_found(error):
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

    def get(self, name: str, most: int = _MOST_BYTES) -> bytes | None:
        try:
            return self._ask(lambda: _cat(self._fs, self._path(name), most=most))
        except FileNotFoundError:
            return None

    def read(self, name: str, sink: Sink) -> bool:
        most = getattr(sink, "max_bytes", None)
        if most is not None:  # these clients read a file before they say how long it is
            size = self.size(name)
            if size is None:
                return False
            if size > most:
                sink.reserve(size)  # which refuses it
        data = self.get(name, _MOST_BYTES if most is None else most)
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
            found = self._ask(lambda: self._fs.info(self._path(name)))
        except FileNotFoundError:
            return None
        return None if _is_directory(found) else int(found["size"] or 0)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._ask(partial(self._fs.rm_file, self._path(name)))

    def list(self, directory: str) -> Iterator[Listed]:
        """Directory by directory: one that vanishes meanwhile is passed over."""
        unread, start = Unread(self._drafts), self._path(directory)
        directories = Directories(start, unread, name=self._name)
        for inside in directories:
            try:
                entries = self._entries(inside)
            except BackendError as error:
                if inside == start or not is_refused(error.__cause__ or error):
                    raise
                unread.note(self._name(inside), error)
                continue
            for found in entries:
                path = str(found["name"])
                if not _is_directory(found):
                    yield Listed(self._name(path), int(found["size"] or 0), _modified(found), _tag(found))
                elif self._drafts.is_worth_a_look(self._name(path)):
                    directories.add(path)
        unread.end()

    def _entries(self, path: str) -> Sequence[dict[str, Any]]:
        try:
            found = self._ask(lambda: self._fs.ls(path or "/", detail=True), is_listing=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some implementations list a directory as its own entry.
        return [one for one in found if self._name(str(one["name"])) != self._name(path)]

    def close(self) -> None:
        close_fs(self._fs)

    def _path(self, name: str) -> str:
        return f"{self._root}{name}"

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root.strip("/")) if not self._root.startswith("/") else path.strip("/")

    def _ask(self, call: Callable[[], T], *, is_listing: bool = False) -> T:
        """One request, again if the server failed or the connection was lost. Errors become those of `ObjectStore`."""
        until = time.monotonic() + self._timeout
        attempts = _LISTINGS if is_listing else self._retries + 1
        for attempt in range(attempts):
            try:
                with self._turn:
                    return call()
            except Exception as error:
                if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not says_no_bucket(str(error)):
                    raise
                pause = _LISTING_PAUSE_SECONDS if is_listing else _PAUSE_SECONDS * 2**attempt
                may_pass = _is_a_servers(error) or _is_a_lost_connections(error)
                if not may_pass or attempt == attempts - 1 or time.monotonic() + pause > until:
                    raise BackendError(explained(error, self._place)) from error
                time.sleep(pause)
        raise AssertionError("not reached")


def _is_a_servers(error: BaseException) -> bool:
    """Return whether the error is a failure of a server that was reached (5xx)."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status_code", 0)
    return isinstance(status, int) and status >= 500 and status != 507


def _is_a_lost_connections(error: BaseException) -> bool:
    lost = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, EOFError)
    return isinstance(error, lost) or any(kind.__name__ in _LOST for kind in type(error).__mro__)


def _is_not_found(error: BaseException) -> bool:
    cause = error.__cause__ or error
    return isinstance(cause, FileNotFoundError) or type(cause).__name__ in _NO_DIRECTORY


def _cat(
    fs: Any, path: str, start: int | None = None, end: int | None = None, *, most: int = _MOST_BYTES
) -> bytes:  # fmt: skip
    """A file, or a range of it, by one request. Raises FileNotFoundError.

    most: how many bytes of a file are taken from a server, where its client can be told.
    """
    if "webdav" not in _protocols(fs):
        return bytes(fs.cat_file(path, start=start, end=end))
    # webdav4's own reading asks for the file's properties first: it may be another file by then, or gone. So may it be
    # within a server: some say the length of one file and send another, so it is asked afterwards what there is.
    url = fs.client.join_url(path)
    ranged = start is not None and end is not None
    wanted = {"Range": f"bytes={start}-{end - 1}"} if ranged else {}  # type: ignore[operator]
    for _ in range(_READS):
        with fs.client.http.stream("GET", url, headers=wanted) as answer:
            if answer.status_code == 404:
                raise FileNotFoundError(path)
            if answer.is_redirect and _is_directory(fs.info(path)):
                raise FileNotFoundError(path)
            if answer.status_code != 200 and not (ranged and answer.status_code == 206):
                answer.raise_for_status()
                raise BackendError(f"unexpected status: {answer.status_code}")
            whole = _received(answer, most)
        now = fs.info(path)
        if _is_directory(now):  # of which some servers send a page for browsers
            raise FileNotFoundError(path)
        if _is_about(answer, len(whole), now):
            return whole[start:end] if ranged and answer.status_code == 200 else whole
    raise BackendError(f"{path}: replaced during every read")


def _is_directory(found: dict[str, Any]) -> bool:
    return bool(found["type"] == "directory")


def _received(answer: Any, most: int) -> bytes:
    content = bytearray()
    for piece in answer.iter_raw():
        content += piece
        if len(content) > most:
            raise BackendError(f"the server sends more than {most} bytes")
    return bytes(content)


def _is_about(answer: Any, length: int, now: dict[str, Any]) -> bool:
    """Return whether the bytes read are from the file that is there now, as far as the server says."""
    read, there = (str(tag or "").removeprefix("W/").strip('"') for tag in (answer.headers.get("ETag"), _tag(now)))
    return (read == there or not (read and there)) and (answer.status_code == 206 or length == now["size"])


def _rename(fs: Any, draft: str, path: str) -> None:
    """Rename over an existing file, in one step."""
    if "webdav" in _protocols(fs):
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
