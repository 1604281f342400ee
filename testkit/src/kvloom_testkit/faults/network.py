"""A TCP proxy that delays, cuts, corrupts or swallows what goes through it: a bad network for tests of clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

_START_SECONDS = 10.0
_READ_BYTES = 1 << 16


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port of 127.0.0.1 at which every connection is refused.

    It is bound and does not listen, so that no other process can come to listen there meanwhile.
    """
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@dataclass
class Faults:
    """Faults in the bytes of one direction. May be changed at any time; each connection has its own counts."""

    delay_seconds: float = 0.0
    """Before each piece is passed on."""
    cut_after_bytes: int | None = None
    """Number of bytes that are passed on before the connection is cut."""
    flip_at: int | None = None
    """The byte, counted from 0, whose lowest bit is turned round."""
    flip_each: int | None = None
    """Distance in bytes of those whose lowest bit is turned round; the first is the last of so many."""
    black_hole: bool = False
    """Nothing is passed on, and nothing is said."""


@dataclass
class TcpProxy:
    """`with TcpProxy(host, port) as proxy:` listens at `proxy.port` of 127.0.0.1, on a thread of its own."""

    upstream_host: str
    upstream_port: int
    requests: Faults = field(default_factory=Faults)
    """From the client to the server."""
    answers: Faults = field(default_factory=Faults)
    """From the server to the client."""
    host: str = field(default="127.0.0.1", init=False)
    port: int = field(default=0, init=False)
    """The port it listens on."""
    connections: int = field(default=0, init=False)
    """Number of connections so far."""

    def __enter__(self) -> TcpProxy:
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvloom-tcp-proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_SECONDS) or self._error is not None:
            raise RuntimeError("the proxy did not start") from self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        serving: set[asyncio.Task[None]] = set()

        # Neither asyncio's server nor `sock_accept`: when they end, they forget whom they have just accepted.
        def accept() -> None:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                client, _ = listener.accept()
                client.setblocking(False)
                self.connections += 1
                task = asyncio.ensure_future(self._connect(client))
                serving.add(task)
                task.add_done_callback(serving.discard)

        with socket.create_server((self.host, 0)) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            self._loop.add_reader(listener, accept)
            self._ready.set()
            await self._stop.wait()
            self._loop.remove_reader(listener)
        await asyncio.sleep(0)  # who was accepted last begins, so that it can end
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _connect(self, client: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            reader, writer = await asyncio.open_connection(sock=client)
            writers.append(writer)
            there, back = await asyncio.open_connection(self.upstream_host, self.upstream_port)
            writers.append(back)
            # The first direction that is cut, on purpose or not, takes the other with it.
            await _both(_pass_on(reader, back, self.requests), _pass_on(there, writer, self.answers))
        except OSError:
            pass  # both ends learn of it
        finally:
            for one in writers:
                one.close()
            if not writers:
                client.close()


async def _both(*directions: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(one) for one in directions]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults) -> None:
    passed = 0
    while data := bytearray(await reader.read(_READ_BYTES)):
        if faults.black_hole:
            continue
        if faults.delay_seconds:
            await asyncio.sleep(faults.delay_seconds)
        if faults.flip_at is not None and passed <= faults.flip_at < passed + len(data):
            data[faults.flip_at - passed] ^= 1
        if faults.flip_each is not None:
            for at in range(faults.flip_each - 1 - passed % faults.flip_each, len(data), faults.flip_each):
                data[at] ^= 1
        if faults.cut_after_bytes is not None and passed + len(data) > faults.cut_after_bytes:
            writer.write(data[: faults.cut_after_bytes - passed])
            await writer.drain()
            raise ConnectionAbortedError
        writer.write(data)
        await writer.drain()
        passed += len(data)
    if not faults.black_hole:
        with contextlib.suppress(OSError):
            writer.write_eof()
