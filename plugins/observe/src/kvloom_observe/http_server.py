"""An HTTP server for untrusted clients: one thread, a bounded number of connections, a deadline for each.

It answers one request per connection. However many connect, it leaves file descriptors to the rest of the process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

from .http_messages import Request, RequestError, Response, content_length, head_of, parse, plain_error

log = logging.getLogger("kvloom.observe")

_YOUNG_SECONDS = 1.0
"""A connection this old that has not sent its request yet makes room for a new one."""
_PAUSE_SECONDS = 0.5
"""Pause of accepting after file descriptors ran out."""
_LINGER_SECONDS = 1.0
"""Time that a refused body is read and dropped, so that the answer arrives."""
_SPARE_SHARE, _MAX_SPARE = 8, 64
"""File descriptors left for others: a share of the process's limit, and a maximum."""
_BACKLOG = 16
_READ_BYTES = 64 << 10


class Later(NamedTuple):
    """An answer that takes long. It is made in an executor, unless the client has gone by then."""

    executor: Executor
    make: Callable[[], Response]
    most: int
    """Answers that this executor may owe at a time."""
    threads: int = 1
    """Maximum number of answers in the executor. The others wait on their connections, and end with them."""


Handler = Callable[[Request], Response | Later]
"""Called on the server's thread: it must be quick. A RequestError that it raises is answered."""


class Limits(NamedTuple):
    """Maximum resources of one server."""

    connections: int = 16
    head_bytes: int = 16 << 10
    body_bytes: int = 0
    seconds: float = 10.0
    """For a request to arrive, and for its answer to be read."""


_USUAL = Limits()


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    began: float
    until: float
    data: bytearray = field(default_factory=bytearray)
    head: Request | None = None
    length: int = 0
    """Length of the body."""
    later: Later | None = None
    """The answer that the connection waits for."""
    answer: Future[Response] | None = None
    """Set once `later` is being made."""
    out: memoryview | None = None
    unread: bool = False
    """Some of the request was not read."""
    draining: bool = False

    @property
    def reads(self) -> bool:
        """Return whether it owes the server something, and not the other way round."""
        return self.draining or (self.later is None and self.out is None)


