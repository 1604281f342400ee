"""Rights that one process at a time has in a store: keys that expire, renewed for as long as their holder lives."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
import weakref

from kvloom import BackendError, one_line
from kvloom_backend_redis.exchange import Exchange

logger = logging.getLogger("kvloom.backend_redis")

LEASE_SECONDS = 6.0
"""Time that a right outlives its holder: less than the ten seconds that the contract allows."""
RENEW_SECONDS = 2.0
_CLOSE_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_RENEW = b"return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"
_RELEASE = b"return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('del', KEYS[1]) or 0"


class Leases:
    """The rights that one instance of the backend has. A forked child has none, and gives none back."""

    def __init__(self, exchange: Exchange, prefix: bytes) -> None:
        self._exchange = exchange
        self._prefix = prefix + b"+hold-"  # no key of kvloom's has a '+'
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._token = secrets.token_hex(16).encode()
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        """Until when each right is surely this instance's, on the monotonic clock."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, name: str) -> bool:
        """Try to take the right; return whether this instance has it now. Raises ValueError for a bad name,
        BackendError and OSError."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"hold: {name!r} should be up to 100 of [A-Za-z0-9._-]")
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if time.monotonic() < self._until.get(name, 0.0):
                return True
        began = time.monotonic()
        key, lease = self._prefix + name.encode(), b"%d" % int(LEASE_SECONDS * 1000)
        mine = self._exchange.ask(key, b"SET", key, self._token, b"NX", b"PX", lease) is not None
        if mine or self._renewed(name):
            self._keep(name, began + LEASE_SECONDS)
            return True
        return False

    def close(self) -> None:
        """Give everything back; what cannot be is free when its lease is over."""
        if self._pid != os.getpid():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        with self._lock:
            held, self._until = list(self._until), {}
        for name in held:
            try:
                self._run(_RELEASE, name)
            except (BackendError, OSError) as error:
                logger.info("hold: %s stays taken for up to %.0f s: %s", name, LEASE_SECONDS, one_line(error))

    def _keep(self, name: str, until: float) -> None:
        with self._lock:
            self._until[name] = until
            if self._thread is None:
                # It keeps no reference to this object while it sleeps, so that an unclosed backend can be collected.
                work = (weakref.ref(self), self._closing)
                self._thread = threading.Thread(target=_keep_on, args=work, name="kvloom-redis-lease", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # the machine has no more threads: the right ends by itself
                    self._thread = None
                    logger.warning("hold: %s is not renewed: %s", name, one_line(error))

    def renew(self) -> None:
        """Have every right for another while."""
        with self._lock:
            names = list(self._until)
        for name in names:
            began = time.monotonic()
            try:
                still = self._renewed(name)
            except (BackendError, OSError) as error:
                logger.debug("hold: %s was not renewed: %s", name, one_line(error))
                continue  # it may be, before it runs out
            with self._lock:
                if still:
                    self._until[name] = began + LEASE_SECONDS
                else:
                    self._until.pop(name, None)

    def _renewed(self, name: str) -> bool:
        """Renew the right; return whether this instance had it."""
        return self._run(_RENEW, name, b"%d" % int(LEASE_SECONDS * 1000)) == 1

    def _run(self, script: bytes, name: str, *arguments: bytes) -> object:
        key = self._prefix + name.encode()
        return self._exchange.ask(key, b"EVAL", script, b"1", key, self._token, *arguments)


def _keep_on(leases: weakref.ref[Leases], closing: threading.Event) -> None:
    while not closing.wait(RENEW_SECONDS):
        alive = leases()
        if alive is None:
            return
        alive.renew()
        del alive
