from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest


@dataclass
class Fault:
    """A fault in one reply, after `at` bytes of it."""

    kind: str = "none"
    at: int = 0
    size: int = 1
    go_on: threading.Event = field(default_factory=threading.Event)
    """Ends a stall."""
    gone_on: threading.Event = field(default_factory=threading.Event)
    """Send the replies that were stalled."""

    def send(self, connection: socket.socket, reply: bytes) -> None:
        """Send what is left of a reply; ConnectionError if the connection ends with it."""
        at = min(self.at, len(reply))
        if self.kind == "stall":
            try:
                connection.sendall(reply[:at])
                self.go_on.wait(60)  # the client has given up by then; the rest comes all the same
                connection.sendall(reply[at:])
            finally:
                self.gone_on.set()
        elif self.kind == "cut":
            connection.sendall(reply[:at])
            raise ConnectionAbortedError
        elif self.kind == "lose":
            connection.sendall(reply[:at] + reply[at + self.size :])
        elif self.kind == "add":
            connection.sendall(reply[:at] + b"$9\r\n"[: self.size] * 3 + reply[at:])
        elif self.kind == "flip" and at < len(reply):
            connection.sendall(reply[:at] + bytes([reply[at] ^ 1 << self.size % 8]) + reply[at + 1 :])
        elif self.kind == "repeat":
            connection.sendall(reply)
            time.sleep(0.05)
            connection.sendall(reply)
        elif self.kind == "dribble":
            for start in range(0, len(reply), max(1, len(reply) // 5)):
                connection.sendall(reply[start : start + max(1, len(reply) // 5)])
        else:
            connection.sendall(reply)


class ScriptedServer:
    """Speaks as much RESP as the backend asks of it. Each of `faults` spoils one reply to GET or GETRANGE."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.faults: list[Fault] = []
        self._stalled: list[Fault] = []
        self.hello = b"-NOPERM may not say hello\r\n"
        self.replies: dict[bytes, bytes | list[bytes]] = {}
        """In place of what would be said to a command: always the same, or one after the other."""
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Send the rest of what was stalled, and return when it is sent: nobody is waiting for it any more."""
        while self._stalled:
            fault = self._stalled.pop()
            fault.go_on.set()
            fault.gone_on.wait(60)

    def close(self) -> None:
        self.go_on()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        self._thread.join(5)

    def hang_up(self) -> None:
        while self.connections:
            with contextlib.suppress(OSError):
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError), connection.makefile("rb") as requests:
            while line := requests.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(requests.readline()[1:])
                    words.append(requests.read(size + 2)[:-2])
                self._reply(connection, words)

    def _reply(self, connection: socket.socket, words: list[bytes]) -> None:
        verb, *rest = words
        fault = Fault()
        if verb in self.replies:
            said = self.replies[verb]
            reply = said if isinstance(said, bytes) else said.pop(0)
        elif verb in (b"GET", b"GETRANGE"):
            blob = self.blobs.get(rest[0])
            if verb == b"GETRANGE":
                blob = (blob or b"")[int(rest[1]) : int(rest[2]) + 1]
            reply = b"$-1\r\n" if blob is None else b"$%d\r\n%b\r\n" % (len(blob), blob)
            if self.faults:
                fault = self.faults.pop(0)
        elif verb in (b"EXISTS", b"TOUCH", b"UNLINK"):
            reply = b":%d\r\n" % (rest[0] in self.blobs)
        elif verb == b"STRLEN":
            reply = b":%d\r\n" % len(self.blobs.get(rest[0], b""))
        elif verb == b"SET":
            self.blobs[rest[0]] = rest[1]
            reply = b"+OK\r\n"
        elif verb == b"HELLO":
            reply = self.hello
        else:
            reply = b"-NOPERM no\r\n"
        if fault.kind == "stall":
            self._stalled.append(fault)
        fault.send(connection, reply)


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def fault() -> type[Fault]:
    return Fault


@pytest.fixture(scope="session")
def scripted_server() -> type[ScriptedServer]:
    return ScriptedServer