class HTTPServer:
    """`start` serves on a thread of its own, `run` on the caller's. A forked child has none of its descriptors."""

    def __init__(
        self, listener: socket.socket, handle: Handler, limits: Limits = _USUAL, *,
        refuse: Callable[[int, str], Response] | None = None, name: str = "kvloom-http",
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """listener: bound and listening; it is closed with the server, also where the server cannot be made.

        refuse: makes the answer that says an error. Raises OSError where the process has no descriptors left.
        """
        self._listener, self._handle, self._limits, self._name, self._now = listener, handle, limits, name, now
        self._refuse = refuse or plain_error
        self._connections: list[_Connection] = []
        self._making: list[_Connection] = []
        """Those whose answers are in executors, also where the client has gone."""
        self._made: deque[_Connection] = deque()
        self._closing = False
        self._paused_until = 0.0
        self._thread: threading.Thread | None = None
        try:
            self._bell, self._ear = socket.socketpair()
        except OSError:
            listener.close()
            raise
        for one in (listener, self._bell, self._ear):
            one.setblocking(False)
        _servers.add(self)

    def start(self) -> None:
        """Raises RuntimeError where the system gives no thread; everything is closed then."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self.leave()
            raise
        self._thread = thread

    def _run(self) -> None:
        try:
            self.run()
        finally:
            self.leave()

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._closing:
            self.step()

    def stop(self) -> None:
        """Have `run` return. From any thread."""
        self._closing = True
        self._ring()

    def close(self) -> None:
        """Stop, and close everything."""
        self.stop()
        if self._thread is None:
            self.leave()
        else:
            self._thread.join(5.0)

    def leave(self) -> None:
        """Close the descriptors of this process. Sockets that a parent has too stay open there."""
        _servers.discard(self)
        for one in (self._listener, self._bell, self._ear, *(connection.sock for connection in self._connections)):
            one.close()
        self._connections.clear()

    def step(self, wait: float | None = None) -> None:
        """Wait until something is to be done, `wait` seconds at most, and do it."""
        poll, now = select.poll(), self._now()
        poll.register(self._ear, select.POLLIN)
        if self._accepts(now):
            poll.register(self._listener, select.POLLIN)
        for one in self._connections:
            poll.register(one.sock, select.POLLIN if one.reads else select.POLLOUT if one.out else 0)
        ready = dict(poll.poll(None if (left := self._patience(now, wait)) is None else 1000 * left))
        if self._closing:
            return
        if self._ear.fileno() in ready:
            self._hear()
        for one in tuple(self._connections):
            if event := ready.get(one.sock.fileno(), 0):
                self._serve(one, event)
        now = self._now()
        for one in tuple(self._connections):
            if one.later is None and now >= one.until:
                self._drop(one)
        if self._listener.fileno() in ready:
            self._accept(now)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accepts(self, now: float) -> bool:
        full = len(self._connections) >= self._limits.connections
        return now >= self._paused_until and (not full or self._oldest(now) is not None)

    def _oldest(self, now: float) -> _Connection | None:
        """The connection that makes room for another."""
        idle = [one for one in self._connections if one.reads and now - one.began >= _YOUNG_SECONDS]
        return min(idle, key=lambda one: one.began, default=None)

    def _patience(self, now: float, wait: float | None) -> float | None:
        """Seconds until the next timeout."""
        ends = [one.until for one in self._connections if one.later is None]
        if now < self._paused_until:
            ends.append(self._paused_until)
        if len(self._connections) >= self._limits.connections:
            ends += [one.began + _YOUNG_SECONDS for one in self._connections if now < one.began + _YOUNG_SECONDS]
        soonest = max(0.0, min(ends) - now) if ends else None
        return soonest if wait is None else wait if soonest is None else min(soonest, wait)

    def _accept(self, now: float) -> None:
        if len(self._connections) >= self._limits.connections:
            oldest = self._oldest(now)
            if oldest is None:
                return
            self._drop(oldest)
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptors, or no memory: it would be tried without end
            self._paused_until = now + _PAUSE_SECONDS
            return
        if _few_descriptors(sock.fileno()):
            sock.close()
            self._paused_until = now + _PAUSE_SECONDS
            return
        sock.setblocking(False)
        self._connections.append(_Connection(sock, now, now + self._limits.seconds))

    def _drop(self, one: _Connection) -> None:
        if one in self._connections:
            self._connections.remove(one)
        one.sock.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _serve(self, one: _Connection, event: int) -> None:
        try:
            if one.draining:
                if not one.sock.recv(_READ_BYTES):
                    self._drop(one)
            elif one.out is not None:
                self._write(one)
            elif one.later is not None:
                self._drop(one)  # POLLHUP: the client has gone
            else:
                self._read(one)
        except BlockingIOError:
            return
        except OSError:
            self._drop(one)

    def _read(self, one: _Connection) -> None:
        got = one.sock.recv(_READ_BYTES)
        if not got:
            self._drop(one)
            return
        one.data += got
        try:
            if one.head is None and not self._parse(one, len(got)):
                return
            if len(one.data) < one.length:
                return
        except RequestError as error:
            one.unread = True
            self._answer(one, self._refuse(error.status, str(error)))
            return
        assert one.head is not None
        one.unread = len(one.data) > one.length
        self._dispatch(one, one.head._replace(body=bytes(one.data[: one.length])))

    def _parse(self, one: _Connection, fresh: int) -> bool:
        """Take the head off the received bytes, if it is complete. Raises RequestError."""
        end = one.data.find(b"\r\n\r\n", max(0, len(one.data) - fresh - 3))
        if (len(one.data) if end < 0 else end) > self._limits.head_bytes:
            raise RequestError(431, f"more than {self._limits.head_bytes} bytes of headers")
        if end < 0:
            return False
        one.head = parse(bytes(one.data[: end + 4]))
        one.length = content_length(one.head.headers, self._limits.body_bytes)
        del one.data[: end + 4]
        return True

    def _dispatch(self, one: _Connection, request: Request) -> None:
        one.data = bytearray()
        try:
            answer = self._handle(request)
        except RequestError as error:
            answer = self._refuse(error.status, str(error))
        except Exception:
            log.exception("a request was not answered")
            answer = self._refuse(500, "failed; its log says why")
        if isinstance(answer, Later):
            if _count(self._connections, answer.executor) < answer.most:
                one.later = answer
                self._submit()
                return
            answer = self._refuse(503, f"{answer.most} questions wait already; ask again later")
        self._answer(one, answer)

    def _submit(self) -> None:
        """Start answers if threads are free. An executor's queue would keep requests of clients that have left."""
        for one in self._connections:
            later = one.later
            if later is None or one.answer is not None or _count(self._making, later.executor) >= later.threads:
                continue
            self._making.append(one)
            one.answer = later.executor.submit(later.make)
            one.answer.add_done_callback(lambda _, one=one: self._came(one))  # type: ignore[misc]

    def _came(self, one: _Connection) -> None:
        """On the executor's thread."""
        self._made.append(one)
        self._ring()

    def _hear(self) -> None:
        self._ear.recv(4096)
        while self._made:
            one = self._made.popleft()
            self._making.remove(one)
            made, one.answer, one.later = one.answer, None, None
            if made is None or made.cancelled() or one not in self._connections:
                continue
            error = made.exception()
            if error is not None:
                log.error("a request was not answered", exc_info=error)
            self._answer(one, self._refuse(500, "failed; its log says why") if error else made.result())
        self._submit()

    def _answer(self, one: _Connection, response: Response) -> None:
        body = b"" if one.head is not None and one.head.method == "HEAD" else response.body
        one.out = memoryview(head_of(response) + body)
        one.until = self._now() + self._limits.seconds
        self._serve(one, 0)

    def _write(self, one: _Connection) -> None:
        assert one.out is not None
        one.out = one.out[one.sock.send(one.out) :]
        if one.out:
            return
        if not one.unread:
            self._drop(one)
            return
        one.sock.shutdown(socket.SHUT_WR)
        one.draining, one.until = True, self._now() + _LINGER_SECONDS

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it has been rung often enough, or is closed
            self._bell.send(b"!")


def _count(connections: list[_Connection], executor: Executor) -> int:
    """Return the number of connections that wait for an executor."""
    return sum(one.later is not None and one.later.executor is executor for one in connections)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Raises OSError."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except UnicodeError:
        raise OSError(errno.EINVAL, "this is no name of a host") from None
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _few_descriptors(newest: int) -> bool:
    """Return whether the process has few left. newest: the number of its newest one, the lowest that was free."""
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return False
    try:
        count = os.stat("/proc/self/fd").st_size  # their number, from Linux 6.2 on
    except OSError:
        count = 0
    return max(count, newest + 1) > most - min(most // _SPARE_SHARE, _MAX_SPARE)


_servers: WeakSet[HTTPServer] = WeakSet()


def _forked() -> None:
    for server in tuple(_servers):
        server.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
