"""Hosts of one machine with cables that can be pulled: network namespaces on a bridge. Linux, root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_NETWORK = "198.18"  # reserved for tests of networks (RFC 2544), never routed


class Namespaces:
    """A bridge, at which this machine listens and connects as one more host, and a namespace for each of `hosts`."""

    can_cut = True

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: a letter each. Raises OSError or CalledProcessError where this machine does not allow it."""
        self.hosts = tuple(hosts)
        self._bridge = f"kvl{os.getpid()}"
        self._subnet = _free_subnet()
        self.address = f"{self._subnet}.1"
        """This machine's address, as the hosts see it."""
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host in self.hosts:
                self._add(host)
        except BaseException:
            self.close()
            raise

    def address_of(self, host: str) -> str:
        return f"{self._subnet}.{2 + self.hosts.index(host)}"

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on `host`."""
        return ["ip", "netns", "exec", self._name(host), *arguments]

    def cut(self, host: str) -> None:
        """Pull the host's cable."""
        _ip("link", "set", self._name(host), "down")

    def heal(self, host: str) -> None:
        """Plug it in again."""
        _ip("link", "set", self._name(host), "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down."""
        for command in [*(("netns", "del", self._name(host)) for host in self.hosts), ("link", "del", self._bridge)]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*command)

    def _add(self, host: str) -> None:
        name = self._name(host)
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", self._bridge, "up")
        for command in (f"address add {self.address_of(host)}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _ip("-n", name, *command.split())

    def _name(self, host: str) -> str:
        return f"{self._bridge}{host}"


def namespaces(hosts: Sequence[str]) -> tuple[Namespaces | None, str]:
    """Hosts with cables, or None, and why this machine has none."""
    if os.name != "posix" or os.getuid() != 0 or shutil.which("ip") is None:
        return None, "network namespaces need root and iproute2, on Linux"
    try:
        return Namespaces(hosts), ""
    except (OSError, subprocess.CalledProcessError) as refused:
        said = getattr(refused, "stderr", "") or ""
        return None, f"this machine refuses network namespaces: {said.strip() or refused}"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _free_subnet() -> str:
    """One that this machine is not in: others may be running the same."""
    taken = _ip("-4", "-oneline", "address")
    numbers = ((os.getpid() + step) % 256 for step in range(256))
    for number in numbers:
        if f" {_NETWORK}.{number}." not in taken:
            return f"{_NETWORK}.{number}"
    raise OSError(f"every network {_NETWORK}.x is in use")
