"""Batches that are kept for subscribers who missed some, and sent as fast as each of them takes them."""

from __future__ import annotations

import logging
import time

import zmq

from kvloom_events_zmq.wire import END, sequence

log = logging.getLogger("kvloom.events_zmq")

MOST_BYTES = 64 << 20
"""Maximum size of all batches that are kept."""
WAITING = 16
"""Messages that wait for a subscriber that is slower than they are sent."""
PAUSE_SECONDS = 0.01
_MOST_SECONDS = 10.0
"""Time after which a subscriber that reads nothing is dropped."""
_AT_ONCE = 64
"""Maximum number of messages for one subscriber before others, and newly published batches, have their turn."""


class Replays:
    """For the thread that owns the socket. What waits for one subscriber has a bound, however often it asks."""

    def __init__(self, topic: bytes, *, most_batches: int, most_bytes: int = MOST_BYTES) -> None:
        self._topic = topic
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self._kept: dict[int, bytes] = {}
        """Batches by their numbers, which ascend and have gaps."""
        self._bytes = 0
        self._asked: dict[bytes, tuple[int, float]] = {}
        """By subscriber: the number it gets next, and when it last took something."""

    def keep(self, number: int, payload: bytes) -> None:
        self._kept[number] = payload
        self._bytes += len(payload)
        while len(self._kept) > self._most_batches or self._bytes > self._most_bytes:
            self._bytes -= len(self._kept.pop(next(iter(self._kept))))

    def hear(self, router: zmq.Socket[bytes]) -> None:
        """Take a request. A later one of the same subscriber takes the place of an earlier one."""
        client, *frames = router.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            log.warning("a replay was asked for in %d frames; expected an empty one and 8 bytes", len(frames))
            return
        self._asked[client] = int.from_bytes(frames[1], "big"), time.monotonic()

    def send(self, router: zmq.Socket[bytes]) -> float | None:
        """Send as much as subscribers accept now; return the seconds until the next call, None if none is waiting."""
        for client, (number, since) in tuple(self._asked.items()):
            following, over = self._send(router, client, number)
            since = since if following == number else time.monotonic()
            if over or time.monotonic() - since > _MOST_SECONDS:
                del self._asked[client]
            else:
                self._asked[client] = following, since
        return PAUSE_SECONDS if self._asked else None

    def _send(self, router: zmq.Socket[bytes], client: bytes, number: int) -> tuple[int, bool]:
        """From `number` on, as many as it takes; what comes next, and whether that was all."""
        last = next(reversed(self._kept), -1)
        number = max(number, next(iter(self._kept), 0))
        try:
            for _ in range(_AT_ONCE):
                while number <= last and number not in self._kept:
                    number += 1
                if number > last:
                    router.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)
                    return number, True
                answer = (client, b"", self._topic, sequence(number), self._kept[number])
                router.send_multipart(answer, zmq.NOBLOCK)
                number += 1
        except zmq.Again:
            pass
        except zmq.ZMQError:  # it has gone
            return number, True
        return number, False
