"""FsspecBackend: one object per blob, in any store that obstore or fsspec has a URL for."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

from kvloom import BackendError, Buffer, Buffers, Entry, KVSpec, Sink, StorageBackend, WriteDone, join
from kvloom_backend_fsspec.config import OBSTORE_SCHEMES
from kvloom_backend_fsspec.config import Config as FsspecConfig
from kvloom_backend_fsspec.daemon_threads import DaemonThreads
from kvloom_backend_fsspec.lease import Leases
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.stores.base import Listed, ObjectStore

logger = logging.getLogger("kvloom.backend_fsspec")

T = TypeVar("T")
_DELETE_AT_ONCE = 1000
_ABANDONED_SECONDS = 86400.0
"""Age at which a draft counts as abandoned, with room for clocks that differ."""
_STILL_SECONDS = 600.0
"""Time without a change after which one does too, by this process's clock."""
_MOST_DRAFTS = 10_000


class FsspecBackend(StorageBackend):
    """Keeps every blob as an object below the URL. Opening it gives the class that claims what the store can do."""

    type: ClassVar[str] = "fsspec"
    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    one_by_one: ClassVar[bool] = True
    threads: ClassVar[int] = 8
    Config: ClassVar[Any] = FsspecConfig

    def __new__(cls, config: FsspecConfig, spec: KVSpec | None = None) -> FsspecBackend:
        return super().__new__(_class_for(config) if cls is FsspecBackend else cls)

    def __init__(self, config: FsspecConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        place = config.place
        # A local path is from the root of the file system, as a name in a bucket is from the bucket's.
        self._names = Names(place.prefix)
        self._settings = config
        self._clients: dict[int, ObjectStore] = {}
        self._pools: dict[int, Executor] = {}
        self._closed = False
        self._drafts: dict[str, tuple[Listed, float]] = {}
        """Drafts as they were listed last, and the time since when they have not changed."""
        self._store()  # settings that cannot work are said at start; nothing is asked of the store yet

    def _store(self) -> ObjectStore:
        """This process's client: one from before a fork is the parent's. Raises BackendError once this is closed."""
        pid = os.getpid()
        client = self._clients.get(pid)
        if client is None:
            self._check_open()
            client = self._clients.setdefault(pid, _open_store(self._settings))
        return client

    def _check_open(self) -> None:
        """Raise BackendError for a call that is late: it would open connections and threads that nothing closes."""
        if self._closed:
            raise BackendError("closed")

    def identity(self) -> str | None:
        place, options = self._settings.place, self._settings.options
        kind = "sftp" if self._settings.by_sftp else OBSTORE_SCHEMES.get(place.scheme, place.scheme)
        endpoint = next((str(options[name]) for name in options if "endpoint" in name or name == "base_url"), "")
        if kind in ("file", "local"):
            return f"file:{os.path.realpath('/' + place.prefix)}"
        return f"{kind}:{endpoint.rstrip('/')}:{options.get('account_name', '')}:{place.host}:{place.prefix}"

    def check_writable(self) -> None:
        name = self._names.probe()
        try:
            self._store().put(name, b"kvloom")
            self._store().delete([name])
            next(iter(self._store().list(self._names.right("none"))), None)
        except BackendError as error:
            raise ValueError(f"url: cannot write: {error}, or set `write: never` to only read it") from error

    def put(self, key: str, blob: Buffers) -> None:
        self._store().put(self._names.blob(key), join(blob))

    def get(self, key: str) -> Buffer | None:
        return self._store().get(self._names.blob(key))

    def get_into(self, key: str, sink: Sink) -> bool:
        return self._store().read(self._names.blob(key), sink)

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        name = self._names.blob(key)
        if not len(into):
            size = self._store().size(name)
            return size is not None and size >= offset
        return self._store().read_range(name, offset, into)

    def contains(self, key: str) -> bool:
        return self._store().size(self._names.blob(key)) is not None

    def delete(self, key: str) -> None:
        self._store().delete([self._names.blob(key)])

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Also removes what processes have left behind that died while they put something."""
        for found in self._store().list(self._names.directory(prefix)):
            key = self._names.key(found.name)
            if key is not None and key.startswith(prefix):
                yield Entry(key, max(1, found.bytes), found.modified)
            elif self._names.is_unfinished(found.name) and self._is_abandoned(found):
                with contextlib.suppress(BackendError, FileNotFoundError):  # who may only read leaves it to others
                    self._store().delete([found.name])

    def _is_abandoned(self, draft: Listed) -> bool:
        """Return whether nobody writes to a draft any more."""
        now = time.monotonic()
        seen, since = self._drafts.get(draft.name, (None, now))
        if seen != draft:
            if len(self._drafts) >= _MOST_DRAFTS:
                self._drafts.clear()
            self._drafts[draft.name] = draft, now
            since = now
        still = now - since >= _STILL_SECONDS
        if still:
            self._drafts.pop(draft.name, None)
        return still or 0 < draft.modified < time.time() - _ABANDONED_SECONDS

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        """Several at once; those of one key one after the other."""
        store, pool = self._store(), self._pool()
        pending: dict[Future[None], tuple[int, str]] = {}
        ended: SimpleQueue[Future[None]] = SimpleQueue()  # `wait` does not see what `close` has cancelled

        def settle(tell: WriteDone) -> None:
            future = ended.get()
            number, _ = pending.pop(future)
            error = BackendError("closed") if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            tell(number, error)

        try:
            for number, (key, blob) in enumerate(requests):
                name = self._names.blob(key)
                while len(pending) >= self._settings.threads or any(name == other for _, other in pending.values()):
                    settle(done)
                try:
                    data = join(blob)
                except Exception as error:
                    done(number, error)
                    continue
                future = pool.submit(store.put, name, data)
                pending[future] = number, name
                future.add_done_callback(ended.put)
            while pending:
                settle(done)
        finally:
            while pending:
                settle(lambda number, error: None)

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        return self._each(self.get, keys)

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return self._each(self.contains, keys)

    def delete_many(self, keys: Sequence[str]) -> None:
        names = [self._names.blob(key) for key in dict.fromkeys(keys)]
        for start in range(0, len(names), _DELETE_AT_ONCE):
            self._store().delete(names[start : start + _DELETE_AT_ONCE])

    def _each(self, ask: Callable[[str], T], keys: Sequence[str]) -> list[T]:
        if len(keys) < 2:
            return [ask(key) for key in keys]
        return list(self._pool().map(ask, keys))

    def _pool(self) -> Executor:
        pid = os.getpid()
        pool = self._pools.get(pid)
        if pool is None:
            self._check_open()
            # Only local files have no timeouts; clients in compiled code must not outlive the interpreter.
            kind = DaemonThreads if self._settings.place.scheme in ("file", "local") else ThreadPoolExecutor
            made = kind(self._settings.threads, "kvloom-fsspec")
            pool = self._pools.setdefault(pid, made)
        return pool

    def close(self) -> None:
        self._closed = True
        pid = os.getpid()
        pool, client = self._pools.pop(pid, None), self._clients.pop(pid, None)
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        if client is not None:
            client.close()


class ExclusiveFsspecBackend(FsspecBackend):
    """A store in which only one writer can create an object: it has `create`, and rights by leases."""

    def __init__(self, config: FsspecConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._exclusive: bool | None = None
        self._leases = Leases(self._names, self._store)

    def create(self, key: str, blob: Buffers) -> bool:
        """Raises NotImplementedError where the server takes no notice of conditions, which is tried once."""
        name, data = self._names.blob(key), join(blob)
        if not self._is_exclusive():
            raise NotImplementedError(f"{self._settings.place.host} overwrote an object in an exclusive create")
        return self._store().create(name, data)

    def hold(self, name: str) -> bool:
        if not self._is_exclusive():
            return True
        return self._leases.take(name)

    def _is_exclusive(self) -> bool:
        """Some servers answer a conditional put as if there were no condition."""
        if self._exclusive is None:
            name = self._names.probe()
            try:
                self._exclusive = self._store().create(name, b"1") and not self._store().create(name, b"2")
            except NotImplementedError:
                self._exclusive = False
            finally:
                self._store().delete([name])
            if not self._exclusive:
                logger.warning(
                    "%s://%s ignores conditions (If-None-Match): there is no exclusive create, and every "
                    "process acts as the only one",
                    self._settings.place.scheme,
                    self._settings.place.host,
                )
        return self._exclusive

    def close(self) -> None:
        self._leases.release()
        super().close()


class ProcessFsspecBackend(FsspecBackend):
    """`memory://`: private to the process, and gone with it."""

    persistent: ClassVar[bool] = False
    shared: ClassVar[bool] = False


def _class_for(config: FsspecConfig) -> type[FsspecBackend]:
    if config.place.scheme == "memory":
        return ProcessFsspecBackend
    return ExclusiveFsspecBackend if config.by_obstore or config.by_sftp else FsspecBackend


def _open_store(config: FsspecConfig) -> ObjectStore:
    """Make a client of this process. Raises ValueError or ImportError with the remedy if the settings cannot work."""
    config.check_files()
    if config.place.scheme in ("file", "local"):
        from kvloom_backend_fsspec.stores import local_files

        return (local_files.LocalObstoreStore if config.by_obstore else local_files.LocalFsspecStore)(config)
    if config.by_obstore:
        from kvloom_backend_fsspec.stores.obstore_store import ObstoreStore

        return ObstoreStore(config)
    if config.by_sftp:
        from kvloom_backend_fsspec.stores.sftp_store import SftpStore

        return SftpStore(config)
    from kvloom_backend_fsspec.stores.fsspec_store import FsspecStore

    return FsspecStore(config)
