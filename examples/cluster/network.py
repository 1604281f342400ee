"""Two hosts: network namespaces with a cable to one switch where this machine lets us make them, else two processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

HOSTS = ("a", "b")
_SUBNET = "198.18.77"  # reserved for tests of networks (RFC 2544): nobody routes to it


class Network:
    """Hosts are processes of this machine, and the network cannot be cut."""

    address = "127.0.0.1"
    """Where hosts find the stores."""
    can_cut = False

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """What runs `arguments` on `host`."""
        return list(arguments)

    def cut(self, host: str) -> None:
        """Pull the host's cable."""
        raise NotImplementedError

    def heal(self, host: str) -> None:
        """Plug it in again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down."""


class Namespaces(Network):
    """A bridge, which the stores listen at, and a namespace for each host. Needs root on Linux, and iproute2."""

    address = f"{_SUBNET}.1"
    can_cut = True

    def __init__(self) -> None:
        """Raises OSError or CalledProcessError where this machine does not allow it."""
        self._bridge = f"kvl{os.getpid()}"
        try:
            self._ip("link", "add", self._bridge, "type", "bridge")
            self._ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            self._ip("link", "set", self._bridge, "up")
            for number, host in enumerate(HOSTS, start=2):
                self._add(host, f"{_SUBNET}.{number}/24")
        except BaseException:
            self.close()
            raise

    def _add(self, host: str, address: str) -> None:
        name = self._name(host)
        self._ip("netns", "add", name)
        self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("link", "set", name, "master", self._bridge, "up")
        for command in (f"address add {address} dev eth0", "link set eth0 up", "link set lo up"):
            self._ip("-n", name, *command.split())

    def _name(self, host: str) -> str:
        return f"{self._bridge}{host}"

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._name(host), *arguments]

    def cut(self, host: str) -> None:
        self._ip("link", "set", self._name(host), "down")

    def heal(self, host: str) -> None:
        self._ip("link", "set", self._name(host), "up")

    def close(self) -> None:
        for command in [*(("netns", "del", self._name(host)) for host in HOSTS), ("link", "del", self._bridge)]:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ip(*command)


def network(processes: bool) -> tuple[Network, str]:
    """The best that this machine allows, and why it is not more."""
    if processes:
        return Network(), "as asked for"
    if os.name != "posix" or os.getuid() != 0 or shutil.which("ip") is None:
        return Network(), "network namespaces need root and iproute2, on Linux"
    try:
        return Namespaces(), ""
    except (OSError, subprocess.CalledProcessError) as refused:
        said = getattr(refused, "stderr", b"") or b""
        return Network(), f"this machine refuses network namespaces: {said.decode().strip() or refused}"


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
