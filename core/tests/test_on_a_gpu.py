"""The core on a GPU: pinned pools, pools in its memory, KV of `plain` there. `make test-gpu` runs it."""

from __future__ import annotations

import time
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from core_support import SPEC, kv_of, tokens_of

from kvloom import Engine, Registry
from kvloom.memory import Pool
from kvloom.runtime import SystemRuntime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZE = 64 << 20


def test_a_pool_is_pinned_and_copies_to_and_from_it_are_asynchronous() -> None:
    torch.cuda.init()
    pool = Pool(2 * SIZE, SystemRuntime(), pin="auto")
    reservation = pool.reserve(SIZE)
    assert reservation is not None
    memory, until = reservation.tensor([SIZE], torch.uint8), time.monotonic() + 60
    while not pool.pages.settled and time.monotonic() < until:
        time.sleep(0.01)
    assert pool.pages.pinned_bytes >= SIZE and memory.is_pinned()
    there = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        memory.copy_(there, non_blocking=True)
        copied = stream.record_event()
    assert not copied.query(), "the caller does not wait"
    copied.synchronize()
    assert torch.equal(memory, there.cpu())
    reservation.abandon()
    pool.close()
    assert pool.pages.pinned_bytes == 0


def test_memory_on_the_device_is_given_out_again_only_when_its_work_is_done() -> None:
    pool = Pool(SIZE, SystemRuntime(), device=torch.device("cuda"))
    stream, source = torch.cuda.Stream(), torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    first = pool.reserve(SIZE)
    assert first is not None
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        first.tensor([SIZE], torch.uint8).copy_(source)
        done = stream.record_event()
    block = first.seal()
    lease = block.lease()
    block.drop()
    lease.release(after=done)
    assert not done.query() and pool.reserve(SIZE) is None
    done.synchronize()
    second = pool.reserve(SIZE)
    assert second is not None
    second.abandon()
    pool.close()


@pytest.mark.parametrize("background", [False, True])
def test_kv_of_plain_on_the_device_comes_back_behind_what_is_queued(background: bool) -> None:
    registry = Registry.discover(entry_points=[EntryPoint("kvloom.builtin", "kvloom.builtin", "kvloom.v1")])
    config: dict[str, Any] = {
        "chunk_tokens": 4,
        "connector": "plain",
        "tiers": [{"type": "memory", "capacity": "16MiB"}],
    }
    tokens, kv = tokens_of(64), kv_of(64)
    there, stream = torch.zeros_like(kv, device="cuda"), torch.cuda.Stream()
    with Engine.open(config, SPEC, registry=registry) as engine:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**9)
            there.copy_(kv.cuda(non_blocking=True))
            if background:
                assert engine.save(engine.segments(tokens), kv=there).result(60).all()
            else:
                assert engine.store(tokens, kv=there) == 64
            there.zero_()
            torch.cuda._sleep(10**9)
            seen = there.clone()
            if background:
                mask = engine.load(engine.segments(tokens), kv=there).result(60)
            else:
                mask = engine.retrieve(tokens, kv=there)
            now = there.clone()
        torch.cuda.synchronize()
        assert mask.all() and not seen.any()
        assert torch.equal(now.cpu(), kv)
