"""Connections that wait to be used again, by server; and how new ones are made."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvloom_backend_redis.address import Endpoint
from kvloom_backend_redis.config import RedisConfig, shown
from kvloom_backend_redis.errors import ProtocolError, Unreachable
from kvloom_backend_redis.link import Link, packed


class Links:
    """Connections to any number of servers with one login. Those from before a fork are the parent's.

    Without a lock, which a child could inherit locked: lists and dictionaries change in one step each.
    """

    def __init__(self, config: RedisConfig, *, db: int, sentinels: bool = False) -> None:
        self._config = config
        self._db = db
        self._username = config.sentinel_username if sentinels else config.username
        self._password = config.sentinel_password if sentinels else config.password
        self._most_idle = config.threads + 8
        self._idle: dict[Endpoint, list[Link]] = {}
        self._pid = os.getpid()
        self.closed = False

    @property
    def patience(self) -> float:
        """Seconds that an exchange with one server may take."""
        return self._config.timeout

    @contextlib.contextmanager
    def link(self, endpoint: Endpoint) -> Iterator[Link]:
        """A connection for one exchange; it is kept for the next one only if it ends `clean`.

        Raises Unreachable, or ServerError if the server rejects the login.
        """
        link = self.take(endpoint)
        try:
            yield link
        finally:
            self.give_back(endpoint, link)

    def take(self, endpoint: Endpoint) -> Link:
        """A connection to `give_back`, whatever happens. Raises as `link`."""
        return self._waiting(endpoint) or self._connected(endpoint)

    def give_back(self, endpoint: Endpoint, link: Link) -> None:
        """Keep a connection for the next exchange, or close it if this one did not end `clean`."""
        idle = self._idle.get(endpoint)
        if idle is None:
            idle = self._idle.setdefault(endpoint, [])
        if link.clean and not self.closed and link.pid == os.getpid() and len(idle) < self._most_idle:
            idle.append(link)
        else:
            link.close()

    def drop(self, endpoint: Endpoint) -> None:
        """Close those that wait: the server is gone, or was."""
        idle = self._idle.get(endpoint, [])
        while True:
            try:
                idle.pop().close()
            except IndexError:
                return

    def close(self) -> None:
        self.closed = True
        for endpoint in tuple(self._idle):
            self.drop(endpoint)

    def _waiting(self, endpoint: Endpoint) -> Link | None:
        if self._pid != os.getpid():
            inherited, self._idle = self._idle, {}
            self._pid = os.getpid()
            for links in inherited.values():
                for link in links:
                    link.close()  # this process's copy of the descriptor: nothing is said to the server
        idle = self._idle.get(endpoint)
        while idle:
            try:
                link = idle.pop()
            except IndexError:
                return None
            if link.silent:
                return link
            link.close()  # the server hung up meanwhile, or sent something unasked
        return None

    def _sweep(self) -> None:
        """Close those whose server has hung up: it may have been replaced by one of another address."""
        for idle in tuple(self._idle.values()):
            for _ in range(len(idle)):
                try:
                    link = idle.pop(0)
                except IndexError:
                    break
                if link.silent:
                    idle.append(link)
                else:
                    link.close()

    def _connected(self, endpoint: Endpoint) -> Link:
        self._sweep()
        dialled = self._dialled(endpoint)
        try:
            dialled.connect()
        except (exceptions.RedisError, OSError, ValueError) as error:  # the last of a name that there cannot be
            raise Unreachable(f"no connection to {endpoint}: {error}") from None
        link = Link(_taken(dialled), timeout=self._config.connect_timeout)
        try:
            self._log_in(link)
            link.be_patient(self._config.timeout)
        except BaseException as error:
            link.close()
            if isinstance(error, (OSError, ProtocolError)):
                raise Unreachable(f"no connection to {endpoint}: logging in: {error}") from None
            raise
        return link

    def _log_in(self, link: Link) -> None:
        """Not left to redis-py: what comes a byte at a time would keep it for ever."""
        password = shown(self._password)
        words = [word.encode() for word in (self._username, password) if word is not None]
        requests = [packed(b"AUTH", *words)] if password is not None else []
        if self._db:
            requests.append(packed(b"SELECT", b"%d" % self._db))
        for request in requests:
            link.send(request)
            if link.answer() != b"OK":
                raise ProtocolError("the answer is not a Redis server's")

    def _dialled(self, endpoint: Endpoint) -> Any:  # redis-py leaves these untyped
        config = self._config
        settings: dict[str, Any] = {
            "socket_timeout": config.connect_timeout,
            "socket_connect_timeout": config.connect_timeout,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # nothing comes unasked
            "driver_info": None,  # a user may not be allowed to say it
        }
        kind: Any = Connection
        if not endpoint.port:
            kind, settings["path"] = UnixDomainSocketConnection, endpoint.host
        else:
            settings |= {"host": endpoint.host, "port": endpoint.port}
        if config.address.tls:
            kind = SSLConnection
            settings |= {
                "ssl_cert_reqs": "required" if config.tls_verify else "none",
                "ssl_check_hostname": config.tls_verify,
                "ssl_ca_certs": _text(config.tls_ca),
                "ssl_certfile": _text(config.tls_cert),
                "ssl_keyfile": _text(config.tls_key),
            }
        return kind(**settings)


def _taken(dialled: Any) -> socket.socket:
    """The socket of a connection; redis-py would close it along with its own object."""
    taken: socket.socket | None = dialled._sock
    if taken is None:
        raise Unreachable("the connection was lost at once")
    dialled._sock = None
    return taken


def _text(path: object) -> str | None:
    return None if path is None else str(path)
