"""RedisBackend: one key per blob in Redis or Valkey.

A server runs one command at a time, so a blob is stored whole or not at all, also if a process dies. Blobs go from the
caller's buffers to the socket and from the socket to the caller's memory, without another copy in this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from kvloom import (
    BackendError,
    Buffer,
    Buffers,
    CorruptBlobError,
    Entry,
    KVSpec,
    ReadDone,
    Sink,
    StorageBackend,
    WriteDone,
    native,
)
from kvloom_backend_redis import opening
from kvloom_backend_redis.address import Endpoint
from kvloom_backend_redis.config import RedisConfig
from kvloom_backend_redis.errors import ProtocolError, ServerError
from kvloom_backend_redis.exchange import Exchange
from kvloom_backend_redis.leases import Leases
from kvloom_backend_redis.link import Link, Reply, packed
from kvloom_backend_redis.links import Links
from kvloom_backend_redis.stream import Part
from kvloom_backend_redis.topology import Cluster, Sentinels, Single, Topology

_KEY = re.compile(r"[A-Za-z0-9._/-]+")
_PAGE = 500
_MOST_PAGES = 1 << 22
"""Number of keys that a server examines for a page, of any application."""
_MOST_LISTED = 1 << 24
_CURSOR_CHARS = 20
_BATCH_BLOBS = 64
_BATCH_BYTES = 64 << 20
_SKIPPED_BYTES = 4 << 20
"""A larger blob that nobody takes costs more than a new connection."""


class RedisBackend(StorageBackend):
    """Keeps every blob under `prefix` and its key. Survives a fork: a child makes connections of its own."""

    type: ClassVar[str] = "redis"
    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    Config = RedisConfig

    def __init__(self, config: RedisConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        opening.check_files(config)
        self._settings = config
        vars(self)["threads"] = config.threads  # one number for all instances is the contract's default
        self._prefix = config.prefix.encode()
        self._options = [] if config.expire is None else [b"PX", b"%d" % max(1, round(config.expire * 1000))]
        self._links = Links(config, db=config.address.db)
        self._sentinels = Links(config, db=0, sentinels=True)
        self._exchange = Exchange(self._topology(), self._links)
        self._leases = Leases(self._exchange, self._prefix)
        try:
            self._server = opening.opened(self._exchange, config)
        except BaseException:
            self.close()
            raise

    def _topology(self) -> Topology:
        address = self._settings.address
        if address.kind == "cluster":
            return Cluster(address.endpoints, self._links)
        if address.kind == "sentinel":
            return Sentinels(address.endpoints, address.service, self._sentinels)
        return Single(address.endpoints[0])

    def identity(self) -> str | None:
        return self._server.identity

    def check_writable(self) -> None:
        opening.check_writable(self._exchange, self._settings)

    def put(self, key: str, blob: Buffers) -> None:
        self._exchange.one(self._name(key), self._set(key, blob), _kept)

    def create(self, key: str, blob: Buffers) -> bool:
        return self._exchange.one(self._name(key), self._set(key, blob, b"NX"), _kept)

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        batch: list[tuple[int, list[Part]]] = []
        size = 0
        for number, (key, blob) in enumerate(requests):
            try:
                parts = self._set(key, blob)
            except Exception as error:
                done(number, error)
                continue
            batch.append((number, parts))
            size += sum(map(len, parts))
            if len(batch) == _BATCH_BLOBS or size > _BATCH_BYTES:
                full, batch, size = batch, [], 0
                self._put_batch(full, requests, done)
        if batch:
            self._put_batch(batch, requests, done)

    def _put_batch(
        self, batch: Sequence[tuple[int, list[Part]]], requests: Sequence[tuple[str, Buffers]], done: WriteDone
    ) -> None:
        names = [self._name(requests[number][0]) for number, _ in batch]
        for place, outcome in self._exchange.send(names, [parts for _, parts in batch], _kept):
            done(batch[place][0], outcome if isinstance(outcome, Exception) else None)

    def get(self, key: str) -> Buffer | None:
        return self._exchange.one(self._name(key), [_get(self._name(key))], self._blob)

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        names = [self._name(key) for key in keys]
        return self._exchange.fetch(names, [_get(name) for name in names], self._blob)

    def get_into(self, key: str, sink: Sink) -> bool:
        name = self._name(key)
        outcome = self._exchange.one(name, [_get(name)], lambda link: self._into(link, sink))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        names = [self._name(key) for key, _ in requests]

        def read(link: Link, place: int) -> bool | Exception:
            return self._into(link, requests[place][1])

        for outcome in self._exchange.replies(names, [_get(name) for name in names], read):
            done(*outcome)

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        name, into = self._name(key), into.cast("B")
        if not into:
            return _number(self._exchange.ask(name, b"STRLEN", name)) >= max(1, offset)

        def read(link: Link) -> bool:
            size = self._length(link, len(into))
            if size is None:
                raise ProtocolError("no reply to GETRANGE")
            link.fill(into[:size])
            return size == len(into)

        last = b"%d" % (offset + len(into) - 1)
        return self._exchange.one(name, [packed(b"GETRANGE", name, b"%d" % offset, last)], read)

    def contains(self, key: str) -> bool:
        return self.contains_many([key])[0]

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """Look up the keys. A server of several that fails has none, unless all do."""
        names = list(map(self._name, keys))
        counts = self._exchange.many(names, [packed(b"EXISTS", name) for name in names], otherwise=0)
        return [_number(count) == 1 for count in counts]

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        self._each(b"UNLINK", map(self._name, keys))

    def touch_many(self, keys: Sequence[str]) -> None:
        """Mark keys as used. The server evicts what was used longest ago, and sees no hit in a tier above."""
        self._each(b"TOUCH", map(self._name, keys))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """List the keys. The times of writing are unknown to a server."""
        if prefix and not _KEY.fullmatch(prefix):
            return  # no key begins like that, and a server could take it for a pattern
        listed: set[bytes] = set()  # a server may name a key more than once
        pattern = self._name(prefix) + b"*"
        for endpoint in self._exchange.topology.masters():
            for page in self._pages(endpoint, pattern):
                new = [name for name in dict.fromkeys(page) if name not in listed and self._is_blob(name, prefix)]
                listed.update(new)
                if len(listed) > _MOST_LISTED:
                    raise ProtocolError(f"a listing of more than {_MOST_LISTED} keys")
                for name, size in zip(new, self._each(b"STRLEN", new), strict=True):
                    if size:  # 0: gone since
                        yield Entry(name[len(self._prefix) :].decode(), _number(size), 0.0)

    def _pages(self, endpoint: Endpoint, pattern: bytes) -> Iterator[list[bytes]]:
        """A listing by one server. Raises ProtocolError if it has no end, BackendError once this is closed."""
        cursor = met = b"0"
        for number in range(1, _MOST_PAGES):
            request = packed(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _PAGE, b"TYPE", b"string")
            cursor, page = _page(self._exchange.at(endpoint, request)[0])
            yield page
            if cursor == b"0":
                return
            if cursor == met:  # a cursor says all that a server knows of a listing: from here on it goes round
                break
            if self._links.closed:
                raise BackendError("closed while the store was being listed")
            if not number & (number - 1):  # at each power of two: one of these is in the round, if there is one
                met = cursor
        raise ProtocolError("a listing without an end")

    def hold(self, name: str) -> bool:
        return self._leases.take(name)

    def close(self) -> None:
        self._leases.close()
        self._links.close()
        self._sentinels.close()

    # -- requests and replies ------------------------------------------------------------------------------------------

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _is_blob(self, name: bytes, prefix: str) -> bool:
        return (
            name.startswith(self._name(prefix))
            and _KEY.fullmatch(name[len(self._prefix) :].decode("latin-1")) is not None
        )

    def _set(self, key: str, blob: Buffers, *options: bytes) -> list[Part]:
        """The request that keeps a blob. Raises BackendError if no server would take it."""
        views = [memoryview(part).cast("B") for part in blob]
        size = sum(map(len, views))
        if size > self._server.most_bytes:
            most = self._server.most_bytes
            raise BackendError(f"a blob has {size} bytes, the server accepts at most {most}; lower chunk_tokens")
        name, after = self._name(key), [*self._options, *options]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(after), len(name), name, size)
        return [head, *views, b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in after)]

    def _each(self, verb: bytes, names: Iterable[bytes]) -> list[Reply]:
        names = list(names)
        return self._exchange.many(names, [packed(verb, name) for name in names])

    def _into(self, link: Link, sink: Sink) -> bool | Exception:
        """Read a blob into a sink: whether there is one, or what is wrong with it or with its sink."""
        try:
            size = self._length(link, self._server.most_bytes)
        except CorruptBlobError as error:
            return error
        return False if size is None else _filled(link, size, sink)

    def _blob(self, link: Link) -> Buffer | None:
        size = self._length(link, self._server.most_bytes)
        if size is None:
            return None
        blob = bytearray(size)
        link.fill(memoryview(blob))
        return blob

    def _length(self, link: Link, most: int) -> int | None:
        try:
            return link.length(most)
        except ServerError as error:
            if error.word == "WRONGTYPE":
                raise CorruptBlobError("the key holds another type than a string") from None
            raise


def _get(name: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)


def _filled(link: Link, size: int, sink: Sink) -> bool | Exception:
    """Read a blob into a sink, or return what the sink raises; behind a small blob the link goes on all the same."""
    try:
        into = sink.reserve(size)[:size]
        native_filled = native.filled_by(sink)
    except Exception as error:
        if size <= _SKIPPED_BYTES:
            link.skip(size)
        return error
    failure: Exception | None = None

    def filled(num_bytes: int) -> None:
        nonlocal failure
        try:
            if failure is None:
                sink.filled(num_bytes)
        except Exception as error:
            failure = error

    link.fill(into, filled, native_filled)
    return failure or True


def _kept(link: Link) -> bool:
    """Return whether SET stored the value; with NX it may not have."""
    reply = link.answer()
    if reply is not None and reply != b"OK":
        raise ProtocolError("no reply to SET")
    return reply is not None


def _number(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise ProtocolError(f"a {type(reply).__name__} where a number was asked for")
    return reply


def _page(reply: Reply) -> tuple[bytes, list[bytes]]:
    """The cursor and the keys of a page of SCAN."""
    match reply:
        case ServerError():
            raise reply
        case [bytes(cursor), list(names)] if cursor.isdigit() and len(cursor) <= _CURSOR_CHARS:
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise ProtocolError("no page of a listing")
