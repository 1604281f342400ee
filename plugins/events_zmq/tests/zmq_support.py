"""A subscriber, as vLLM's examples write one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from kvloom_events_zmq.wire import Batch

SECONDS = 20


class Subscriber:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay: str | None, topic: str) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.rcvtimeo = 1000 * SECONDS
        self.asking = None
        if replay is not None:
            self.asking = context.socket(zmq.DEALER)
            self.asking.rcvtimeo = 1000 * SECONDS
            self.asking.connect(replay)

    def batch(self) -> tuple[int, Batch]:
        """The next one, and its number."""
        _, number, payload = self.socket.recv_multipart()
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)

    def events(self, count: int) -> list[object]:
        found: list[object] = []
        while len(found) < count:
            found += self.batch()[1].events
        return found

    def replay(self, first: int) -> list[tuple[int, Batch]]:
        assert self.asking is not None
        self.asking.send_multipart((b"", first.to_bytes(8, "big")))
        frames = self.asking.recv_multipart()
        found = []
        while int.from_bytes(frames[-2], "big", signed=True) != -1:
            found.append((int.from_bytes(frames[-2], "big"), msgspec.msgpack.decode(frames[-1], type=Batch)))
            frames = self.asking.recv_multipart()
        return found


@contextmanager
def subscriber(endpoint: str, replay: str | None = None, topic: str = "") -> Iterator[Subscriber]:
    with zmq.Context() as context:
        one = Subscriber(context, endpoint, replay, topic)
        try:
            yield one
        finally:
            context.destroy(linger=0)
