"""Rights that one process at a time has, in a store with exclusive create: leases that their holder renews.

A right is a series of numbered objects, `=hold/<name>/<n>`; the highest number counts. The holder rewrites its own
object every two seconds. Another process takes the right by creating the next number, which only one can, once the
highest object has not changed for six seconds by its own clock, or is marked as free. Clocks are never compared, and no
process overwrites another's object.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloom import one_line
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.stores.base import Listed, ObjectStore

logger = logging.getLogger("kvloom.backend_fsspec")

LEASE_SECONDS = 6.0
RENEW_SECONDS = 2.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_NUMBER = re.compile(r"0[0-9]{11}")
"""Others are nobody's: behind the last number that has a place there would be none."""
_FREE = b"free"


@dataclass
class _Held:
    number: int
    renewed: float
    """Time of the last confirmation that the right is ours, in seconds of this process's clock."""
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Seen:
    entry: Listed
    since: float


class Leases:
    """The rights of one instance of the backend, in one process."""

    def __init__(self, names: Names, store: Callable[[], ObjectStore]) -> None:
        self._names, self._store = names, store
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._me = uuid.uuid4().hex
        self._held: dict[str, _Held] = {}
        self._seen: dict[str, _Seen] = {}

    def take(self, name: str) -> bool:
        """Try to take the right; return whether this instance has it now. Waits for nothing but the store."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"hold: {name!r} should be up to 100 of [A-Za-z0-9._-]")
        if self._pid != os.getpid():
            self._begin()  # the inherited rights are the parent's
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                if time.monotonic() - held.renewed < LEASE_SECONDS and not held.ended.is_set():
                    return True
                self._held.pop(name).ended.set()
            return self._take(name)

    def _take(self, name: str) -> bool:
        before = time.monotonic()
        highest = self._highest(name)
        if highest is not None and not self._is_over(name, highest, before):
            return False
        number = _number(highest) + 1 if highest is not None else 1
        if not self._store().create(self._object(name, number), self._content()):
            return False
        self._seen.pop(name, None)
        held = self._held[name] = _Held(number, before)
        if highest is not None:
            self._store().delete([highest.name])
        # The thread keeps no reference to this object while it sleeps, so that an unclosed backend can be collected.
        work = threading.Thread(target=_renew, args=(weakref.ref(self), name, held), name="kvloom-lease", daemon=True)
        try:
            work.start()
        except RuntimeError as error:  # the machine has no more threads: the right ends by itself
            logger.warning("the right %s is not renewed: %s", name, one_line(error))
        return True

    def _highest(self, name: str) -> Listed | None:
        directory = self._names.right(name)
        found = [one for one in self._store().list(directory) if _NUMBER.fullmatch(one.name.rpartition("/")[2])]
        return max(found, key=_number, default=None)

    def _is_over(self, name: str, entry: Listed, now: float) -> bool:
        if entry.bytes == len(_FREE):
            return True
        seen = self._seen.get(name)
        if seen is None or seen.entry != entry:
            self._seen[name] = _Seen(entry, now)
            return False
        return now - seen.since >= LEASE_SECONDS

    def renew(self, name: str, held: _Held) -> None:
        """Renew the right, unless another process has taken it."""
        before = time.monotonic()
        over, successor = before - held.renewed >= LEASE_SECONDS, self._object(name, held.number + 1)
        if over or self._store().size(successor) is not None:
            held.ended.set()  # this process was asleep for too long
            return
        self._store().put(self._object(name, held.number), self._content())
        held.renewed = before

    def release(self) -> None:
        """Give every right back. A forked child gives nothing back, because the rights are its parent's."""
        if self._pid != os.getpid():
            return
        with self._lock:
            held, self._held = self._held, {}
        for name, one in held.items():
            if one.ended.is_set():
                continue
            one.ended.set()
            try:
                if time.monotonic() - one.renewed < LEASE_SECONDS:
                    self._store().put(self._object(name, one.number), _FREE)
            except Exception as error:
                logger.info("the right %s was not given back, and ends by itself: %s", name, one_line(error))

    def _object(self, name: str, number: int) -> str:
        return f"{self._names.right(name)}/{number:012d}"

    def _content(self) -> bytes:
        return f"{self._me} {uuid.uuid4().hex}".encode()


def _renew(leases: weakref.ref[Leases], name: str, held: _Held) -> None:
    while not held.ended.wait(RENEW_SECONDS):
        alive = leases()
        if alive is None:
            return
        try:
            alive.renew(name, held)
        except Exception as error:  # tried again until the lease is over
            logger.info("the right %s was not renewed: %s", name, one_line(error))
        del alive


def _number(entry: Listed) -> int:
    return int(entry.name.rpartition("/")[2])
