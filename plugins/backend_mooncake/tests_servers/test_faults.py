"""Engines over Mooncake while its master or a peer is killed, frozen, started again, cut off or lied to.

Every byte that is served is compared; what fails is a miss within the deadline, and serving comes back by itself.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from reliability_support import GENEROUS_SECONDS, WIDE, events, eventually, kv_of, open_engine, tokens_of

from kvloom import Engine
from kvloom_backend_mooncake.testing import MooncakeMaster, MooncakePeer
from kvloom_testkit.faults import TcpProxy

CHUNK, CHUNKS, PROMPTS = 32, 4, 5
DEADLINE_SECONDS = 0.5
SERIALIZERS: dict[str, Any] = {
    "raw": "raw",
    "lossless": {"type": "cachegen", "mode": "lossless"},
    "cachegen": "cachegen",
}


class Served:
    """An engine with one tier, what it was given, and a count of what came back."""

    def __init__(self, master: str, serializer: Any = "raw", **settings: Any) -> None:
        tier = {
            "type": "mooncake", "master": master, "local_host": "127.0.0.1", "deadline": f"{DEADLINE_SECONDS}s",
            "timeout": "1s", "connect_timeout": "500ms", "buffer": "1MiB", "serializer": serializer, **settings,
        }  # fmt: skip
        self.engine: Engine = open_engine(tier, spec=WIDE, chunk_tokens=CHUNK)
        count = CHUNK * CHUNKS
        self.prompts = [(tokens_of(count, seed), kv_of(count, seed, WIDE)) for seed in range(PROMPTS)]
        self.counts = {"reads": 0, "chunks_hit": 0, "chunks_missed": 0}
        self.longest_seconds = 0.0

    def decoded(self) -> None:
        """From now on, what a healthy read gives is what must come: a lossy serializer gives other bits than it had."""
        for number, (tokens, kv) in enumerate(self.prompts):
            got = torch.zeros_like(kv)
            eventually(lambda tokens=tokens, got=got: self.engine.retrieve(tokens, kv=got).all(), "a healthy read")
            assert torch.allclose(got.float().nan_to_num(), kv.float().nan_to_num(), rtol=1, atol=1)
            self.prompts[number] = tokens, got

    def store(self) -> None:
        for tokens, kv in self.prompts:
            self.engine.store(tokens, kv=kv)
        self.engine.flush(GENEROUS_SECONDS)

    def read(self) -> int:
        """Number of chunks of all prompts delivered; fails if one byte is wrong, or a request does not return."""
        hits = 0
        for tokens, kv in self.prompts:
            began = time.monotonic()
            self.engine.lookup(tokens)
            got = torch.zeros_like(kv)
            mask = self.engine.retrieve(tokens, kv=got)
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
            same = got.view(torch.uint8), torch.where(mask[:, None], kv, 0).view(torch.uint8)
            assert torch.equal(*same), "wrong bytes"
            hits += int(mask.sum()) // CHUNK
            self.counts["reads"] += 1
        self.counts["chunks_hit"] += hits
        self.counts["chunks_missed"] += CHUNKS * PROMPTS - hits
        return hits

    def is_back(self) -> None:
        """Fails unless everything that is stored comes again."""

        def all_of_it() -> bool:
            self.store()
            return self.read() == CHUNKS * PROMPTS

        eventually(all_of_it, "everything served again")


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Served]]:
    """Opens engines; what they did is counted and told at the end."""
    opened: list[Served] = []

    def serve(master: str, serializer: Any = "raw", **settings: Any) -> Served:
        opened.append(Served(master, serializer, **settings))
        return opened[-1]

    yield serve
    for one in opened:
        for name, number in one.counts.items():
            told = (f"mooncake, {request.function.__name__}: {name.replace('_', ' ')}", number)
            request.node.user_properties.append(("counted", told))
        said = f"mooncake, {request.node.name}: longest lookup and retrieve {one.longest_seconds:.2f} s"
        request.node.user_properties.append(("said", said))
        one.engine.close()


@pytest.fixture
def master(installed: None) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(lease=500, options=["--client_ttl=2"]) as master:
        yield master


@pytest.fixture
def peer(master: MooncakeMaster) -> Iterator[MooncakePeer]:
    with MooncakePeer(master.address, segment=64 << 20) as peer:
        yield peer


def meanwhile(act: Callable[[], None], after: float = 0.01) -> AbstractContextManager[Any]:
    """`act` in the middle of what the block does."""

    class Timer(threading.Timer):
        def __enter__(self) -> None:
            self.start()

        def __exit__(self, *_: Any) -> None:
            self.join()

    return Timer(after, act)


@pytest.mark.parametrize("serializer", SERIALIZERS.values(), ids=SERIALIZERS.keys())
def test_a_master_that_is_killed_and_started_again(
    master: MooncakeMaster, peer: MooncakePeer, serve: Callable[..., Served], serializer: Any
) -> None:
    served = serve(master.address, serializer)
    served.store()
    served.decoded()
    eventually(lambda: served.read() == CHUNKS * PROMPTS, "everything served")
    with meanwhile(master.kill):
        served.read()
    assert served.read() == 0 and events(served.engine, "tier_error")
    assert events(served.engine, "tier_paused"), "the breaker opens"
    master.restart()
    served.is_back()
    assert events(served.engine, "tier_resumed"), "and closes"


def test_a_master_that_is_frozen(master: MooncakeMaster, peer: MooncakePeer, serve: Callable[..., Served]) -> None:
    served = serve(master.address)
    served.store()
    with meanwhile(master.freeze):
        served.read()
    assert served.read() == 0
    served.store()
    master.thaw()
    served.is_back()


def test_a_peer_that_is_frozen(master: MooncakeMaster, peer: MooncakePeer, serve: Callable[..., Served]) -> None:
    served = serve(master.address)
    served.store()
    with meanwhile(peer.freeze):
        served.read()
    served.read()
    peer.thaw()
    served.is_back()


def test_a_peer_that_is_killed_takes_its_blobs_with_it(
    master: MooncakeMaster, peer: MooncakePeer, serve: Callable[..., Served]
) -> None:
    served = serve(master.address)
    served.store()
    with meanwhile(peer.kill):
        served.read()
    assert served.read() == 0
    peer.restart()
    served.is_back()


def test_a_client_that_contributes_is_back_after_the_master_was_restarted(
    master: MooncakeMaster, serve: Callable[..., Served]
) -> None:
    served = serve(master.address, segment="64MiB")
    served.store()
    eventually(lambda: served.read() == CHUNKS * PROMPTS, "everything served")
    master.restart()
    served.is_back()


def _run_proxy(host: str, port: int, orders: Connection) -> None:
    with TcpProxy(host, port) as proxy:
        orders.send(proxy.port)
        for direction, changes in iter(orders.recv, None):
            for name, value in changes.items():
                setattr(getattr(proxy, direction), name, value)
            orders.send("done")


class Line:
    """A TcpProxy in a process of its own: setting up Mooncake's client stops all other threads of this one."""

    def __init__(self, host: str, port: int) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run_proxy, args=(host, port, theirs), daemon=True)
        self._process.start()
        assert self._orders.poll(GENEROUS_SECONDS)
        self.port = int(self._orders.recv())

    def set(self, direction: str, **changes: Any) -> None:
        self._orders.send((direction, changes))
        assert self._orders.poll(GENEROUS_SECONDS) and self._orders.recv() == "done"

    def close(self) -> None:
        self._process.kill()
        self._process.join()


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "delayed": ("answers", {"delay_seconds": 0.2}),
    "cut after 40 bytes": ("answers", {"cut_after_bytes": 40}),
    "cut when asked": ("requests", {"cut_after_bytes": 20}),
    "a flipped bit in answers": ("answers", {"flip_at": 60}),
    "a flipped bit in questions": ("requests", {"flip_at": 60}),
    "a black hole": ("answers", {"black_hole": True}),
}
HEALTHY = {"delay_seconds": 0.0, "cut_after_bytes": None, "flip_at": None, "black_hole": False}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_line_to_the_master(
    master: MooncakeMaster, peer: MooncakePeer, serve: Callable[..., Served], name: str
) -> None:
    direction, changes = FAULTS[name]
    line = Line(master.host, master.port)
    try:
        served = serve(f"127.0.0.1:{line.port}")
        served.is_back()
        with meanwhile(lambda: line.set(direction, **changes)):
            served.read()
        served.read()
        served.store()
        line.set(direction, **HEALTHY)
        served.is_back()
    finally:
        line.close()


def test_a_pool_that_is_full_refuses_and_serves_what_it_has(
    master: MooncakeMaster, serve: Callable[..., Served]
) -> None:
    with MooncakePeer(master.address, segment=16 << 20):
        served = serve(master.address)
        half = served.prompts
        served.store()
        for seed in range(100, 100 + 4 * PROMPTS):  # 1 MiB each, four times what there is room for
            served.engine.store(tokens_of(CHUNK * CHUNKS, seed), kv=kv_of(CHUNK * CHUNKS, seed, WIDE))
        served.engine.flush(GENEROUS_SECONDS)
        served.read()
        assert served.prompts is half and events(served.engine, "dropped") + events(served.engine, "tier_error")
