"""Replays waiting for a subscriber are bounded, and none is lost while it is slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kvloom_events_zmq import replays as module
from kvloom_events_zmq.replays import Replays


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """The publisher's, and a subscriber's. In one process nothing else than these has room for messages."""
    with zmq.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.sndhwm, router.router_mandatory, dealer.rcvhwm = 2, 1, 1
        router.bind("inproc://replays")
        dealer.connect("inproc://replays")
        yield router, dealer
        context.destroy(linger=0)


def ask(dealer: zmq.Socket[bytes], first: int) -> None:
    dealer.send_multipart((b"", first.to_bytes(8, "big")))


def numbers(dealer: zmq.Socket[bytes]) -> list[int]:
    found = []
    while dealer.poll(0):
        found.append(int.from_bytes(dealer.recv_multipart()[-2], "big", signed=True))
    return found


def test_who_asks_and_does_not_read_costs_no_more_than_a_few_messages(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    router, dealer = sockets
    replays = Replays(b"", most_batches=200)
    for number in range(200):
        if number % 3:  # some were dropped before they had a number of their own
            replays.keep(number, b"batch")
    for _ in range(50):
        ask(dealer, 10)
        replays.hear(router)
        assert replays.send(router) == module.PAUSE_SECONDS
    assert (first := numbers(dealer)) and len(first) < 10
    replays._asked.clear()
    ask(dealer, 10)
    replays.hear(router)
    found: list[int] = []
    while -1 not in found:
        replays.send(router)
        found += numbers(dealer)
    assert found == [*(number for number in range(10, 200) if number % 3), -1]
    assert replays.send(router) is None


def test_who_takes_nothing_for_long_or_has_gone_gets_no_more(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, dealer = sockets
    replays = Replays(b"", most_batches=100)
    for number in range(100):
        replays.keep(number, b"batch")
    ask(dealer, 0)
    replays.hear(router)
    assert replays.send(router) is not None
    monkeypatch.setattr(module, "_MOST_SECONDS", -1.0)
    assert replays.send(router) is None
    monkeypatch.undo()
    ask(dealer, 0)
    replays.hear(router)
    dealer.close(linger=0)
    while replays.send(router) is not None:
        router.poll(1)


def test_what_is_kept_has_a_bound_in_batches_and_in_bytes() -> None:
    replays = Replays(b"", most_batches=3, most_bytes=10)
    for number in range(5):
        replays.keep(number, b"1")
    assert list(replays._kept) == [2, 3, 4]
    replays.keep(5, b"9 bytes..")
    assert list(replays._kept) == [4, 5]
    replays.keep(6, b"eleven bytes")
    assert not replays._kept and replays._bytes == 0
