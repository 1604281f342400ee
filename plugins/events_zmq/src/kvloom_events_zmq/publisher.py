"""Batches of events on an XPUB socket, and those of late on a ROUTER socket for who missed them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import accumulate, islice

import msgspec
import zmq

from kvloom_events_zmq import replays
from kvloom_events_zmq.listener import LINGER_SECONDS, Listener
from kvloom_events_zmq.replays import Replays
from kvloom_events_zmq.wire import AnyEvent, Batch, sequence

log = logging.getLogger("kvloom.events_zmq")

MOST_WAITING_BYTES = 64 << 20
"""Maximum size of the events that wait to be sent, as they are sent."""
_BATCH_BYTES = 64 << 10
"""Size of a batch from which on it takes no more events. ZeroMQ counts what waits for a subscriber in batches."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A publisher's addresses and limits. Two publishers of one process with the same settings are one."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    hwm: int
    max_waiting: int
    batch: int
    replay_batches: int
    data_parallel_rank: int | None
    max_connections: int = 64


class Publisher:
    """One thread that owns the sockets. `publish` never waits for it, for the network or for a subscriber."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError if an endpoint is taken, or is none."""
        self.settings = settings
        self.lost = 0
        """Events that found the queue full."""
        self.missed = 0
        """Events that a slow subscriber, or several, did not get."""
        self.failure: BaseException | None = None
        """The error that ended the thread: nothing is published any more."""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._closing = False
        self._skipped = False
        self._number = 0
        self._replays = Replays(settings.topic.encode(), most_batches=settings.replay_batches)
        self._context = zmq.Context()
        with contextlib.ExitStack() as made:
            made.callback(self._context.destroy, linger=0)
            self._pub = self._bound(zmq.XPUB, "endpoint", settings.endpoint, settings.hwm)
            self._pub.socket.xpub_nodrop = 1  # it says when a subscriber has no room
            self._router = None
            if settings.replay_endpoint is not None:
                self._router = self._bound(zmq.ROUTER, "replay_endpoint", settings.replay_endpoint, replays.WAITING)
                self._router.socket.router_mandatory = 1  # slow and gone subscribers can be distinguished
            self._bell, self._ear = socket.socketpair()
            for end in (self._bell, self._ear):
                made.callback(end.close)
                end.setblocking(False)
            self._thread = threading.Thread(target=self._run, daemon=True, name="kvloom-events-zmq")
            self._thread.start()
            made.pop_all()

    def _bound(self, kind: int, name: str, endpoint: str, hwm: int) -> Listener:
        return Listener(self._context, kind, name, endpoint, hwm=hwm, max_connections=self.settings.max_connections)

    @property
    def endpoint(self) -> str:
        """The address it publishes on, with the port chosen for a `*` or a 0."""
        return self._pub.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._router is None else self._router.endpoint

    def publish(self, events: list[AnyEvent]) -> int:
        """Send events, in order, soon; how many were dropped: too many wait, or the thread has failed."""
        encoded = [msgspec.msgpack.encode(event) for event in events]
        with self._lock:
            sizes = accumulate(map(len, encoded), initial=self._waiting_bytes)
            room = max(0, self.settings.max_waiting - len(self._waiting)) if self._thread.is_alive() else 0
            fitting = encoded[: min(room, sum(size <= MOST_WAITING_BYTES for size in islice(sizes, 1, None)))]
            self._waiting.extend(fitting)
            self._waiting_bytes += sum(map(len, fitting))
            dropped = len(encoded) - len(fitting)
            if dropped:
                self.lost += dropped
                self._skipped = True
        self._ring()
        return dropped

    def close(self) -> None:
        """Send what waits, for a second at most, and give the ports back."""
        self._closing = True
        self._ring()
        self._thread.join()
        self._bell.close()
        self._ear.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            self._bell.send(b"!")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
            log.exception("%s: no more KV events are published", self.endpoint)

    def _serve(self) -> None:
        listeners = [one for one in (self._pub, self._router) if one is not None]
        poller = zmq.Poller()
        for readable in (self._ear, self._pub.socket, *(one.monitor for one in listeners)):
            poller.register(readable, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router.socket, zmq.POLLIN)
        try:
            while True:
                waits = [wait for one in listeners if (wait := one.attend()) is not None]
                if self._router is not None and (wait := self._replays.send(self._router.socket)) is not None:
                    waits.append(wait)
                ready = dict(poller.poll(None if not waits else int(1000 * min(waits)) + 1))
                if self._ear.fileno() in ready:
                    self._ear.recv(4096)
                closing = self._closing  # now: what has just been heard may be the ring of `close`
                while batch := self._take():
                    self._send(batch)
                if closing:
                    return
                if self._router is not None and self._router.socket in ready:
                    self._replays.hear(self._router.socket)
        finally:
            for one in listeners:
                one.close()
            self._context.destroy(linger=int(1000 * LINGER_SECONDS))

    def _take(self) -> list[msgspec.Raw]:
        taken: list[msgspec.Raw] = []
        size = 0
        with self._lock:
            if self._skipped:  # an unused number, so that subscribers detect the gap
                self._number += 1
                self._skipped = False
            while self._waiting and len(taken) < self.settings.batch and size < _BATCH_BYTES:
                event = self._waiting.popleft()
                size += len(event)
                taken.append(msgspec.Raw(event))
            self._waiting_bytes -= size
        return taken

    def _send(self, events: list[msgspec.Raw]) -> None:
        batch = Batch(time.time(), events, self.settings.data_parallel_rank)  # type: ignore[arg-type] # encoded already
        payload = msgspec.msgpack.encode(batch)
        number, self._number = self._number, self._number + 1
        if self._router is not None:
            self._replays.keep(number, payload)
        message = (self.settings.topic.encode(), sequence(number), payload)
        pub = self._pub.socket
        try:
            pub.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:  # nobody has got it: send it to those that have room
            self.missed += len(events)
            pub.xpub_nodrop = 0
            pub.send_multipart(message)
            pub.xpub_nodrop = 1


_shared: dict[tuple[int, str], tuple[Publisher, int]] = {}
_sharing = threading.Lock()


def _in_a_child() -> None:
    """Replace the lock, which another thread may have held when the process was forked."""
    global _sharing
    _sharing = threading.Lock()


os.register_at_fork(after_in_child=_in_a_child)


def acquire(settings: Settings) -> Publisher:
    """This process's publisher at an endpoint, made if there is none; `release` it.

    Raises ValueError if there is one with other settings, or if it cannot be made.
    """
    place = os.getpid(), settings.endpoint
    with _sharing:
        publisher, users = _shared.get(place, (None, 0))
        if publisher is None:
            publisher = Publisher(settings)
        elif publisher.settings != settings:
            raise ValueError(f"endpoint: {settings.endpoint} is used in this process with other settings; name another")
        _shared[place] = publisher, users + 1
        return publisher


def release(publisher: Publisher) -> None:
    """Close it, if it has no other users."""
    place = os.getpid(), publisher.settings.endpoint
    with _sharing:
        if place not in _shared:  # a parent's
            return
        _, users = _shared.pop(place)
        if users > 1:
            _shared[place] = publisher, users - 1
        else:
            publisher.close()
