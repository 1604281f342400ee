"""A bound socket of ZeroMQ with a bounded number of connections: ZeroMQ itself takes as many as come."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import stat
import struct
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger("kvloom.events_zmq")

LINGER_SECONDS = 1.0
"""Time that closing continues to send published events."""
_HANDSHAKE_SECONDS = 5.0
"""Time that a connection has to finish ZeroMQ's handshake."""
_IDLE_SECONDS = 60
"""After so long, it is asked whether the other machine is still there."""
_STUCK_SECONDS = 30
"""After so long, a connection by TCP is dropped whose other end takes nothing: what waits for it takes memory."""
_MAX_MESSAGE_BYTES = 4096
"""Maximum size of an incoming message: subscriptions, and numbers to replay from."""
_MAX_WAITING_REQUESTS = 1000
_MAX_RECEIVED_BYTES = 4 << 20
"""From one connection by TCP. ZeroMQ keeps the parts of a message that does not end, however many they are."""
_LOOK_SECONDS = 0.1
"""Interval at which that is checked: what ZeroMQ keeps wakes nobody."""
_BYTES_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` in Linux's `struct tcp_info`."""
_MAX_SUBSCRIPTIONS = 256
"""Different ones, of all connections. ZeroMQ keeps as many as come, and each takes up to some 100 KiB."""
_PAUSE_SECONDS = 1.0
"""Pause of listening after there were too many connections."""
_SPARE_SHARE, _MAX_SPARE = 8, 64
"""File descriptors left for others: a share of the process's limit, and a maximum."""


class Listener:
    """For the thread that owns its sockets. With too many connections it drops all, and listens again soon after.

    So it does with too many subscriptions, and with a connection that sends too much: ZeroMQ can drop no single one.
    Subscribers connect again by themselves, and see by the numbers of batches what to have replayed.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, name: str, endpoint: str, *, hwm: int,
        max_connections: int,
    ) -> None:  # fmt: skip
        """name: the setting that has the endpoint. Raises ValueError if that is in use, or is not an endpoint."""
        self._most = max_connections
        self._subscriptions = 0
        self._connections: set[int] = set()
        self._bind_at: float | None = None
        self.socket = context.socket(kind)
        _bounded(self.socket, endpoint, hwm)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            _check_path(endpoint)
            self.socket.bind(endpoint)
        except OSError as error:
            self.close()
            raise ValueError(f"{name}: {error}; name another path") from error
        except zmq.ZMQError as error:
            text = f"cannot bind {endpoint}: {error.strerror}; name an address of this machine with a free port"
            raise ValueError(f"{name}: {text}") from error
        self.endpoint = self.socket.last_endpoint.decode().rstrip("\0")
        """The address it listens on, with the port chosen for a `*` or a 0."""

    def attend(self) -> float | None:
        """Take note of connections that came and went; in how many seconds to be called again at the latest."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.add(event["value"])
            else:
                self._connections.discard(event["value"])
        self._hear()
        if self._bind_at is None and self._too_many():
            log.warning(
                "%s: too many connections or subscriptions, or too long a message; all are dropped, and may come back",
                self.endpoint,
            )
            self.socket.unbind(self.endpoint)
            self._subscriptions = 0
            self._bind_at = time.monotonic() + _PAUSE_SECONDS
        if self._bind_at is None:
            return _LOOK_SECONDS if self._connections and self.endpoint.startswith("tcp://") else None
        if time.monotonic() < self._bind_at:
            return self._bind_at - time.monotonic()
        return self._bind_again()

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(1000 * LINGER_SECONDS))

    def _bind_again(self) -> float | None:
        self._connections.clear()
        try:
            _check_path(self.endpoint)
            self.socket.bind(self.endpoint)
        except (OSError, zmq.ZMQError):  # the port is in use, or ZeroMQ has not released it yet
            self._bind_at = time.monotonic() + _PAUSE_SECONDS
            return _PAUSE_SECONDS
        self._bind_at = None
        return None

    def _hear(self) -> None:
        """Count subscriptions: of equal ones, ZeroMQ tells the first that comes and the last that goes."""
        if self.socket.type != zmq.XPUB:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_SUBSCRIPTIONS):
                kind = self.socket.recv(zmq.NOBLOCK)[:1]
                self._subscriptions = max(0, self._subscriptions + (kind == b"\1") - (kind == b"\0"))

    def _too_many(self) -> bool:
        if len(self._connections) > self._most or self._subscriptions > _MAX_SUBSCRIPTIONS:
            return True
        if max(map(_received_bytes, self._connections), default=0) > _MAX_RECEIVED_BYTES:
            return True
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = min(most // _SPARE_SHARE, _MAX_SPARE)
        # A descriptor's number is the lowest that was free.
        return most != resource.RLIM_INFINITY and max(self._connections, default=0) >= most - spare


def _received_bytes(number: int) -> int:
    """Bytes that came by TCP through a descriptor; 0 where the system does not say, and if it is closed by now."""
    try:
        borrowed = socket.socket(fileno=number)
    except OSError:
        return 0
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        return int(_BYTES_RECEIVED.unpack(info)[0])
    except (OSError, AttributeError, struct.error):
        return 0
    finally:
        borrowed.detach()  # it is ZeroMQ's


def _check_path(endpoint: str) -> None:
    """Check the path, because ZeroMQ removes any file or socket there, even one in use. Raises OSError for these."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@"):  # no path
        return
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        raise OSError(f"{path}: too long for a socket ({zmq.IPC_PATH_MAX_LEN} bytes at most)")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with contextlib.suppress(ConnectionRefusedError):  # what a process that has ended left
            probe.connect(path)
            raise OSError(f"{path} is in use")


def _bounded(opened: zmq.Socket[bytes], endpoint: str, hwm: int) -> None:
    # With room for more, it would go on taking subscriptions within one call as long as they come.
    opened.sndhwm, opened.rcvhwm = hwm, 1 if opened.type == zmq.XPUB else _MAX_WAITING_REQUESTS
    opened.linger = int(1000 * LINGER_SECONDS)
    opened.ipv6 = "[" in endpoint
    opened.maxmsgsize = _MAX_MESSAGE_BYTES
    opened.handshake_ivl = int(1000 * _HANDSHAKE_SECONDS)
    opened.setsockopt(zmq.TCP_MAXRT, 1000 * _STUCK_SECONDS)
    opened.tcp_keepalive, opened.tcp_keepalive_idle = 1, _IDLE_SECONDS
