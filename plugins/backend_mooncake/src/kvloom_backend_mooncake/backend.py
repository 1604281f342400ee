"""Mooncake Store as a storage backend.

A blob in Mooncake is never overwritten: its memory stays unchanged while a reader may use it. So a `put` first removes
the blob under its key. A blob that is leased to a reader cannot simply be removed; forcing it would give memory that
is being read to another blob. Such a blob is replaced by a placeholder first, which leaves the old memory alone for as
long as the master says (put_start_release_timeout_sec), and then the placeholder is removed.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from kvloom import BackendError, Buffer, Buffers, KVSpec, Sink, StorageBackend
from kvloom_backend_mooncake import codes
from kvloom_backend_mooncake.client import Client, check
from kvloom_backend_mooncake.codes import (
    ABSENT,
    EXISTS,
    ILLEGAL_CLIENT,
    IN_USE,
    LEASE_EXPIRED,
    NOT_READY,
    TRANSFER_FAILED,
)
from kvloom_backend_mooncake.config import MooncakeConfig
from kvloom_backend_mooncake.memories import Memories, Regions
from kvloom_backend_mooncake.turns import Turns

PLACEHOLDERS = (b"-" * 59, b"-" * 61)
"""Placeholders for a blob that is being removed. Two, because a placeholder that a reader has asked for is leased
itself, and only one of another length gets memory of its own. They are recognised by their lengths, which no blob
may have: where two clients replace one key at once, Mooncake may show a placeholder that was not written yet."""
_NO_BLOB = frozenset(map(len, PLACEHOLDERS))
_READ_ATTEMPTS = 4
"""A read may meet a longer blob each time, while others put and delete it. One whose lease ended has two."""
_WRITE_ATTEMPTS = 4
"""Another client may replace a blob while it is being written; then the master refuses its end."""
_AGAIN = frozenset({ILLEGAL_CLIENT, TRANSFER_FAILED})
"""Codes of a put that may be tried again. A transfer also fails under load; if a peer is gone, it takes `timeout`."""
_POLL_SECONDS = 0.002
_MEANWHILE = ABSENT | IN_USE | {EXISTS, ILLEGAL_CLIENT}
"""Codes of a replacement while another client removes or replaces the same blob."""


class MooncakeBackend(StorageBackend):
    """Keeps every blob as an object of Mooncake Store. Not to be used in a forked child; see `client`."""

    type: ClassVar[str] = "mooncake"
    persistent: ClassVar[bool] = False
    """A blob is in the memory of one process (or `replicas`), and goes with it."""
    shared: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    threads: ClassVar[int] = 8

    Config: ClassVar[Any] = MooncakeConfig

    def __init__(self, config: MooncakeConfig, spec: KVSpec | None = None) -> None:
        """Raises ValueError that names what is missing: the client or the master."""
        super().__init__(config, spec)
        self._settings = config
        self._memories = Memories(config.protocol)
        self._turns = Turns(2 * config.timeout)
        self._client = Client(config)

    def identity(self) -> str | None:
        return f"{self._settings.master}/{self._settings.tenant}"

    def check_writable(self) -> None:
        key = f"+kvloom-{uuid.uuid4().hex}"  # "+" is in no key
        try:
            self.put(key, [b"?"])
        except codes.NoRoomError as full:
            raise ValueError(
                "segment: no process contributes memory to this master; set `segment` here or in another process"
            ) from full
        except BackendError as failed:
            raise ValueError(f"master: nothing can be put: {failed}; correct it, or set `write: never`") from failed
        self.delete(key)

    def register(self, memory: memoryview) -> None:
        """Make the pool known to the client, so that blobs move from and to it without a copy."""
        with self._client.using() as store:
            self._memories.register(store, memory)

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Buffer | None:
        memory = _Memory()
        return memory.blob if self.get_into(key, memory) else None

    def get_into(self, key: str, sink: Sink) -> bool:
        """By one request, if the blob is as long as expected: it is asked for its size only if it is not."""
        expected = int(getattr(sink, "expected_bytes", 0))
        with self._client.using() as store:
            size = expected or self._size(store, key)
            whole = self._read_into(store, key, size, sink)
            if expected and whole != size:
                size = self._size(store, key)
                whole = self._read_into(store, key, size, sink)
        if size is None or whole != size:
            return False
        sink.filled(size)
        return True

    def _read_into(self, store: Any, key: str, size: int | None, sink: Sink) -> int | None:
        """As `_read`. size: None if there is no blob."""
        if size is None:
            return None
        view = memoryview(sink.reserve(size)).cast("B")[:size]
        with self._memories.target(store, view) as (start, length):
            return self._read(store, key, size, lambda: store.get_into(key, start, length))

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        with self._client.using() as store:
            size = self._size(store, key)
            if size is None or size < offset + len(into):
                return False
            if not len(into):
                return True
            with self._memories.target(store, into, known=True) as (start, length):
                got = self._read(store, key, size, lambda: _ranged(store, key, offset, start, length))
            return got == len(into)

    def _size(self, store: Any, key: str) -> int | None:
        """The size of the blob; None if there is none. Leases it to this reader."""
        size = int(store.get_size(key))
        return None if size in ABSENT | _NO_BLOB else check(f"asking for {key}", size)

    def _read(self, store: Any, key: str, size: int, read: Callable[[], int]) -> int | None:
        """The number of bytes that `read` returned; None if the blob of `size` bytes is gone or replaced."""
        until = time.monotonic() + self._settings.timeout
        for attempt in range(_READ_ATTEMPTS):
            got = int(read())
            if got >= 0 or got in ABSENT:
                return max(got, 0) or None
            if got in (LEASE_EXPIRED, TRANSFER_FAILED):
                if time.monotonic() > until or (got == LEASE_EXPIRED and attempt):
                    break
            elif got != codes.INVALID:
                break
            if got != LEASE_EXPIRED and self._size(store, key) != size:
                return None
        raise codes.error(f"reading {key}", got)

    def contains(self, key: str) -> bool:
        return self.contains_many([key])[0]

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """Look up the keys. Blobs that exist are leased to this process, so that they are there when they are read."""
        if not keys:
            return []
        with self._client.using() as store:
            found = [int(code) for code in store.batch_is_exist(list(keys))]
            for key, code in zip(keys, found, strict=True):
                check(f"asking for {key}", code)
        return [code == 1 for code in found]

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, key: str, blob: Buffers) -> None:
        views = _views(blob)
        with (
            self._client.using() as store,
            self._memories.source(store, views) as regions,
            self._turns.of([key]),
        ):
            until = time.monotonic() + self._settings.timeout
            for attempt in range(_WRITE_ATTEMPTS):
                code = self._put(store, key, regions)
                if code not in _AGAIN:
                    check(f"putting {key}", code)
                    return
                if attempt == _WRITE_ATTEMPTS - 1 or time.monotonic() > until:
                    raise codes.error(f"putting {key}", code)

    def _put(self, store: Any, key: str, regions: Regions) -> int:
        """Replace the blob under the key; return the code."""
        self._erase(store, [key], awaiting=True)
        starts, sizes = [start for start, _ in regions], [size for _, size in regions]
        return int(store.batch_put_from_multi_buffers([key], [starts], [sizes], self._client.replication)[0])

    def create(self, key: str, blob: Buffers) -> bool:
        """By the master, which lets one writer begin. One that died while writing is in the way for half a minute."""
        views = _views(blob)
        size = sum(map(len, views))
        with (
            self._client.using() as store,
            self._memories.source(store, views, known=True) as regions,
            self._turns.of([key]),
        ):
            code = int(store.batch_put_session_start([key], [size], self._client.replication)[0])
            if code == EXISTS:
                return False
            check(f"creating {key}", code)
            try:
                starts, sizes = [start for start, _ in regions], [length for _, length in regions]
                offsets = [sum(sizes[:index]) for index in range(len(sizes))]
                put = store.batch_put_from_multi_buffer_ranges
                check(f"creating {key}", int(put([key], [starts], [sizes], [offsets])[0]))
                check(f"creating {key}", int(store.batch_put_session_end([key])[0]))
            except BaseException:
                store.batch_put_session_revoke([key])
                raise
        return True

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        if keys:
            with self._client.using() as store, self._turns.of(keys):
                self._erase(store, list(dict.fromkeys(keys)), awaiting=False)

    def _erase(self, store: Any, keys: list[str], *, awaiting: bool) -> None:
        """Remove everything under `keys`. awaiting: also wait until another writer has finished, or died."""
        until = time.monotonic() + self._settings.timeout
        for turn in itertools.count():
            told = dict(zip(keys, map(int, store.batch_remove(keys)), strict=True))
            in_use = [key for key, code in told.items() if code in IN_USE]
            written = [key for key, code in told.items() if code == NOT_READY and awaiting]
            for key, code in told.items():
                if code not in ABSENT | IN_USE:
                    check(f"deleting {key}", code)
            late = time.monotonic() > until
            replaced = [_replace(store, key, PLACEHOLDERS[turn % 2], last=late) for key in in_use + written * late]
            keys = in_use + written
            if not keys:
                return
            if late:
                store.batch_remove(keys)
                return
            if written or not all(replaced):
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._client.close(self._memories.forget)


class _Memory:
    """A sink with memory of its own."""

    blob = b""

    def __init__(self) -> None:
        self._room = bytearray()

    def reserve(self, num_bytes: int) -> memoryview:
        self._room = bytearray(num_bytes)
        return memoryview(self._room)

    def filled(self, num_bytes: int) -> None:
        self.blob = memoryview(self._room).toreadonly()  # type: ignore[assignment]


def _replace(store: Any, key: str, placeholder: bytes, *, last: bool) -> bool:
    """Put `placeholder` in the place of a blob, whose memory stays its readers'. Return whether it was transferred.

    last: raise if it was not.
    """
    code = int(store.upsert(key, placeholder))
    if code == TRANSFER_FAILED and not last:
        return False
    if code not in _MEANWHILE:
        check(f"deleting {key}", code)
    return True


def _views(blob: Buffers) -> list[memoryview]:
    """The blob's buffers as bytes, without empty ones. Raises before anything is written if one cannot be read."""
    views = [view for view in (memoryview(part).cast("B") for part in blob) if len(view)]
    if sum(map(len, views)) in _NO_BLOB:
        raise ValueError(f"a blob of {sum(map(len, views))} bytes cannot be distinguished from a placeholder")
    return views


def _ranged(store: Any, key: str, offset: int, start: int, length: int) -> int:
    return int(store.get_into_ranges([start], [[key]], [[[0]]], [[[offset]]], [[[length]]])[0][0][0])
