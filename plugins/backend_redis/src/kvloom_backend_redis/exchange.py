"""Requests to whichever server has their key: one at a time, or many in a row before the first reply is waited for."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvloom import PartDownError
from kvloom_backend_redis.address import Endpoint
from kvloom_backend_redis.errors import LinkLost, ServerError, Unreachable
from kvloom_backend_redis.link import Link, Reply, packed
from kvloom_backend_redis.links import Links
from kvloom_backend_redis.stream import Part
from kvloom_backend_redis.topology import NOBODY, Detour, Topology

T = TypeVar("T")

WINDOW = 512
"""Short requests on their way at once."""
BLOBS_AHEAD = 16
"""Blobs that are asked for, or sent, before the reply to the first has been read."""
AHEAD_BYTES = 4 << 20
"""The size of them all, on all connections. A server holds the replies in memory, and is slower with more."""
_LEFT_ALONE = 4
"""Multiple of the time that a failing server of several took for which it is not asked again."""
_QUICK_SECONDS = 0.05
"""A server that fails within this time costs nothing to be asked again."""
_DETOURS = 2
"""To where a slot has moved, and to where it is moving on."""
_ASKING = packed(b"ASKING")
_UNSERVED = "no node of the cluster serves this key's slot"


class Exchange:
    """Finds the server of each key, and goes where it is sent. Does nothing twice that may have been done.

    Everything here raises ServerError for a refusal, and OSError, ProtocolError or BackendError if there is no answer:
    PartDownError from one server of several, as long as the last request to another one did not fail.
    """

    def __init__(self, topology: Topology, links: Links) -> None:
        self.topology = topology
        self._links = links
        self._busy: set[object] = set()
        """One thing for each exchange of many blobs that is under way."""
        self._failing: dict[Endpoint, float] = {}
        """Servers whose last request failed, and until when they are not asked again if others answer."""

    def one(self, key: bytes, parts: Sequence[Part], read: Callable[[Link], T]) -> T:
        """Send a request and `read` its reply. parts: contiguous bytes."""
        endpoint = self.topology.endpoint(key)
        try:
            with self._judging(endpoint):
                return self._at(endpoint, parts, read)
        except ServerError as error:
            detour = self.topology.redirected(error, endpoint)
            if detour is None:
                raise
        return self._along(detour, parts, read)

    def ask(self, key: bytes, *words: bytes) -> Reply:
        """A short request and its reply."""
        return self.one(key, [packed(*words)], Link.answer)

    def at(self, endpoint: Endpoint, *requests: bytes) -> list[Reply]:
        """The replies of one server, refusals among them as values."""
        replies: list[Reply] = []
        with self._link(endpoint) as link:
            for start in range(0, len(requests), WINDOW):
                window = requests[start : start + WINDOW]
                link.queue(b"".join(window), replies=len(window))
                replies += [link.reply() for _ in window]
        return replies

    def many(
        self, keys: Sequence[bytes], requests: Sequence[bytes], *, otherwise: Reply | None = None
    ) -> list[Reply]:  # fmt: skip
        """The reply to each of short requests; raises a refusal or a failure, when all servers have been asked.

        otherwise: the reply in place of those of a server that failed, if others have not. Once servers that failed
        have taken as long as one may take, the others are not tried.
        """
        found: dict[int, Reply] = {}
        failure: Exception | None = None
        refusal: ServerError | None = None
        failing_seconds = 0.0
        for endpoint, places in self._by_server(keys).items():
            began = time.monotonic()
            try:
                self._try_on(endpoint, failing_seconds)
                with self._judging(endpoint):
                    replies = self.at(endpoint, *(requests[place] for place in places))
            except (*LinkLost, PartDownError) as error:
                failing_seconds += time.monotonic() - began
                if otherwise is None or not isinstance(error, PartDownError):
                    failure = failure or error
                continue
            for place, value in zip(places, replies, strict=True):
                if (detour := self._detour(value, endpoint)) is not None:
                    found[place] = self._along(detour, [requests[place]], Link.answer)
                elif isinstance(value, ServerError):
                    refusal = refusal or value
                else:
                    found[place] = value
        if refusal is not None:
            raise refusal
        if failure is not None:
            raise failure
        return [found.get(place, otherwise) for place in range(len(keys))]

    def fetch(self, keys: Sequence[bytes], requests: Sequence[bytes], read: Callable[[Link], T]) -> list[T]:
        """Like `many`, for large replies: `read` takes each of them."""
        found: dict[int, T] = {}
        failure: Exception | None = None
        for place, value in self.replies(keys, requests, lambda link, place: read(link)):
            if isinstance(value, Exception):
                failure = failure or value
            else:
                found[place] = value
        if failure is not None:
            raise failure
        return [found[place] for place in range(len(keys))]

    def replies(
        self, keys: Sequence[bytes], requests: Sequence[bytes], read: Callable[..., T]
    ) -> Iterator[tuple[int, T | Exception]]:
        """Yield the place in `keys` of each large reply, as soon as it is there, and the result of `read` or why there
        is none: a refusal, or a failure of its server. Raises the failure of a server that has all of them.

        read: called with the link, and with `place=` that of the key. If it leaves a reply unread, the others are asked
        for again on another connection.
        """
        for endpoint, places in self._by_server(keys).items():
            left = places
            failure: Exception | None = None
            while left and failure is None:
                moved: list[tuple[int, Detour]] = []
                done = asked = 0
                try:
                    with self._judging(endpoint), self._link(endpoint) as link, self._ahead() as most:
                        while done < len(left) and not link.midway:
                            ahead = left[asked : done + most(link.announced_bytes)]
                            asked += len(ahead)
                            if ahead:
                                link.queue(b"".join([requests[place] for place in ahead]), replies=len(ahead))
                            place = left[done]
                            value = _or_refusal(link, partial(read, place=place))
                            done += 1
                            detour = self._detour(value, endpoint)
                            if detour is None:
                                yield place, value
                            else:
                                moved.append((place, detour))
                except Exception as error:
                    if len(places) == len(keys) and not isinstance(error, PartDownError):
                        raise
                    failure = error
                for place, detour in moved:
                    try:
                        yield place, self._along(detour, [requests[place]], partial(read, place=place))
                    except ServerError as error:
                        yield place, error
                left = left[done:]
            for place in left:
                assert failure is not None
                yield place, failure

    def send(
        self, keys: Sequence[bytes], requests: Sequence[Sequence[Part]], read: Callable[[Link], T]
    ) -> Iterator[tuple[int, T | Exception]]:
        """Yield the place in `keys` of each large request, as soon as it was answered, and the result of `read` or why
        there is none: a refusal, or a failure of its server.

        What was sent to a server that failed, and was not answered, may have been done. Once servers that failed have
        taken as long as one may take, the others are not tried.
        """
        failing_seconds = 0.0
        for endpoint, places in self._by_server(keys).items():
            sent = answered = 0
            moved: list[tuple[int, Detour]] = []
            began = time.monotonic()
            try:
                self._try_on(endpoint, failing_seconds)
                with self._judging(endpoint), self._link(endpoint) as link, self._ahead() as most:
                    while answered < len(places):
                        while sent < len(places) and sent - answered < most(sum(map(len, requests[places[sent]]))):
                            link.queue(*requests[places[sent]])
                            sent += 1
                        value = _or_refusal(link, read)
                        place = places[answered]
                        answered += 1
                        detour = self.topology.redirected(value, endpoint) if isinstance(value, ServerError) else None
                        if detour is None:
                            answered_at = time.monotonic()
                            yield place, value
                            began += time.monotonic() - answered_at  # that is the caller's time
                        else:
                            moved.append((place, detour))
            except Exception as error:
                failing_seconds += time.monotonic() - began
                for place in places[answered:]:
                    yield place, error
            for place, detour in moved:
                try:
                    outcome: T | Exception = self._along(detour, requests[place], read)
                except Exception as error:
                    outcome = error
                yield place, outcome

    def _detour(self, value: object, endpoint: Endpoint) -> Detour | None:
        """Where a server says that the key is now, if it does."""
        return self.topology.redirected(value, endpoint) if isinstance(value, ServerError) else None

    def _try_on(self, endpoint: Endpoint, failing_seconds: float) -> None:
        """Raise PartDownError if servers that failed have taken so long in this call that no other one is tried."""
        if failing_seconds >= self._links.patience:
            raise PartDownError(f"{endpoint} was not tried: other servers did not answer in time")

    @contextlib.contextmanager
    def _judging(self, endpoint: Endpoint) -> Iterator[None]:
        """Note whether a server answers. One that failed a moment ago is left alone, if others answer."""
        began = time.monotonic()
        if endpoint is NOBODY:
            raise self._failure(endpoint, Unreachable(_UNSERVED))
        if began < self._failing.get(endpoint, began) and self._others_answer(endpoint):
            raise PartDownError(f"{endpoint} was not asked again: it failed a moment ago")
        try:
            yield
        except LinkLost as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):  # of this process
                raise
            now = time.monotonic()
            took = min(now - began, self._links.patience)
            self._failing[endpoint] = now + (_LEFT_ALONE * took if took > _QUICK_SECONDS else 0.0)
            failure = self._failure(endpoint, error)
            if failure is error:
                raise
            raise failure from error
        if self._failing:
            self._failing.pop(endpoint, None)

    def _failure(self, endpoint: Endpoint, error: Exception) -> Exception:
        """The error of one server, as one of the store."""
        return PartDownError(str(error)) if self._others_answer(endpoint) else error

    def _others_answer(self, endpoint: Endpoint) -> bool:
        return any(one != endpoint and one not in self._failing for one in self.topology.known)

    @contextlib.contextmanager
    def _ahead(self) -> Iterator[Callable[[int], int]]:
        """A function from the size of a blob, 0 if unknown, to how many may be on their way on one connection."""
        me = object()
        self._busy.add(me)
        try:
            yield lambda size: min(BLOBS_AHEAD, 1 + AHEAD_BYTES // (size * len(self._busy))) if size else 2
        finally:
            self._busy.discard(me)

    def _by_server(self, keys: Sequence[bytes]) -> dict[Endpoint, list[int]]:
        """The places in `keys` that each server has."""
        places: dict[Endpoint, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self.topology.endpoint(key), []).append(place)
        return places

    def _along(self, detour: Detour, parts: Sequence[Part], read: Callable[[Link], T]) -> T:
        for _ in range(_DETOURS):
            try:
                return self._at(detour.endpoint, parts, read, asking=detour.asking)
            except ServerError as error:
                other = self.topology.redirected(error, detour.endpoint)
                if other is None:
                    raise
                detour = other
        return self._at(detour.endpoint, parts, read, asking=detour.asking)

    def _at(
        self, endpoint: Endpoint, parts: Sequence[Part], read: Callable[[Link], T], *, asking: bool = False
    ) -> T:  # fmt: skip
        # Without `_link`: in the way of every blob, these few lines are what the interpreter takes longest for.
        try:
            link = self._links.take(endpoint)
            try:
                if asking:
                    link.send(_ASKING)
                    link.answer()
                link.queue(*parts)
                return read(link)
            finally:
                self._links.give_back(endpoint, link)
        except LinkLost:
            self.topology.doubt(endpoint)
            raise

    @contextlib.contextmanager
    def _link(self, endpoint: Endpoint) -> Iterator[Link]:
        try:
            with self._links.link(endpoint) as link:
                yield link
        except LinkLost:
            self.topology.doubt(endpoint)
            raise


def _or_refusal(link: Link, read: Callable[[Link], T]) -> T | ServerError:
    try:
        return read(link)
    except ServerError as error:
        return error
