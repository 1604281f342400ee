"""An engine whose Redis dies, hangs, lies, forgets, fills up or shuts it out, in the middle of its work.

Threads store and retrieve all the while and look at every byte. A fault costs misses; nobody raises, waits past the
deadline, or gets a wrong byte; and when the fault is over, everything is served again.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvloom import Engine, KVSpec
from kvloom_backend_redis.testing import RedisServer
from kvloom_testkit.faults import TcpProxy

SPEC = KVSpec(model="wide", num_layers=4, num_kv_heads=4, head_size=128, dtype="bfloat16")
CHUNK = 32  # 256 KiB
LENGTHS = [CHUNK * (1 + number % 4) for number in range(10)]
DEADLINE_SECONDS, TIMEOUT_SECONDS = 1.0, 0.4
HANGS_SECONDS = 20.0
"""Far beyond any deadline."""
FAULT_SECONDS = 0.7
"""At least; a fault lasts until it was noticed, which on a busy machine takes longer."""
SERIALIZERS: dict[str, Any] = {
    "raw": "raw",
    "lossless": {"type": "cachegen", "mode": "lossless"},
    "cachegen": "cachegen",
}


def tokens_of(number: int) -> torch.Tensor:
    return torch.randint(0, 50_000, (LENGTHS[number],), generator=torch.Generator().manual_seed(number))


def kv_of(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SPEC.blob_shape(LENGTHS[number]), generator=generator).to(torch.bfloat16)


PROMPTS = [(tokens_of(number), kv_of(number)) for number in range(len(LENGTHS))]


@dataclass
class Store:
    """One engine on one server, through a proxy, and what may come out of it."""

    server: RedisServer
    proxy: TcpProxy
    engine: Engine
    lossy: dict[int, torch.Tensor] = field(default_factory=dict)
    """Each prompt's KV after the lossy serializer."""

    def retrieve(self, number: int) -> tuple[int, int]:
        """Number of hits and of chunks; fails if a byte of the hits, or of the others, is wrong."""
        tokens, kv = PROMPTS[number]
        got = torch.zeros_like(kv)
        mask = self.engine.retrieve(tokens, kv=got)
        hits = mask[::CHUNK]
        for place, hit in enumerate(hits.tolist()):
            part = slice(place * CHUNK, (place + 1) * CHUNK)
            allowed = [kv, self.lossy.get(number, kv)] if hit else [torch.zeros_like(kv)]
            assert any(torch.equal(got[:, :, part], one[:, :, part]) for one in allowed), "wrong bytes"
        return int(hits.sum()), len(hits)

    def retrieve_from_the_server(self, number: int) -> int:
        memory: Any = self.engine.tiers["memory"]
        memory.remove(memory.chunks())
        return self.retrieve(number)[0] * CHUNK

    def fill(self) -> None:
        """Store every prompt and learn what comes back of it, until all of that is served from the server."""
        for number, (tokens, kv) in enumerate(PROMPTS):

            def served(number: int = number, tokens: torch.Tensor = tokens, kv: torch.Tensor = kv) -> bool:
                self.engine.store(tokens, kv=kv)
                self.engine.flush(HANGS_SECONDS)
                return self.retrieve_from_the_server(number) == len(tokens)

            eventually(served, "serving all of it from the server")

    def count(self, name: str) -> int:
        return sum(totals.count for key, totals in self.engine.counters().items() if key.name == name)

    @property
    def noticed(self) -> int:
        """Number of errors of the tier and of blobs that were found damaged."""
        return self.count("tier_error") + self.count("corrupt")

    @property
    def state(self) -> str:
        return next(tier.state for tier in self.engine.health().tiers if tier.name == "redis")


