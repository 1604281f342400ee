"""Two hosts: network namespaces with a cable to one switch where this machine lets us make them, else two processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvloom_testkit.faults.namespaces import Namespaces, namespaces

HOSTS = ("a", "b")


class Processes:
    """Hosts are processes of this machine, and the network cannot be cut."""

    address = "127.0.0.1"
    """The address at which hosts find the stores."""
    can_cut = False

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on `host`."""
        return list(arguments)

    def cut(self, host: str) -> None:
        raise NotImplementedError

    def heal(self, host: str) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is to be taken down."""


Network = Processes | Namespaces


def network(processes: bool) -> tuple[Network, str]:
    """The best that this machine allows, and why it is not more."""
    if processes:
        return Processes(), "as asked for"
    hosts, why_not = namespaces(HOSTS)
    return hosts or Processes(), why_not


class Forward:
    """Passes connections to `address:port` on to 127.0.0.1, for stores that listen only there."""

    def __init__(self, address: str, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(lambda reader, writer: _join(reader, writer, port), address, port)
        )
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    with contextlib.suppress(OSError), contextlib.closing(writer):
        there, back = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(back):
            copies = [asyncio.ensure_future(_copy(reader, back)), asyncio.ensure_future(_copy(there, writer))]
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            for copy in copies:
                copy.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
