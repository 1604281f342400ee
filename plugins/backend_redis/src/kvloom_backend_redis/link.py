"""One connection: requests out, replies in (RESP2), blobs straight into the memory that they are for."""

from __future__ import annotations

import os
import socket

from kvloom_backend_redis.errors import ProtocolError, ServerError
from kvloom_backend_redis.stream import BUFFER_BYTES, PIECE_BYTES, Filled, Part, quoted, stream

Reply = int | bytes | None | ServerError | list["Reply"]

_FIRST_BYTES = 32
"""First read of a reply with a blob: the line with its length, and little of the part that goes to its own memory."""
_MOST_ROWS = 1 << 20
_DEEPEST = 8
_MOST_TEXT = 1 << 20
"""Maximum size of a reply that is not a blob: a key, a page of figures."""
_MOST_REPLIES = 32 << 20
"""Memory for all replies of one exchange that are not blobs: a cluster's table of slots takes half of it at most."""
_VALUE_BYTES = 32
"""The size that a number counts as."""


def packed(*words: bytes) -> bytes:
    """A request."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)])


class Link:
    """A socket on which requests and replies take turns. For one thread at a time.

    Every method raises OSError if the network fails or is too slow, and ProtocolError if the answer is no reply. After
    either the link is not `clean`: what comes next on it could be the answer to another question. Too slow is silence
    for `timeout`; and, from the first request to the last reply that is owed, more waiting for the network than
    `timeout` and what the bytes take at a quarter of a mebibyte a second.
    """

    def __init__(self, connection: socket.socket, *, timeout: float) -> None:
        """timeout: seconds."""
        self._stream = stream(connection, timeout=timeout)
        self.pid = os.getpid()
        """The process that made it. A child has a copy of the descriptor, and must not say anything on it."""
        self._held = 0
        self._owed = 0
        self.announced_bytes = 0
        """The size of the last blob."""
        self.midway = False
        """A blob was announced and not read to its end: the replies behind it are out of reach."""

    def be_patient(self, timeout: float) -> None:
        """Have another timeout from now on."""
        self._stream.set_timeout(timeout)

    @property
    def clean(self) -> bool:
        """Every reply has been read to its end, and nothing else."""
        return self._owed == 0 and self._stream.empty

    @property
    def silent(self) -> bool:
        """Nothing has come unasked: no late reply, and no end of the connection."""
        return self._stream.silent

    def close(self) -> None:
        self._stream.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def send(self, *parts: Part, replies: int = 1) -> None:
        """Send one or more requests, which will have this many replies."""
        self._expect(replies)
        self._stream.send(parts)

    def queue(self, *parts: Part, replies: int = 1) -> None:
        """Like `send`, but perhaps not before a reply is waited for. The buffers must not change until then."""
        self._expect(replies)
        self._stream.queue(parts)

    def _expect(self, replies: int) -> None:
        if not self._owed:
            self._held = 0
            self._stream.begin()
        self._owed += replies

    # -- replies -------------------------------------------------------------------------------------------------------

    def reply(self) -> Reply:
        """The next reply, whatever it is; what the server refuses is a value here."""
        value = self._value(_DEEPEST)
        self._owed -= 1
        return value

    def answer(self) -> Reply:
        """The next reply. Raises what the server refuses."""
        value = self.reply()
        if isinstance(value, ServerError):
            raise value
        return value

    def length(self, most: int) -> int | None:
        """The bytes of the blob that comes next, for `fill`; None if there is none. Raises ServerError.

        most: the bytes of the largest blob that there can be.
        """
        ahead = BUFFER_BYTES if 0 < self.announced_bytes < BUFFER_BYTES else _FIRST_BYTES
        size = self._stream.blob_bytes(ahead)
        if 0 <= size <= most:
            self.midway, self.announced_bytes = True, size
            return size
        line = self._stream.line(ahead) if size < 0 else b"$%d" % size
        if line[:1] == b"-":
            self._owed -= 1
            raise _refusal(line)
        if line[:1] != b"$":
            raise ProtocolError(f"a reply that is not a blob: {quoted(line)}")
        size = _number(line)
        if size == -1:
            self._owed -= 1
            return None
        size = _size(size, most, line)
        self.midway, self.announced_bytes = True, size
        return size

    def skip(self, size: int) -> None:
        """Read a blob that `length` announced, and forget it."""
        memory = memoryview(bytearray(min(size, PIECE_BYTES)))
        while size > len(memory):
            self._stream.fill(memory, ends=False)
            size -= len(memory)
        self.fill(memory[:size])

    def fill(
        self, into: memoryview, filled: Filled | None = None, native_filled: tuple[int, int] | None = None
    ) -> None:
        """Read the whole blob that `length` announced.

        filled: told how many bytes have arrived. native_filled: as `NativeSink` gives it; `filled` is then told at the
        end, and perhaps not before.
        """
        self._stream.fill(into, filled, native_filled, ahead=_FIRST_BYTES if self._owed > 1 else 0)
        self._owed -= 1
        self.midway = False

    def _value(self, depth: int) -> Reply:
        line = self._stream.line()
        self._hold(_VALUE_BYTES + len(line))
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return _refusal(line)
        if kind == b":":
            return _number(line)
        if kind == b"$":
            size = _number(line)
            return None if size == -1 else self._bulk(_size(size, _MOST_TEXT, line))
        if kind == b"*" and depth:
            size = _number(line)
            return None if size == -1 else [self._value(depth - 1) for _ in range(_size(size, _MOST_ROWS, line))]
        raise ProtocolError(f"no reply: {quoted(line)}")

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        if self._held > _MOST_REPLIES:
            raise ProtocolError(f"replies of more than {_MOST_REPLIES} bytes")

    def _bulk(self, size: int) -> bytes:
        self._hold(size)
        data = bytearray(size)
        self._stream.fill(memoryview(data), ahead=BUFFER_BYTES)
        return bytes(data)


def _refusal(line: bytes) -> ServerError:
    return ServerError(line[1:].decode("utf-8", "replace"))


def _number(line: bytes) -> int:
    digits = line[1:].removeprefix(b"-")
    if not (digits.isdigit() and len(digits) < 20):
        raise ProtocolError(f"no number: {quoted(line)}")
    return int(line[1:])


def _size(size: int, most: int, line: bytes) -> int:
    if not 0 <= size <= most:
        raise ProtocolError(f"expected a length, got {quoted(line)}")
    return size
