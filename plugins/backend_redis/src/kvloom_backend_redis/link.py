"""One connection: requests out, replies in (RESP2), blobs straight into the memory that they are for."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable

from kvloom import Buffer
from kvloom_backend_redis.errors import ProtocolError, ServerError

Reply = int | bytes | None | ServerError | list["Reply"]

_BUFFER_BYTES = 16 << 10
_LINE_BYTES = 8 << 10
_MOST_BUFFERS = 512
"""In one call: systems take 1024."""
_FIRST_BYTES = 32
"""First read of a reply with a blob: the line with its length, and little of the part that goes to its own memory."""
_PIECE_BYTES = 1 << 20
"""Bytes of a blob between two calls of the sink, so that they are verified while in the processor's cache."""
_SLOWEST = 256 << 10
"""Bytes a second below which a connection is as good as dead: it would keep a thread for minutes."""
_MOST_ROWS = 1 << 20
_DEEPEST = 8
_MOST_TEXT = 1 << 20
"""Maximum size of a reply that is no blob: a key, a page of figures."""
_MOST_REPLIES = 32 << 20
"""Memory for all replies of one exchange that are no blobs: a cluster's table of slots takes half of it at most."""
_VALUE_BYTES = 32
"""The size that a number counts as."""


def packed(*words: bytes) -> bytes:
    """A request."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)])


class Link:
    """A socket on which requests and replies take turns. For one thread at a time.

    Every method raises OSError if the network fails or is too slow, and ProtocolError if what comes is no reply. After
    either the link is not `clean`: what comes next on it could be the answer to another question. Too slow is silence
    for `timeout`; and, from the first request to the last reply that is owed, more waiting for the network than
    `timeout` and what the bytes take at a quarter of a mebibyte a second.
    """

    def __init__(self, connection: socket.socket, *, timeout: float) -> None:
        """timeout: seconds."""
        self._socket = connection
        self._vectored = not isinstance(connection, ssl.SSLSocket)
        self.be_patient(timeout)
        self._waited = 0.0
        self._moved = 0
        self._held = 0
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        self._owed = 0
        self.announced_bytes = 0
        """The size of the last blob."""
        self.midway = False
        """A blob was announced and not read to its end: the replies behind it are out of reach."""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def be_patient(self, timeout: float) -> None:
        """Have another timeout from now on."""
        self._timeout = timeout
        if self._vectored:
            # The system's own timeouts: with Python's there is another system call before every one of these.
            self._socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(timeout))
        else:
            self._socket.settimeout(timeout)

    @property
    def clean(self) -> bool:
        """Every reply has been read to its end, and nothing else."""
        return self._owed == 0 and self._start == self._end

    @property
    def silent(self) -> bool:
        """Nothing has come unasked: no late reply, and no end of the connection."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        return not self._poll.poll(0)

    def close(self) -> None:
        self._socket.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def send(self, *parts: Buffer, replies: int = 1) -> None:
        """Send one or more requests, which will have this many replies."""
        if not self._owed:
            self._waited, self._moved, self._held = 0.0, 0, 0
        self._owed += replies
        views = [view for view in (memoryview(part).cast("B") for part in parts) if len(view)]
        if not self._vectored:
            for view in views:
                began = time.monotonic()
                self._socket.sendall(view)
                self._took(began, len(view))
            return
        at = 0
        while at < len(views):
            began = time.monotonic()
            try:
                sent = self._socket.sendmsg(views[at : at + _MOST_BUFFERS])
            except BlockingIOError:
                raise TimeoutError("the server has taken nothing for too long") from None
            self._took(began, sent)
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]

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
        line = self._line(_FIRST_BYTES)
        if line[:1] == b"-":
            self._owed -= 1
            raise _refusal(line)
        if line[:1] != b"$":
            raise ProtocolError(f"a reply that is no blob: {_quoted(line)}")
        size = _number(line)
        if size == -1:
            self._owed -= 1
            return None
        size = _size(size, most, line)
        self.midway, self.announced_bytes = True, size
        return size

    def skip(self, size: int) -> None:
        """Read a blob that `length` announced, and forget it."""
        memory = memoryview(bytearray(min(size, _PIECE_BYTES)))
        while size > len(memory):
            self._fill(memory)
            size -= len(memory)
        self.fill(memory[:size])

    def fill(self, into: memoryview, filled: Callable[[int], None] | None = None) -> None:
        """Read the whole blob that `length` announced. filled: told how many bytes have arrived."""
        self._fill(into, filled)
        self._ending()
        self._owed -= 1
        self.midway = False

    def _fill(self, into: memoryview, filled: Callable[[int], None] | None = None) -> None:
        done = self._take(into)
        if done and filled:
            filled(done)
        while done < len(into):
            done += self._received(into[done : done + _PIECE_BYTES])
            if filled:
                filled(done)

    def _value(self, depth: int) -> Reply:
        line = self._line()
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
        raise ProtocolError(f"no reply: {_quoted(line)}")

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        if self._held > _MOST_REPLIES:
            raise ProtocolError(f"replies of more than {_MOST_REPLIES} bytes")

    def _bulk(self, size: int) -> bytes:
        self._hold(size)
        data = bytearray(size)
        view = memoryview(data)
        done = self._take(view)
        while done < size:
            self._receive()
            done += self._take(view[done:])
        self._ending()
        return bytes(data)

    def _ending(self) -> None:
        while self._end - self._start < 2:
            self._receive()
        if self._buffer[self._start : self._start + 2].tobytes() != b"\r\n":
            raise ProtocolError("a reply that does not end where it should")
        self._start += 2

    def _line(self, ahead: int = _BUFFER_BYTES) -> bytes:
        """Up to its end, and without it. ahead: read no more bytes at once, as they belong elsewhere."""
        searched = self._start
        while True:
            at = self._bytes.find(b"\r\n", searched, self._end)
            if at >= 0:
                line = bytes(self._buffer[self._start : at])
                self._start = at + 2
                return line
            if self._end - self._start > _LINE_BYTES:
                raise ProtocolError(f"no reply: {_quoted(bytes(self._buffer[self._start : self._end]))}")
            seen = max(0, self._end - self._start - 1)  # the last byte may be the first half of an end
            self._receive(ahead)
            searched = self._start + seen

    def _take(self, into: memoryview) -> int:
        """Take the bytes that are in the buffer already."""
        size = min(len(into), self._end - self._start)
        into[:size] = self._buffer[self._start : self._start + size]
        self._start += size
        return size

    def _receive(self, most: int = _BUFFER_BYTES) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer) or self._start > _BUFFER_BYTES // 2:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._received(self._buffer[self._end : self._end + most], 0)

    def _received(self, into: memoryview, flags: int = socket.MSG_WAITALL) -> int:
        began = time.monotonic()
        try:
            got = self._socket.recv_into(into, 0, flags if self._vectored else 0)
        except BlockingIOError:
            raise TimeoutError("the server has sent nothing for too long") from None
        if not got:
            raise ConnectionError("the server hung up")
        self._took(began, got)
        return got

    def _took(self, began: float, nbytes: int) -> None:
        """Account for bytes moved in either direction, while the network was waited for since `began`."""
        self._waited += time.monotonic() - began
        self._moved += nbytes
        if self._waited > self._timeout + self._moved / _SLOWEST:
            raise TimeoutError(f"{self._moved} bytes in {self._waited:.1f} s are too few")


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))


def _refusal(line: bytes) -> ServerError:
    return ServerError(line[1:].decode("utf-8", "replace"))


def _number(line: bytes) -> int:
    digits = line[1:].removeprefix(b"-")
    if not (digits.isdigit() and len(digits) < 20):
        raise ProtocolError(f"no number: {_quoted(line)}")
    return int(line[1:])


def _size(size: int, most: int, line: bytes) -> int:
    if not 0 <= size <= most:
        raise ProtocolError(f"no length: {_quoted(line)}")
    return size


def _quoted(line: bytes) -> str:
    """The beginning only, because it could be KV."""
    return repr(line[:16])
