"""The HTTP server that every listener here is: what it takes up at most, and what it answers to nonsense."""

from __future__ import annotations

import gc
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom_observe import http_server
from kvloom_observe.http_messages import Request, RequestError, Response
from kvloom_observe.http_server import HTTPServer, Later, Limits, listening


class Served:
    """A server on this thread, with a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[Request] = []
        self.made = 0
        self.executor = ThreadPoolExecutor(1)
        limits = Limits(connections=3, head_bytes=512, body_bytes=64, seconds=10.0)
        listener = listening("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.server = HTTPServer(listener, self.handle, limits, now=lambda: self.now)
        self.clients: list[socket.socket] = []

    def handle(self, request: Request) -> Response | Later:
        self.asked.append(request)
        if request.target == "/later":
            return Later(self.executor, self.late, most=2)
        if request.target == "/refused":
            raise RequestError(403, "no")
        if request.target == "/broken":
            raise KeyError(request.target)
        return Response(200, request.body or b"answer", (("X-Mine", "1"),))

    def late(self) -> Response:
        self.made += 1
        return Response(200, b"late")

    def connect(self, text: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.address, timeout=10)
        self.clients.append(client)
        client.sendall(text)
        return client

    def turn(self, times: int = 4) -> None:
        for _ in range(times):
            self.server.step(0.0)

    def ask(self, text: bytes) -> bytes:
        client = self.connect(text)
        self.turn()
        return received(client)

    @property
    def count(self) -> int:
        return len(self.server._connections)


def received(client: socket.socket) -> bytes:
    """Up to the end, which must have come already."""
    client.settimeout(10)
    got = b""
    while more := client.recv(65536):
        got += more
    return got


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.close()
    one.executor.shutdown()
    for client in one.clients:
        client.close()


def test_requests_and_their_answers(served: Served) -> None:
    told = served.ask(b"GET /x?y=1 HTTP/1.1\r\nHost: h\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200 OK\r\nX-Mine: 1\r\nContent-Length: 6\r\nConnection: close\r\n\r\nanswer")
    assert served.asked[-1].target == "/x?y=1" and served.asked[-1].headers["host"] == "h"
    assert served.ask(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody").endswith(b"\r\n\r\nbody")
    head = served.ask(b"HEAD / HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 6" in head and head.endswith(b"\r\n\r\n")
    assert served.count == 0


def test_a_request_in_pieces(served: Served) -> None:
    client = served.connect()
    for piece in (b"POST / HTTP/1.1\r", b"\nContent-Length: 4\r\n\r", b"\nbo", b"dy"):
        client.sendall(piece)
        served.turn(2)
    assert received(client).endswith(b"body")


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (b"\0\0\0\r\n\r\n", 400, b"not a request"),
        (b"GET /\r\n\r\n", 400, b"not a request"),
        (b"GET / HTTP/2\r\n\r\n", 400, b"not a request"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 600, 431, b"more than 512 bytes"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 600 + b"\r\n\r\n", 431, b"more than 512 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 120 + b"\r\n", 431, b"headers"),
        (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n{}", 413, b"64 bytes at most"),
        (b"POST / HTTP/1.1\r\nContent-Length: 65\r\n\r\n" + b"x" * 65, 413, b"64 bytes at most"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, b"not a number"),
        (b"POST / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 400, b"not a number"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, b"not a number"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411, b"send Content-Length"),
        (b"GET /refused HTTP/1.1\r\n\r\n", 403, b"no"),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500, b"its log says why"),
    ],
)
def test_each_refusal_has_a_status_and_a_reason(served: Served, text: bytes, status: int, reason: bytes) -> None:
    client = served.connect(text)
    client.shutdown(socket.SHUT_WR)
    served.turn()
    told = received(client)
    assert told.startswith(f"HTTP/1.1 {status} ".encode()) and reason in told
    served.turn()
    assert served.count == 0


def test_a_new_connection_takes_the_place_of_an_idle_one(served: Served) -> None:
    idle = [served.connect(b"GET /") for _ in range(3)]
    served.turn()
    waiting = served.connect(b"GET / HTTP/1.1\r\n\r\n")
    served.turn()
    assert served.count == 3 and all(map(is_open, idle)), "these may still be about to ask"
    served.now = 1.5
    served.turn()
    assert received(waiting).endswith(b"answer")
    assert [is_open(one) for one in idle] == [False, True, True]


def test_who_sends_or_reads_too_slowly_is_dropped(served: Served) -> None:
    slow = served.connect(b"GET /")
    served.turn()
    for served.now in (5.0, 9.9):
        slow.sendall(b"x")
        served.turn()
    assert is_open(slow)
    served.now = 10.0
    served.turn()
    assert not is_open(slow) and served.count == 0


def test_an_answer_that_nobody_reads_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.server, "_handle", lambda _: Response(200, bytes(32 << 20)))
    served.connect(b"GET / HTTP/1.1\r\n\r\n")
    served.turn()
    assert served.count == 1
    served.now = 10.0
    served.turn()
    assert served.count == 0


def test_long_answers_are_queued_and_bounded(served: Served) -> None:
    go = threading.Event()
    served.executor.submit(go.wait, 30)
    first, gone = (served.connect(b"GET /later HTTP/1.1\r\n\r\n") for _ in range(2))
    served.turn()
    assert b" 503 " in served.ask(b"GET /later HTTP/1.1\r\n\r\n")
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()
    served.turn()
    assert served.count == 1, "who has gone is not answered"
    go.set()
    assert served.executor.submit(lambda: served.made).result(30) == 1
    served.turn()
    assert received(first).endswith(b"late")


def test_nothing_is_queued_for_who_has_gone(served: Served) -> None:
    go = threading.Event()
    served.executor.submit(go.wait, 30)
    for _ in range(5):
        gone = served.connect(b"GET /later HTTP/1.1\r\n\r\n")
        served.turn()
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        served.turn()
    try:
        assert served.count == 0 and served.executor._work_queue.qsize() <= 1
    finally:
        go.set()


def test_the_last_descriptors_are_left_to_the_process(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # sockets that tests before this one have left would be closed in the middle of it
    lowest = os.dup(0)
    os.close(lowest)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (lowest + 2, lowest + 2))
    assert http_server._few_descriptors(lowest + 1)
    client = served.connect(b"GET / HTTP/1.1\r\n\r\n")
    served.turn()
    assert not is_open(client) and served.count == 0
    served.connect()
    served.turn()
    assert served.count == 0 and not served.server._accepts(served.now), "it is left in the queue for a moment"
    monkeypatch.undo()
    served.now += 1.0
    served.turn()
    assert served.count == 1


def test_without_descriptors_it_waits_and_does_not_spin(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = served.connect(b"GET / HTTP/1.1\r\n\r\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # sockets that tests before this one have left would be closed in the middle of it
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        served.turn()
        assert served.count == 0 and not served.server._accepts(served.now)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    served.now += 1.0
    served.turn()
    assert received(client).endswith(b"answer")
