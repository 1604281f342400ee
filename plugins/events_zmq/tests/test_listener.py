"""Bounds of the sockets that events are published on: connections, how long they may be silent, what they may send."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq_support import subscriber

from kvloom_events_zmq import listener as listener_module
from kvloom_events_zmq.listener import Listener
from kvloom_events_zmq.publisher import Publisher, Settings
from kvloom_events_zmq.wire import AllBlocksCleared

PAUSE = 77.0


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setattr(listener_module, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(listener_module, "_HANDSHAKE_SECONDS", 60.0)
    one = Publisher(Settings("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "", 10, 10, 10, 10, None, max_connections=3))
    yield one
    one.close()


def pauses(wait: float | None) -> bool:
    """It does not listen for a while, which is longer than it waits otherwise."""
    return wait is not None and wait > PAUSE / 2


def connected(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def until_closed(client: socket.socket) -> None:
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass


def test_beyond_the_bound_all_are_dropped_and_subscribers_come_back(publisher: Publisher) -> None:
    for endpoint in (publisher.endpoint, str(publisher.replay_endpoint)):
        clients = [connected(endpoint) for _ in range(4)]
        for client in clients:
            until_closed(client)
            client.close()
    with subscriber(publisher.endpoint, publisher.replay_endpoint) as one:
        publisher.publish([AllBlocksCleared()])
        assert one.replay(0)
        while not one.socket.poll(5):
            publisher.publish([AllBlocksCleared()])
        assert one.events(1) == [AllBlocksCleared()]


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_HANDSHAKE_SECONDS", 0.05)
    with zmq.Context() as context:
        one = Listener(context, zmq.PUB, "endpoint", "tcp://127.0.0.1:*", hwm=10, max_connections=10)
        with connected(one.endpoint) as client:
            until_closed(client)
        one.close()


def test_a_path_that_is_taken_is_left_as_it_is(short_path: Path) -> None:
    note, place = short_path / "note.txt", short_path / "socket"
    note.write_text("mine")
    with zmq.Context() as context:

        def bound(path: Path) -> Listener:
            return Listener(context, zmq.PUB, "endpoint", f"ipc://{path}", hwm=10, max_connections=10)

        with pytest.raises(ValueError, match=rf"endpoint: {note} exists and is not a socket; name another path"):
            bound(note)
        assert note.read_text() == "mine"
        one = bound(place)
        with pytest.raises(ValueError, match=rf"endpoint: {place} is in use"):
            bound(place)
        one.close()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(short_path / "dead"))
        bound(short_path / "dead").close()
        with pytest.raises(ValueError, match=r"too long for a socket \(107 bytes"):
            bound(short_path / ("x" * 100))


@pytest.mark.parametrize("kind", ["XPUB", "ROUTER"])
def test_a_message_without_end_is_not_kept(publisher: Publisher, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(listener_module, "_MAX_RECEIVED_BYTES", 1 << 20)
    endpoint, peer = (publisher.endpoint, b"SUB") if kind == "XPUB" else (str(publisher.replay_endpoint), b"DEALER")
    ready = b"\x05READY\x0bSocket-Type" + len(peer).to_bytes(4, "big") + peer
    part = b"\x03" + (4000).to_bytes(8, "big") + bytes(4000)  # more follow
    with connected(endpoint) as client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + bytes([4, len(ready)]) + ready)
        client.sendall(part * 1000)
        until_closed(client)


def test_subscriptions_without_end_are_dropped(monkeypatch: pytest.MonkeyPatch, publisher: Publisher) -> None:
    monkeypatch.setattr(listener_module, "_PAUSE_SECONDS", PAUSE)
    assert publisher._pub.socket.type == zmq.XPUB and publisher._pub.socket.rcvhwm == 1
    with zmq.Context() as context, context.socket(zmq.SUB) as client:
        one = Listener(context, zmq.XPUB, "endpoint", "tcp://127.0.0.1:*", hwm=10, max_connections=10)
        client.connect(one.endpoint)
        for number in range(256):
            client.subscribe(str(min(number, 254)))
        client.subscribe("last")
        while not pauses(one.attend()) and one._subscriptions < 256:
            assert one.socket.poll(20_000)
        assert not pauses(one.attend()), "equal ones count once"
        client.subscribe("one more")
        while not pauses(one.attend()):
            assert one.socket.poll(2000), "they are not counted"
        assert one._subscriptions == 0
        one.close()


def test_few_descriptors_count_as_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with zmq.Context() as context:
        one = Listener(context, zmq.PUB, "endpoint", "tcp://127.0.0.1:*", hwm=10, max_connections=10)
        assert one.socket.maxmsgsize == 4096 and one.socket.rcvhwm == 1000 and one.socket.sndhwm == 10
        assert one.socket.getsockopt(zmq.TCP_MAXRT) == 30_000, "who takes nothing is not kept for ever"
        with connected(one.endpoint):
            assert one.monitor.poll(20_000)
            assert one.attend() == listener_module._LOOK_SECONDS and len(one._connections) == 1
            (number,) = one._connections
            monkeypatch.setattr(resource, "getrlimit", lambda _: (number + 1, number + 1))
            monkeypatch.setattr(listener_module, "_PAUSE_SECONDS", PAUSE)
            assert pauses(one.attend()), "it does not listen for a while"
        one.close()


@pytest.mark.parametrize("fails", ["endpoint", "replay_endpoint", "socket", "pair", "thread"])
def test_a_publisher_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    contexts: list[zmq.Context[zmq.Socket[bytes]]] = []
    made, sockets = zmq.Context, [0]

    def context() -> zmq.Context[zmq.Socket[bytes]]:
        contexts.append(one := made())
        return one

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files") if fails == "pair" else RuntimeError("can't start new thread")

    def counted(self: zmq.Context[zmq.Socket[bytes]], kind: int, *args: object, **settings: object) -> object:
        sockets[0] += 1
        if sockets[0] == 3:
            raise zmq.ZMQError(24)
        return usual(self, kind, *args, **settings)  # type: ignore[arg-type]

    usual = made.socket
    monkeypatch.setattr(zmq, "Context", context)
    if fails == "socket":
        monkeypatch.setattr(made, "socket", counted)
    elif fails == "pair":
        monkeypatch.setattr(socket, "socketpair", refuse)
    elif fails == "thread":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    wrong, fine = "tcp://192.0.2.1:1", "tcp://127.0.0.1:*"
    endpoints = (wrong if fails == "endpoint" else fine, wrong if fails == "replay_endpoint" else fine)
    with pytest.raises((ValueError, zmq.ZMQError, OSError, RuntimeError)):
        Publisher(Settings(*endpoints, "", 10, 10, 10, 10, None))
    assert len(contexts) == 1 and contexts[0].closed
