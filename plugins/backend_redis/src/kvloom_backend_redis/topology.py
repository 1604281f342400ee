"""Finds the server of a key: the only one, the one that the Sentinels name, or the one of its slot in a cluster."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from redis.crc import key_slot

from kvloom import BackendError
from kvloom_backend_redis.address import Endpoint
from kvloom_backend_redis.errors import LinkLost, ProtocolError, ServerError, Unreachable
from kvloom_backend_redis.link import Reply, packed
from kvloom_backend_redis.links import Links

SLOTS = 16384
_HOST = re.compile(rb"[!-~]{1,253}")
_FRESH_SECONDS = 0.5
"""Minimum age of a topology before it is asked for again, unless a server says that it has changed."""

_HEAD_START_SECONDS = 0.1
"""Time that a server has for its answer before the next one is asked, too."""

NOBODY = Endpoint("", 0)
"""In place of the server of a slot that no node of a cluster serves."""


class Detour(NamedTuple):
    """Another server to ask."""

    endpoint: Endpoint
    asking: bool
    """It has the key on loan: a slot is being moved."""


class Topology(ABC):
    """The servers of a store. Several threads may use it at once: its state is replaced as a whole."""

    @abstractmethod
    def endpoint(self, key: bytes) -> Endpoint:
        """The server of a key, or NOBODY. Raises BackendError if there is none to ask for it."""

    @abstractmethod
    def masters(self) -> Sequence[Endpoint]:
        """All that serve keys."""

    @property
    def known(self) -> Sequence[Endpoint]:
        """Servers that share the keys, as far as they are known; asks nobody."""
        return ()

    def redirected(self, error: ServerError, from_: Endpoint) -> Detour | None:
        """The server to ask instead, if the error redirects."""
        return None

    def doubt(self, endpoint: Endpoint) -> None:
        """A connection was lost: it may be another server's turn by now."""

    def store_id(self) -> str | None:
        """The identity of the cluster, if known here."""
        return None


class Single(Topology):
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def endpoint(self, key: bytes) -> Endpoint:
        return self._endpoint

    def masters(self) -> Sequence[Endpoint]:
        return [self._endpoint]


