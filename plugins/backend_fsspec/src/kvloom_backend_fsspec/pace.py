"""Bounds on the length of servers' answers, and on their time, where a client's timeout begins anew with each byte."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

from kvloom import BackendError

_BYTES = 256 << 10
"""Bytes that have to move in each `timeout`."""
_WRITTEN_BYTES = 16 << 10
"""Written at once: a timeout begins anew whenever a part of it is taken."""
_MOST_PACKET_BYTES = 4 << 20
"""Longest message of an SFTP server; those of OpenSSH have 256 KiB at most."""
_MOST_ANSWER_BYTES = 64 << 20
"""Longest answer that a client of httpx reads whole, such as the listing of a directory: of 100,000 blobs and more."""
_TAG_BYTES = 8
"""Bytes of XML to a tag, or to an attribute, at least: each takes about a hundred once it is parsed."""
_NOT_IN_XML = bytes({*range(32)} - {*b"\t\n\r"})
"""Bytes that some servers send nevertheless, where a file has them in its name: the parser would end the listing."""


class Pace:
    """A request and its answer: `seconds`, and as long again for each 256 KiB that has moved."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        self._until = time.monotonic() + self._seconds

    def moved(self, num_bytes: int) -> None:
        self._until += self._seconds * num_bytes / _BYTES

    def left(self) -> float:
        """Return the seconds that are left. Raises TimeoutError if there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out: the server answers too slowly")
        return left


class PacedChannel:
    """A channel of paramiko's, for its `SFTPClient`."""

    def __init__(self, channel: Any, pace: Pace) -> None:
        self._channel, self.pace = channel, pace

    def send(self, data: bytes) -> int:
        self._channel.settimeout(self.pace.left())
        sent = int(self._channel.send(data))
        self.pace.moved(sent)
        return sent

    def recv(self, num_bytes: int) -> bytes:
        if num_bytes > _MOST_PACKET_BYTES:
            raise OSError(f"the server announces a message of {num_bytes} bytes")
        self._channel.settimeout(self.pace.left())
        data = bytes(self._channel.recv(num_bytes))
        self.pace.moved(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def bound_http(client: Any, seconds: float) -> None:
    """Hold the answers that a client of httpx gets to the pace, and those that it reads whole to a length."""
    for transport in (client._transport, *client._mounts.values()):  # httpx has no setting for it
        if (pool := getattr(transport, "_pool", None)) is not None:
            pool._network_backend = _PacedNetwork(pool._network_backend, seconds)

    class Short(importlib.import_module("httpx").SyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            got = tags = 0
            for piece in self._stream:
                got += len(piece)
                tags += piece.count(b"<") + piece.count(b"=")
                if tags > got // _TAG_BYTES + _TAG_BYTES:
                    raise BackendError("the server answers with too many tags for so few bytes")
                if got > _MOST_ANSWER_BYTES:
                    raise BackendError(f"the server answers with more than {_MOST_ANSWER_BYTES} bytes")
                yield piece.translate(None, _NOT_IN_XML)

        def close(self) -> None:
            self._stream.close()

    def shorten(answer: Any) -> None:
        if answer.headers.get("Content-Encoding", "identity") != "identity":  # it has no length that is known before
            raise BackendError("the server compresses its answer, although it was asked not to")
        if answer.request.method != "GET":  # files are read piece by piece
            answer.stream = Short(answer.stream)

    client.event_hooks = {"response": [shorten]}


class _PacedNetwork:
    """A network backend of httpcore."""

    def __init__(self, network: Any, seconds: float) -> None:
        self._network, self._seconds = network, seconds

    def connect_tcp(self, *args: Any, **settings: Any) -> _PacedStream:
        return _PacedStream(self._network.connect_tcp(*args, **settings), Pace(self._seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class _PacedStream:
    """A network stream of httpcore. A request has a pace, and its answer another one."""

    def __init__(self, stream: Any, pace: Pace) -> None:
        self._stream, self._pace = stream, pace
        self._writes = False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = bytes(self._stream.read(max_bytes, timeout=self._left(timeout, writes=False)))
        self._pace.moved(len(data))
        return data

    def write(self, data: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(data), _WRITTEN_BYTES):
            piece = data[start : start + _WRITTEN_BYTES]
            self._stream.write(piece, timeout=self._left(timeout, writes=True))
            self._pace.moved(len(piece))

    def _left(self, timeout: float | None, *, writes: bool) -> float:
        if writes is not self._writes:
            self._writes = writes
            self._pace.begin()
        left = self._pace.left()
        return left if timeout is None else min(timeout, left)

    def start_tls(self, *args: Any, **settings: Any) -> _PacedStream:
        return _PacedStream(self._stream.start_tls(*args, **settings), self._pace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
