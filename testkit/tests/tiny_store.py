"""A server of blobs over TCP in one class, and the backend that talks to it: what network faults are tried on."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from kvloom import Buffer, Buffers, Config, StorageBackend, hookimpl, join


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return
        verb, key, size = json.loads(line)
        blobs: dict[str, bytes] = self.server.blobs  # type: ignore[attr-defined]
        answer = b""
        if verb == "put":
            blob = self.rfile.read(size)
            if len(blob) < size:
                return
            blobs[key] = blob
        elif verb == "delete":
            blobs.pop(key, None)
        else:
            answer = blobs.get(key, b"")
        self.wfile.write(b"%d\n" % (len(answer) if verb != "contains" else key in blobs) + answer)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that was cut."""


@contextmanager
def serving() -> Iterator[tuple[int, dict[str, bytes]]]:
    """The port of a new server, and its blobs."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        blobs: dict[str, bytes] = {}
        server.blobs = blobs  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1], blobs
        finally:
            server.shutdown()
            thread.join(10)


class TinyBackend(StorageBackend):
    """A connection for each call, which is slow, and safe on threads and in forks."""

    type = "tiny"
    shared = True
    persistent = True

    class Config(Config):
        port: int
        timeout_seconds: float = 5.0

    def put(self, key: str, blob: Buffers) -> None:
        self._ask("put", key, join(blob))

    def get(self, key: str) -> Buffer | None:
        return self._ask("get", key)[1] or None

    def contains(self, key: str) -> bool:
        return self._ask("contains", key)[0] > 0

    def delete(self, key: str) -> None:
        self._ask("delete", key)

    def _ask(self, verb: str, key: str, blob: bytes = b"") -> tuple[int, bytes]:
        where = ("127.0.0.1", self.config.port)  # type: ignore[attr-defined]
        with socket.create_connection(where, self.config.timeout_seconds) as connection:  # type: ignore[attr-defined]
            connection.sendall(json.dumps([verb, key, len(blob)]).encode() + b"\n" + blob)
            with connection.makefile("rb") as answer:
                number = int(answer.readline())
                data = answer.read(number) if verb == "get" else b""
                if verb == "get" and len(data) < number:
                    raise ConnectionError(f"{len(data)} bytes of {number}")
        return number, data


class Provided:
    """Components that this module's plugin provides, set by each test."""

    classes: ClassVar[list[type[StorageBackend]]] = []


@hookimpl
def kvloom_storage_backends() -> list[type[StorageBackend]]:
    return Provided.classes