class Sentinels(Topology):
    """The master of one service, as the first Sentinel says that answers."""

    def __init__(self, sentinels: Sequence[Endpoint], service: str, links: Links) -> None:
        self._sentinels = tuple(sentinels)
        self._service = service
        self._links = links
        self._master: Endpoint | None = None

    def endpoint(self, key: bytes) -> Endpoint:
        master = self._master
        if master is None:
            master = self._master = self._asked()
        return master

    def masters(self) -> Sequence[Endpoint]:
        return [self.endpoint(b"")]

    def redirected(self, error: ServerError, from_: Endpoint) -> Detour | None:
        if error.word != "READONLY":
            return None
        self._master = None  # it was demoted
        other = self.endpoint(b"")
        return None if other == from_ else Detour(other, asking=False)

    def doubt(self, endpoint: Endpoint) -> None:
        if self._master == endpoint:
            self._master = None

    def _asked(self) -> Endpoint:
        request = packed(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        answered, address = _first_answer(self._links, self._sentinels, request)
        if address is None:
            raise BackendError(f"the Sentinels know no service {self._service!r}")
        return _endpoint(address, answered)


class Cluster(Topology):
    """Nodes that serve 16384 slots between them."""

    def __init__(self, seeds: Sequence[Endpoint], links: Links) -> None:
        self._seeds = tuple(seeds)
        self._links = links
        self._nodes: tuple[Endpoint, ...] = ()
        self._slots: tuple[Endpoint, ...] = ()
        """Empty: to be asked for."""
        self._ids: tuple[str, ...] = ()
        self._asked_at = 0.0

    def endpoint(self, key: bytes) -> Endpoint:
        found = self._table()[key_slot(key)]
        if found is NOBODY:
            self.doubt(found)
        return found

    def masters(self) -> Sequence[Endpoint]:
        self._table()
        return self._nodes

    @property
    def known(self) -> Sequence[Endpoint]:
        return self._nodes

    def redirected(self, error: ServerError, from_: Endpoint) -> Detour | None:
        if error.word not in ("MOVED", "ASK"):
            return None
        host, _, port = error.rest.rpartition(" ")[2].rpartition(":")
        other = _endpoint([host.strip("[]").encode(), port.encode()], from_)
        if error.word == "MOVED":
            self._slots = ()  # where one slot has moved, more may have
        return Detour(other, asking=error.word == "ASK")

    def doubt(self, endpoint: Endpoint) -> None:
        if time.monotonic() - self._asked_at > _FRESH_SECONDS:
            self._slots = ()

    def store_id(self) -> str | None:
        self._table()
        return min(self._ids, default=None)

    def _table(self) -> tuple[Endpoint, ...]:
        slots = self._slots
        if not slots:
            self._asked_at = time.monotonic()
            known = tuple(dict.fromkeys([*self._nodes, *self._seeds]))
            answered, rows = _first_answer(self._links, known, packed(b"CLUSTER", b"SLOTS"))
            slots, self._nodes, self._ids = _table_of(rows, answered)
            self._slots = slots
        return slots


def _table_of(rows: Reply, answered: Endpoint) -> tuple[tuple[Endpoint, ...], tuple[Endpoint, ...], tuple[str, ...]]:
    """The server of each slot, all servers, and their ids. answered: the server that sent the table, which may leave
    out its own name."""
    slots = [NOBODY] * SLOTS
    ids: set[str] = set()
    if not isinstance(rows, list):
        raise ProtocolError("no table of slots")
    for row in rows:
        match row:
            case [int(first), int(last), [_, int(), *more] as master, *_] if 0 <= first <= last < SLOTS:
                slots[first : last + 1] = [_endpoint(master, answered)] * (last + 1 - first)
                ids.update(str(one) for one in more[:1] if isinstance(one, bytes))
            case _:
                raise ProtocolError("no table of slots")
    return tuple(slots), tuple(sorted({one for one in slots if one is not NOBODY})), tuple(ids)


def _endpoint(row: Reply, answered: Endpoint) -> Endpoint:
    match row:
        case [bytes() | None as host, int() | bytes() as said, *_]:
            number = said if isinstance(said, int) else int(said) if said.isdigit() and len(said) < 6 else 0
            if 0 < number < 65536 and host in (None, b"", b"?"):
                return Endpoint(answered.host, number)
            if 0 < number < 65536 and _HOST.fullmatch(host):
                return Endpoint(host.decode(), number)
    raise ProtocolError("no address of a server")


def _first_answer(links: Links, endpoints: Sequence[Endpoint], request: bytes) -> tuple[Endpoint, Reply]:
    """Ask the servers, each a little later than the one before unless that one has answered, until the links are
    closed; return the first one that answers and its reply. Raises the last one's error if none answers.

    Together, servers that are silent take hardly longer than one.
    """
    answers: SimpleQueue[tuple[Endpoint, Reply | BaseException]] = SimpleQueue()
    failed: BaseException = Unreachable("there is no server to ask")
    waiting, asked = list(endpoints), 0
    while waiting or asked:
        if links.closed:
            raise Unreachable("closed")
        if waiting:
            ask = partial(_ask, links, waiting.pop(0), request, answers)
            asked += 1
            try:
                threading.Thread(target=ask, name="kvloom-redis-ask", daemon=True).start()
            except RuntimeError:  # the machine has no more threads
                ask()
        with contextlib.suppress(Empty):
            endpoint, answer = answers.get(timeout=_HEAD_START_SECONDS)
            asked -= 1
            if not isinstance(answer, BaseException):
                return endpoint, answer
            if not isinstance(answer, (*LinkLost, ServerError)):
                raise answer
            failed = answer
    raise failed


def _ask(
    links: Links, endpoint: Endpoint, request: bytes, answers: SimpleQueue[tuple[Endpoint, Reply | BaseException]]
) -> None:  # fmt: skip
    try:
        with links.link(endpoint) as link:
            link.send(request)
            answers.put((endpoint, link.answer()))
    except BaseException as error:
        links.drop(endpoint)
        answers.put((endpoint, error))
