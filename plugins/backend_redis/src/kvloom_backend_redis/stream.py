"""The bytes of one connection: out from many buffers, in by lines and blobs. In native code where that is installed."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from kvloom import native
from kvloom_backend_redis.errors import ProtocolError

if _INSTALLED := find_spec("kvloom_native") is not None:
    from kvloom_native import resp

BUFFER_BYTES = 16 << 10
MAX_LINE_BYTES = 8 << 10
_MAX_PARTS = 512
"""In one call: systems take 1024."""
_MAX_NATIVE_PARTS = 16
"""More are sent by Python, which finds their addresses faster."""
PIECE_BYTES = 1 << 20
"""Bytes of a blob between two calls of the sink, so that they are verified while in the processor's cache."""
_TLS_BYTES = 64 << 10
"""Sent at once by TLS, where the timeout is for all of it."""
_SLOWEST = 256 << 10
"""Bytes a second below which a connection is as good as dead: it would keep a thread for minutes."""

Filled = Callable[[int], object]
Part = bytes | memoryview
"""Contiguous bytes."""


class Stream:
    """A socket with a buffer. For one thread at a time.

    Methods raise OSError if the network fails or is too slow, ProtocolError if what comes has no end where it should.
    """

    def __init__(self, connection: socket.socket, *, timeout: float) -> None:
        """timeout: seconds."""
        self._socket = connection
        self._vectored = not isinstance(connection, ssl.SSLSocket)
        self._waited = 0.0
        self._moved = 0
        self._bytes = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        Stream.set_timeout(self, timeout)

    def set_timeout(self, timeout: float) -> None:
        """Have another timeout from now on. timeout: seconds."""
        self._timeout = timeout
        if self._vectored:
            # The system's own timeouts: with Python's there is another system call before every one of these.
            self._socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(timeout))
        else:
            self._socket.settimeout(timeout)

    @property
    def empty(self) -> bool:
        """Everything that was received has been taken."""
        return self._start == self._end

    @property
    def silent(self) -> bool:
        """Nothing has come unasked: no late reply, and no end of the connection."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        return not self._poll.poll(0)

    def close(self) -> None:
        self._socket.close()

    def begin(self) -> None:
        """Begin a new account of the time that is spent waiting."""
        self._waited, self._moved = 0.0, 0

    def send(self, parts: Sequence[Part]) -> None:
        """Send buffers."""
        if not self._vectored:
            for part in parts:
                for start in range(0, len(part), _TLS_BYTES):
                    piece = memoryview(part)[start : start + _TLS_BYTES]
                    began = time.monotonic()
                    self._socket.sendall(piece)
                    self._took(began, len(piece))
            return
        parts, at = list(parts), 0
        while at < len(parts):
            began = time.monotonic()
            try:
                sent = self._socket.sendmsg(parts[at : at + _MAX_PARTS])
            except BlockingIOError:
                raise _taken_nothing() from None
            self._took(began, sent)
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = memoryview(parts[at])[sent:]

    def queue(self, parts: Sequence[Part]) -> None:
        """Send buffers now, or as soon as something is waited for, until when they must not change."""
        self.send(parts)

    def blob_bytes(self, ahead: int) -> int:
        """The size of the blob that comes next, or less than 0: then look at the line. ahead: as for `line`."""
        return -1

    def line(self, ahead: int = BUFFER_BYTES) -> bytes:
        """The next line, without its end. ahead: receive no more bytes at once, as they belong elsewhere."""
        searched = self._start
        while True:
            at = self._bytes.find(b"\r\n", searched, self._end)
            if at >= 0:
                line = bytes(self._buffer[self._start : at])
                self._start = at + 2
                return line
            if self._end - self._start > MAX_LINE_BYTES:
                raise _no_line(self._buffer[self._start : self._end])
            seen = max(0, self._end - self._start - 1)  # the last byte may be the first half of an end
            self._receive(ahead)
            searched = self._start + seen

    def fill(
        self, into: memoryview, filled: Filled | None = None, native_filled: tuple[int, int] | None = None,
        *, ends: bool = True, ahead: int = 0,
    ) -> None:  # fmt: skip
        """Receive a blob, and what ends its reply if `ends`.

        into: bytes, all to be filled. filled: told how many have arrived. native_filled: a function for native code to
        tell in its place; `filled` is told at the end only. ahead: of what is behind the end, take up to so many bytes.
        """
        done = self._take(into)
        if done and filled:
            filled(done)
        while done < len(into):
            done += self._received(into[done : done + PIECE_BYTES])
            if filled:
                filled(done)
        if ends:
            self._ending()

    def _ending(self) -> None:
        while self._end - self._start < 2:
            self._receive()
        if self._bytes[self._start : self._start + 2] != b"\r\n":
            raise _wrong_end()
        self._start += 2

    def _take(self, into: memoryview) -> int:
        """Take the bytes that are in the buffer already."""
        size = min(len(into), self._end - self._start)
        into[:size] = self._buffer[self._start : self._start + size]
        self._start += size
        return size

    def _receive(self, most: int = BUFFER_BYTES) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer) or self._start > BUFFER_BYTES // 2:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._received(self._buffer[self._end : self._end + most], 0)

    def _received(self, into: memoryview, flags: int = socket.MSG_WAITALL) -> int:
        began = time.monotonic()
        try:
            got = self._socket.recv_into(into, 0, flags if self._vectored else 0)
        except BlockingIOError:
            raise _sent_nothing() from None
        if not got:
            raise _hung_up()
        self._took(began, got)
        return got

    def _took(self, began: float, nbytes: int) -> None:
        """Account for bytes moved in either direction, while the network was waited for since `began`."""
        self._waited += time.monotonic() - began
        self._moved += nbytes
        if self._waited > self._timeout + self._moved / _SLOWEST:
            raise _too_slow(self._moved, self._waited)


class NativeStream(Stream):
    """The same in native code, for a socket that is not encrypted. `_native` has its account and its state."""

    def __init__(self, connection: socket.socket, *, timeout: float, functions: resp.Functions) -> None:
        super().__init__(connection, timeout=timeout)
        self._native = resp.Connection(connection.fileno(), self._bytes, slowest=_SLOWEST)
        self._native.timeout = timeout
        self._address = ctypes.addressof(self._native)
        self._descriptor = connection.fileno()
        self._next, self._fill, self._is_silent = functions
        self._queued: list[Part] = []

    def set_timeout(self, timeout: float) -> None:
        super().set_timeout(timeout)
        self._native.timeout = timeout

    @property
    def empty(self) -> bool:
        return self._native.start == self._native.end

    @property
    def silent(self) -> bool:
        return bool(self._is_silent(self._descriptor))

    def begin(self) -> None:
        native = self._native
        native.waited, native.moved = 0.0, 0

    def queue(self, parts: Sequence[Part]) -> None:
        self._queued += parts
        if len(self._queued) > _MAX_NATIVE_PARTS:
            self._flush()

    def send(self, parts: Sequence[Part]) -> None:
        self._queued += parts
        self._flush()

    def _flush(self) -> None:
        queued, self._queued = self._queued, []
        self._waited, self._moved = self._native.waited, self._native.moved
        super().send(queued)
        self._native.waited, self._native.moved = self._waited, self._moved

    def blob_bytes(self, ahead: int) -> int:
        queued, request, size, held = self._queued, None, 0, None
        if queued:
            self._queued = []
            if len(queued) == 1 and type(queued[0]) is bytes:
                request = queued[0]
                size = len(request)
            else:
                held = self._native.place(queued)
        result: int = self._next(self._address, request, size, ahead)
        while result == -errno.EINTR:
            result = self._next(self._address, None, 0, ahead)
        del held
        if result < 0 and result != resp.A_LINE:
            raise self._failure(result)
        return result

    def line(self, ahead: int = BUFFER_BYTES) -> bytes:
        native = self._native
        end = -1 if self._queued else self._bytes.find(b"\r\n", native.start, native.end)
        if end < 0:
            size = self.blob_bytes(ahead)
            if size >= 0:
                return b"$%d" % size
            end = self._bytes.find(b"\r\n", native.start, native.end)
        line = bytes(self._buffer[native.start : end])
        native.start = end + 2
        return line

    def fill(
        self, into: memoryview, filled: Filled | None = None, native_filled: tuple[int, int] | None = None,
        *, ends: bool = True, ahead: int = 0,
    ) -> None:  # fmt: skip
        size = len(into)
        if into.readonly or not into.c_contiguous:
            raise ValueError("read-only memory, or in pieces")
        blob = resp.Blob(native.pointer(into), 0, size, *(native_filled or ()))
        place = ctypes.addressof(blob)
        while True:
            if filled and not native_filled:
                blob.until = min(size, blob.done + PIECE_BYTES)
            result: int = self._fill(self._address, place, ends and blob.until == size, ahead)
            if result >= 0:
                if filled and size:
                    filled(blob.done)
                if blob.done == size:
                    return
            elif result != -errno.EINTR:
                raise self._failure(result)

    def _failure(self, result: int) -> Exception:
        native = self._native
        if result == resp.CLOSED:
            return _hung_up()
        if result == resp.WRONG_END:
            return _wrong_end()
        if result == resp.ENDLESS:
            return _no_line(self._buffer[native.start : native.end])
        if result == resp.TOO_SLOW:
            return _too_slow(native.moved, native.waited)
        if result in (resp.NOT_TAKEN, -errno.EAGAIN):
            return _taken_nothing() if result == resp.NOT_TAKEN else _sent_nothing()
        return OSError(-result, os.strerror(-result))


def stream(connection: socket.socket, *, timeout: float) -> Stream:
    """The fastest stream over this socket. timeout: seconds."""
    functions = resp.functions() if _INSTALLED and not isinstance(connection, ssl.SSLSocket) else None
    if functions is None:
        return Stream(connection, timeout=timeout)
    return NativeStream(connection, timeout=timeout, functions=functions)


def quoted(line: bytes) -> str:
    """The beginning only, because it could be KV."""
    return repr(line[:16])


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))


def _no_line(received: memoryview) -> ProtocolError:
    return ProtocolError(f"no reply: {quoted(bytes(received))}")


def _taken_nothing() -> TimeoutError:
    return TimeoutError("the server has taken nothing for too long")


def _sent_nothing() -> TimeoutError:
    return TimeoutError("the server has sent nothing for too long")


def _hung_up() -> ConnectionError:
    return ConnectionError("the server hung up")


def _wrong_end() -> ProtocolError:
    return ProtocolError("a reply that does not end where it should")


def _too_slow(moved: int, waited: float) -> TimeoutError:
    return TimeoutError(f"{moved} bytes in {waited:.1f} s are too few")
