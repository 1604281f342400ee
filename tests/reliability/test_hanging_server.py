"""A server that stops answering in the middle of a blob (SIGSTOP), wakes (SIGCONT), or is gone (SIGKILL)."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blob_server import RemoteBackend, ServerProcess
from reliability_support import (
    GENEROUS_SECONDS,
    WIDE,
    eventually,
    forget_memory,
    kv_of,
    open_engine,
    plugins_with,
    retrieved,
    tokens_of,
)

from kvloom import Engine

CHUNK = 32
DEADLINE_SECONDS = 0.2
HANGS_SECONDS = 20.0
"""Far beyond any deadline: a caller that waits this long waits for the server."""
PROMPTS = [(tokens_of(CHUNK * (1 + seed % 4), seed), kv_of(CHUNK * (1 + seed % 4), seed, WIDE)) for seed in range(10)]
# Of reading, asking and writing, each kind has its threads, all of which may be held; and one does chores.
MOST_ABANDONED = 3 * RemoteBackend.threads + 1


class Callers:
    """Threads that use the engine, look at every byte, and note how long the longest call took."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.calls = 0
        self.longest_seconds = 0.0
        self.errors: list[BaseException] = []
        self._engine = engine
        self._done = False
        self._threads = [threading.Thread(target=self._work, args=(seed * 10 + n,), daemon=True) for n in range(4)]
        for thread in self._threads:
            thread.start()

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._done:
                tokens, kv = rng.choice(PROMPTS)
                began = time.monotonic()
                roll = rng.random()
                if roll < 0.5:
                    retrieved(self._engine, tokens, kv)
                elif roll < 0.8:
                    self._engine.store(tokens, kv=kv)
                elif roll < 0.9:
                    self._engine.lookup(tokens)
                else:
                    self._engine.prefetch(tokens)
                self.calls += 1
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        except BaseException as error:
            self.errors.append(error)

    def finish(self) -> None:
        """End them; fails if one of them saw a wrong byte, raised, or hangs."""
        self._done = True
        for thread in self._threads:
            thread.join(HANGS_SECONDS)
            assert not thread.is_alive(), "a caller hangs"
        assert not self.errors, self.errors
        assert self.longest_seconds < HANGS_SECONDS


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.wake()
    server.kill()


@pytest.fixture
def engine(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    caplog.set_level(logging.ERROR, "kvloom")
    memory = {"type": "memory", "capacity": "4MiB"}
    remote = {"type": "remote", "port": server.port, "deadline": f"{int(DEADLINE_SECONDS * 1000)}ms"}
    with open_engine(memory, remote, spec=WIDE, chunk_tokens=CHUNK, registry=plugins_with("blob_server")) as engine:
        yield engine


def abandoned(engine: Engine) -> int:
    tier: Any = engine.tiers["remote"]
    return int(tier.abandoned_calls)


def serves_again(engine: Engine) -> None:
    """Everything can be stored in the server and read from it again."""
    eventually(lambda: abandoned(engine) == 0, "the last abandoned call's return")

    def all_through(tokens: torch.Tensor, kv: torch.Tensor) -> bool:
        engine.store(tokens, kv=kv)
        engine.flush(GENEROUS_SECONDS)
        forget_memory(engine)
        return retrieved(engine, tokens, kv) == len(tokens)

    for tokens, kv in PROMPTS:
        eventually(lambda tokens=tokens, kv=kv: all_through(tokens, kv), "serving from the server")  # type: ignore[misc]
    forget_memory(engine)


def hang(engine: Engine, server: ServerProcess, rounds: int, tally: Callable[..., None]) -> None:
    rng = random.Random(11)
    serves_again(engine)
    most = calls = 0
    longest = 0.0
    threads = 0
    for turn in range(rounds):
        callers = Callers(engine, turn)
        time.sleep(rng.uniform(0, 0.1))
        server.stop()
        asleep_until = time.monotonic() + 4 * DEADLINE_SECONDS
        while time.monotonic() < asleep_until:
            most = max(most, abandoned(engine))
            time.sleep(0.005)
        server.wake()
        time.sleep(rng.uniform(0, 0.1))  # what comes late comes now, and the callers look at everything they get
        callers.finish()
        serves_again(engine)
        calls += callers.calls
        longest = max(longest, callers.longest_seconds)
        threads = threads or threading.active_count()
        assert threading.active_count() <= threads + MOST_ABANDONED, "threads grow"
    assert 0 < most <= MOST_ABANDONED
    tally(times_stopped=rounds, calls=calls, most_abandoned_at_once=most, longest_call_in_ms=int(longest * 1000))


def test_a_server_that_hangs_and_wakes(engine: Engine, server: ServerProcess, tally: Callable[..., None]) -> None:
    hang(engine, server, 2, tally)


@pytest.mark.slow
def test_a_server_that_hangs_and_wakes_again_and_again(
    engine: Engine, server: ServerProcess, tally: Callable[..., None]
) -> None:
    hang(engine, server, 15, tally)


def test_a_server_that_dies_and_comes_back_empty(engine: Engine, server: ServerProcess) -> None:
    serves_again(engine)
    callers = Callers(engine, 5)
    time.sleep(0.05)
    server.kill()
    time.sleep(0.3)
    other = ServerProcess(server.port)
    try:
        time.sleep(0.1)
        callers.finish()
        serves_again(engine)
    finally:
        other.kill()


def test_a_server_that_never_wakes_does_not_keep_the_engine_open(engine: Engine, server: ServerProcess) -> None:
    serves_again(engine)
    callers = Callers(engine, 6)
    server.stop()
    time.sleep(2 * DEADLINE_SECONDS)
    callers.finish()
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < HANGS_SECONDS
