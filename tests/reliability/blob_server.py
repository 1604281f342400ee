"""A blob server in a process of its own, and a backend that asks it: what a client library that waits for ever is like.

`python blob_server.py PORT` serves on 127.0.0.1 until killed; it says its port when it is ready.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from kvloom import Buffer, Buffers, Config, Entry, Sink, StorageBackend, hookimpl

_REQUEST = struct.Struct("<cHQ")
_REPLY = struct.Struct("<?Q")
_PIECE_BYTES = 64 << 10


def receive(connection: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = connection.recv_into(into[done : done + _PIECE_BYTES])
        if not got:
            raise ConnectionError("the server hung up")
        done += got


def received(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    receive(connection, memoryview(data))
    return data


# -- the server --------------------------------------------------------------------------------------------------------


class _Handler(socketserver.BaseRequestHandler):
    blobs: dict[bytes, bytes] = {}  # noqa: RUF012

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                verb, key_size, size = _REQUEST.unpack(received(self.request, _REQUEST.size))
                key, blob = bytes(received(self.request, key_size)), received(self.request, size)
                found, data = self.answer(verb, key, bytes(blob))
                self.request.sendall(_REPLY.pack(found, len(data)))
                for at in range(0, len(data), _PIECE_BYTES):
                    self.request.sendall(data[at : at + _PIECE_BYTES])
                    time.sleep(0.001)  # so that whoever stops this process may well hit the middle of a blob

    def answer(self, verb: bytes, key: bytes, blob: bytes) -> tuple[bool, bytes]:
        if verb == b"p":
            self.blobs[key] = blob
        elif verb == b"d":
            self.blobs.pop(key, None)
        elif verb == b"l":
            rows = [f"{k.decode()} {len(v)}" for k, v in list(self.blobs.items()) if k.startswith(key)]
            return True, "\n".join(rows).encode()
        elif verb == b"g":
            return key in self.blobs, self.blobs.get(key, b"")
        return key in self.blobs, b""


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class ServerProcess:
    """The server, to be stopped, woken and killed."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, str(port)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


# -- the client --------------------------------------------------------------------------------------------------------


class RemoteBackend(StorageBackend):
    """Asks the server, and waits for its answer as long as it takes."""

    type = "remote"
    shared = True

    class Config(Config):
        port: int

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config)
        self._port = config.port
        self._mine = threading.local()
        self._made: list[socket.socket] = []

    def close(self) -> None:
        for connection in self._made:
            connection.close()

    @contextlib.contextmanager
    def _ask(self, verb: bytes, key: str, blob: Buffers = ()) -> Iterator[tuple[socket.socket, bool, int]]:
        connection: socket.socket | None = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = socket.create_connection(("127.0.0.1", self._port))
            self._made.append(connection)
        views = [memoryview(part).cast("B") for part in blob]
        name = key.encode()
        try:
            connection.sendall(_REQUEST.pack(verb, len(name), sum(map(len, views))) + name)
            for view in views:
                connection.sendall(view)
            found, size = _REPLY.unpack(received(connection, _REPLY.size))
            yield connection, found, size
        except BaseException:  # what is left of an answer must not be taken for the next one's
            connection.close()
            self._mine.connection = None
            raise

    def put(self, key: str, blob: Buffers) -> None:
        with self._ask(b"p", key, blob):
            pass

    def get(self, key: str) -> Buffer | None:
        with self._ask(b"g", key) as (connection, found, size):
            data = received(connection, size)
        return data if found else None

    def get_into(self, key: str, sink: Sink) -> bool:
        with self._ask(b"g", key) as (connection, found, size):
            if found:
                room = sink.reserve(size)
                for at in range(0, size, _PIECE_BYTES):
                    receive(connection, room[at : min(size, at + _PIECE_BYTES)])
                    sink.filled(min(size, at + _PIECE_BYTES))
        return found

    def contains(self, key: str) -> bool:
        with self._ask(b"c", key) as (_, found, _):
            return found

    def delete(self, key: str) -> None:
        with self._ask(b"d", key):
            pass

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        with self._ask(b"l", prefix) as (connection, _, size):
            text = received(connection, size).decode()
        for line in text.splitlines():
            key, _, num_bytes = line.partition(" ")
            yield Entry(key, int(num_bytes), 0.0)


@hookimpl
def kvloom_storage_backends() -> list[type[StorageBackend]]:
    return [RemoteBackend]


if __name__ == "__main__":
    with _Server(("127.0.0.1", int(sys.argv[1])), _Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