def eventually(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, f"never came: {what}"
        time.sleep(0.05)


class Callers:
    """Threads that use the store and look at every byte."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls = self.hits = self.misses = 0
        self.longest_seconds = 0.0
        self.errors: list[BaseException] = []
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(seed,), daemon=True) for seed in range(3)]
        for thread in self._threads:
            thread.start()

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._done.is_set():
                number, roll = rng.randrange(len(PROMPTS)), rng.random()
                tokens, kv = PROMPTS[number]
                began, hits, asked = time.monotonic(), 0, 0
                if roll < 0.6:
                    hits, asked = self.store.retrieve(number)
                elif roll < 0.85:
                    self.store.engine.store(tokens, kv=kv)
                else:
                    self.store.engine.lookup(tokens)
                with self._lock:
                    self.calls += 1
                    self.hits += hits
                    self.misses += asked - hits
                    self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        except BaseException as error:
            self.errors.append(error)

    def finish(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(HANGS_SECONDS)
            assert not thread.is_alive(), "a caller hangs"
        assert not self.errors, self.errors
        assert self.longest_seconds < HANGS_SECONDS


@pytest.fixture
def make_store(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Store]]:
    caplog.set_level(logging.CRITICAL, "kvloom")
    with contextlib.ExitStack() as stack:

        def make(serializer: str, **settings: Any) -> Store:
            server = stack.enter_context(
                RedisServer(**{"maxmemory": "64mb", "maxmemory_policy": "allkeys-lru", **settings})
            )
            proxy = stack.enter_context(TcpProxy(server.host, server.port))
            memory = {"type": "memory", "capacity": "2MiB"}
            redis = {"type": "redis", "url": f"redis://127.0.0.1:{proxy.port}", "timeout": TIMEOUT_SECONDS}
            redis |= {"deadline": f"{DEADLINE_SECONDS}s", "serializer": SERIALIZERS[serializer]}
            config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [memory, redis]}
            engine = stack.enter_context(Engine.open(config, SPEC))
            store = Store(server, proxy, engine)
            if serializer == "cachegen":
                learn(store)
            store.fill()
            return store

        yield make


def learn(store: Store) -> None:
    """Encode and decode every prompt, in a store without faults."""
    redis = {"type": "redis", "url": store.server.url, "prefix": "learn:", "serializer": SERIALIZERS["cachegen"]}
    config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [redis]}
    for number, (tokens, kv) in enumerate(PROMPTS):
        with Engine.open(config, SPEC) as engine:
            engine.store(tokens, kv=kv)
            assert engine.flush(HANGS_SECONDS)
        with Engine.open(config, SPEC) as engine:
            store.lossy[number] = torch.zeros_like(kv)
            assert engine.retrieve(tokens, kv=store.lossy[number]).all()


Fault = Callable[[Store], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def killed(store: Store) -> Iterator[None]:
    store.server.kill()
    yield
    store.server.start()


@contextlib.contextmanager
def restarted(store: Store) -> Iterator[None]:
    store.server.restart()
    yield


@contextlib.contextmanager
def frozen(store: Store) -> Iterator[None]:
    store.server.freeze()
    yield
    store.server.thaw()


def network(**faults: Any) -> Fault:
    """Faults of answers; with `requests=`, of requests."""

    @contextlib.contextmanager
    def spoiled(store: Store) -> Iterator[None]:
        asked = dict(faults)
        direction = store.proxy.requests if asked.pop("requests", False) else store.proxy.answers
        before = {name: getattr(direction, name) for name in asked}
        for name, value in asked.items():
            setattr(direction, name, value)
        with contextlib.closing(store.server.client()) as client:
            client.client_kill_filter(_type="normal", skipme=True)  # counts are of each connection's own
        yield
        for name, value in before.items():
            setattr(direction, name, value)

    return spoiled


def configured(**settings: str) -> Fault:
    """The server's own settings, changed while it runs."""

    @contextlib.contextmanager
    def changed(store: Store) -> Iterator[None]:
        names = {name.replace("_", "-"): value for name, value in settings.items()}
        with contextlib.closing(store.server.client()) as client:
            before = {name: client.config_get(name)[name] for name in names}
            for name, value in names.items():
                client.config_set(name, value)
            yield
            for name, value in before.items():
                client.config_set(name, value)

    return changed


@contextlib.contextmanager
def evicted(store: Store) -> Iterator[None]:
    """Again and again, at any moment."""
    done = threading.Event()

    def evict() -> None:
        rng = random.Random(1)
        with contextlib.closing(store.server.client()) as client:
            while not done.wait(0.002):
                key = client.randomkey()
                if key is not None and rng.random() < 0.5:
                    client.unlink(key)

    thread = threading.Thread(target=evict, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()


@contextlib.contextmanager
def shut_out(store: Store) -> Iterator[None]:
    """The user loses the right to read."""
    with contextlib.closing(store.server.client()) as client:
        client.execute_command("ACL", "SETUSER", "default", "-get", "-getrange", "-set")
        yield
        client.execute_command("ACL", "SETUSER", "default", "+@all")


@contextlib.contextmanager
def locked(store: Store) -> Iterator[None]:
    """A password that the engine does not have, and every connection lost."""
    with contextlib.closing(store.server.client()) as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
        yield
        client.config_set("requirepass", "")


@contextlib.contextmanager
def demoted(store: Store) -> Iterator[None]:
    with contextlib.closing(store.server.client()) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        yield
        client.execute_command("REPLICAOF", "NO", "ONE")


def emptied(fault: Fault) -> Fault:
    """After everything is gone, so that it is written again."""

    @contextlib.contextmanager
    def spoiled(store: Store) -> Iterator[None]:
        with contextlib.closing(store.server.client()) as client:
            client.flushdb()
        with fault(store):
            yield

    return spoiled


FAULTS: dict[str, Fault] = {
    "killed, and back empty": killed,
    "restarted empty": restarted,
    "frozen": frozen,
    "answers are delayed": network(delay_seconds=0.02),
    "answers are cut in a header": network(cut_after_bytes=3),
    "answers are cut in a blob": network(cut_after_bytes=100_000),
    "requests are cut in a blob": emptied(network(cut_after_bytes=100_000, requests=True)),
    "a bit of a header is flipped": network(flip_at=1),
    "a bit of each blob is flipped": network(flip_each=150_000),
    "a bit of a request is flipped": emptied(network(flip_at=120_000, requests=True)),
    "answers are swallowed": network(black_hole=True),
    "requests are swallowed": network(black_hole=True, requests=True),
    "the server evicts all the while": evicted,
    "the server has room for little": configured(maxmemory="4mb"),
    "the server is full": emptied(configured(maxmemory_policy="noeviction", maxmemory="1mb")),
    "the user may read and write no more": shut_out,
    "the password is another": locked,
    "the server becomes a replica": emptied(demoted),
}
OF_EACH_SERIALIZER = ("frozen", "answers are cut in a blob", "the server evicts all the while")
WITHOUT_ERRORS = (
    "restarted empty",
    "answers are delayed",
    "the server evicts all the while",
    "the server has room for little",
)
"""Faults that cause no error of the tier, or need not."""
PAUSES = (
    "killed, and back empty",
    "frozen",
    "answers are swallowed",
    "requests are swallowed",
    "the password is another",
)
"""Faults that last so long that the tier must be paused."""
CASES = [(name, "raw") for name in FAULTS]
CASES += [(name, serializer) for serializer in ("lossless", "cachegen") for name in OF_EACH_SERIALIZER]


@pytest.mark.parametrize(("name", "serializer"), CASES)
def test_a_fault_is_misses_and_then_over(
    name: str, serializer: str, make_store: Callable[..., Store], tally: Callable[..., None]
) -> None:
    store = make_store(serializer)
    states = set()
    callers = Callers(store)
    time.sleep(0.1)
    with FAULTS[name](store):
        began = time.monotonic()
        while (lasted := time.monotonic() - began) < FAULT_SECONDS or (
            lasted < HANGS_SECONDS
            and ((name in PAUSES and "paused" not in states) or not (store.noticed or name in WITHOUT_ERRORS))
        ):
            states.add(store.state)
            time.sleep(0.01)
    time.sleep(0.1)
    callers.finish()
    assert "paused" in states or name not in PAUSES
    assert store.noticed or name in WITHOUT_ERRORS, "the fault was none"
    store.fill()
    eventually(lambda: store.state == "ok", "the tier's recovery")
    tally(
        calls=callers.calls, chunks_served_and_compared=callers.hits, chunks_missed=callers.misses,
        errors_of_the_tier=store.count("tier_error"), corrupt_blobs_found=store.count("corrupt"),
    )  # fmt: skip


@pytest.mark.parametrize("kill", [False, True], ids=["frozen", "killed"])
def test_a_server_that_never_comes_back_does_not_keep_the_engine_open(
    kill: bool, make_store: Callable[..., Store]
) -> None:
    store = make_store("raw")
    callers = Callers(store)
    if kill:
        store.server.kill()
    else:
        store.server.freeze()
    time.sleep(1)
    callers.finish()
    began = time.monotonic()
    store.engine.close()
    assert time.monotonic() - began < HANGS_SECONDS


def test_two_engines_write_the_same_keys_while_the_server_evicts(
    make_store: Callable[..., Store], tally: Callable[..., None]
) -> None:
    store = make_store("raw")
    tiers = [{"type": "redis", "url": store.server.url, "timeout": TIMEOUT_SECONDS}]
    with Engine.open({"chunk_tokens": CHUNK, "connector": "plain", "tiers": tiers}, SPEC) as engine:
        other = Store(store.server, store.proxy, engine)
        both = [Callers(store), Callers(other)]
        with configured(maxmemory="5mb")(store):
            began = time.monotonic()
            while (lasted := time.monotonic() - began) < 2 or (
                lasted < HANGS_SECONDS and not all(callers.hits for callers in both)
            ):
                time.sleep(0.01)
        for callers in both:
            callers.finish()
        tally(calls=sum(callers.calls for callers in both), chunks_served=sum(callers.hits for callers in both))
        assert min(callers.hits for callers in both) > 0
