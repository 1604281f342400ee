"""The server on a host of its own, whose cable is pulled in the middle of a batch: no answer, no reset."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from kvloom import Engine, KVSpec
from kvloom_backend_redis.testing import RedisServer
from kvloom_testkit.faults import Namespaces, namespaces

SPEC = KVSpec(model="wide", num_layers=4, num_kv_heads=4, head_size=128, dtype="bfloat16")
CHUNK, CHUNKS, PROMPTS = 32, 16, 6  # 4 MiB each
DEADLINE_SECONDS = 1.0
SLACK_SECONDS = 5.0
"""Time that a busy machine may add to a deadline."""
HANGS_SECONDS = 60.0


@pytest.fixture(scope="module")
def net() -> Iterator[Namespaces]:
    net, why_not = namespaces("s")
    if net is None:
        pytest.skip(why_not)
    with net:
        yield net


@pytest.fixture
def server(net: Namespaces) -> Iterator[RedisServer]:
    address = net.address_of("s")
    with RedisServer(host=address, under=partial(net.command, "s"), bind=address, protected_mode="no") as server:
        yield server
        net.heal("s")


@pytest.fixture
def engine(server: RedisServer) -> Iterator[Engine]:
    redis = {"type": "redis", "url": server.url, "timeout": 0.5, "deadline": f"{DEADLINE_SECONDS}s"}
    tiers = [{"type": "memory", "capacity": "16MiB"}, redis]
    with Engine.open({"chunk_tokens": CHUNK, "connector": "plain", "tiers": tiers}, SPEC) as engine:
        yield engine


def prompt(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 50_000, (CHUNK * CHUNKS,), generator=generator)
    return tokens, torch.randn(SPEC.blob_shape(CHUNK * CHUNKS), generator=generator).to(torch.bfloat16)


DATA = [prompt(number) for number in range(PROMPTS)]


def read(engine: Engine, number: int) -> tuple[int, float]:
    """Tokens from the server, every byte compared, and how many seconds it took."""
    memory: Any = engine.tiers["memory"]
    memory.remove(memory.chunks())
    tokens, kv = DATA[number]
    got = torch.zeros_like(kv)
    began = time.monotonic()
    mask = engine.retrieve(tokens, kv=got)
    seconds = time.monotonic() - began
    right = torch.where(mask[None, None, :, None], kv, torch.zeros_like(kv))
    assert torch.equal(got.view(torch.int16), right.view(torch.int16)), "wrong bytes"
    return int(mask.sum()), seconds


def state(engine: Engine) -> str:
    return next(tier.state for tier in engine.health().tiers if tier.name == "redis")


def eventually(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + HANGS_SECONDS
    while not true():
        assert time.monotonic() < until, f"never came: {what}"
        time.sleep(0.05)


def test_a_cable_is_pulled_in_the_middle_of_a_batch(
    net: Namespaces, engine: Engine, tally: Callable[..., None]
) -> None:
    hits = misses = 0
    for turn in range(3):
        for tokens, kv in DATA:
            engine.store(tokens, kv=kv)
            assert engine.flush(HANGS_SECONDS)
        eventually(lambda: read(engine, 0)[0] == CHUNK * CHUNKS, "all of it from the server")
        cut = threading.Timer(0.002 * (1 + 2 * turn), net.cut, "s")
        longest = 0.0
        for number in range(PROMPTS):
            if number == 1:  # on a busy machine it would else come before the first chunk
                cut.start()
            found, seconds = read(engine, number)
            longest = max(longest, seconds)
            hits, misses = hits + found // CHUNK, misses + CHUNKS - found // CHUNK
        cut.join()
        assert longest < DEADLINE_SECONDS + SLACK_SECONDS, "a miss within the deadline"
        eventually(lambda: (read(engine, 1)[0], state(engine)) == (0, "paused"), "the pause")
        tokens, kv = DATA[3]
        engine.store(tokens, kv=kv)  # nobody waits for what cannot be written either
        net.heal("s")
        eventually(lambda: read(engine, 1)[0] == CHUNK * CHUNKS and state(engine) == "ok", "the server again")
    counters = engine.counters()
    assert sum(totals.count for key, totals in counters.items() if key.name == "tier_paused") >= 3
    assert sum(totals.count for key, totals in counters.items() if key.name == "tier_resumed") >= 3
    assert not any(key.name == "corrupt" for key in counters)
    assert hits and misses
    tally(chunks_served_and_compared=hits, chunks_missed=misses, partitions=3)
