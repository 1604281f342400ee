"""SQLite's way: the k-th call of the backend fails, for every k until a run needs fewer calls, once or for good."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faulty_backend import FaultyBackend, Shelf, When
from hurry import HurriedRuntime
from reliability_support import (
    SMALL,
    eventually,
    forget_memory,
    is_right,
    kv_of,
    ledger_bytes,
    plugins_with,
    retrieved,
    tokens_of,
)

from kvloom import BackendError, Engine

CHUNK = 4
PROMPTS = [(tokens_of(CHUNK * (2 + seed), seed), kv_of(CHUNK * (2 + seed), seed)) for seed in range(4)]
FRESH = tokens_of(CHUNK * 3, 4), kv_of(CHUNK * 3, 4)
"""Nobody stored it before the fault was over."""
FAULTY: dict[str, Any] = {"type": "faulty", "capacity": "88KiB", "deadline": "1h"}
"""Room for eleven of the fourteen blobs."""


class Run:
    """One run of the scenario over one shelf."""

    def __init__(self, tier: dict[str, Any]) -> None:
        FaultyBackend.shelves.clear()
        self.shelf = FaultyBackend.shelves["default"] = Shelf()
        self.tier = FAULTY | tier
        self.engine = self.open()

    def open(self) -> Engine:
        config = {"chunk_tokens": CHUNK, "tiers": [{"type": "memory", "capacity": "48KiB"}, self.tier]}
        return Engine.open(config, SMALL, registry=REGISTRY, runtime=HurriedRuntime())

    def scenario(self) -> None:
        """Every verb, over a store that is full before it ends; whatever is given is right."""
        engine = self.engine
        for tokens, kv in PROMPTS:
            engine.store(tokens, kv=kv)
        assert engine.flush()
        for tokens, kv in PROMPTS:
            retrieved(engine, tokens, kv)
        forget_memory(engine)
        (tokens, kv), (gone, gone_kv), *_ = PROMPTS
        engine.prefetch(tokens).result()
        engine.pin(tokens)
        retrieved(engine, tokens, kv)
        engine.unpin(tokens)
        with contextlib.suppress(BackendError):
            engine.remove(gone)
            assert engine.lookup(gone).tokens == 0 == retrieved(engine, gone, gone_kv), "it said that it was gone"
        engine.store(tokens, kv=kv, salt="other")
        assert engine.flush()
        retrieved(engine, tokens, kv, salt="other")
        with contextlib.suppress(BackendError):
            engine.clear(salt="other")
            assert retrieved(engine, tokens, kv, salt="other") == 0, "it said that it was gone"
        got = torch.zeros_like(kv)
        mask = engine.load(engine.segments(tokens), kv=got).result()
        assert is_right(got, kv, mask.repeat_interleave(CHUNK))
        engine.close()
        self.engine = self.open()
        for tokens, kv in reversed(PROMPTS):
            retrieved(self.engine, tokens, kv)
        self.engine.store(gone, kv=gone_kv)
        assert self.engine.flush()

    def recovers(self) -> None:
        """The fault is over: everything works again in a while, and nothing was lost count of."""
        self.shelf.fails = lambda call: False
        engine = self.engine
        tokens, kv = FRESH

        def serves() -> bool:
            forget_memory(engine)
            engine.store(tokens, kv=kv)
            if self.tier.get("write") == "on_evict":
                for others, other_kv in PROMPTS:  # more than memory has room for
                    engine.store(others, kv=other_kv)
            assert engine.flush()
            forget_memory(engine)
            return retrieved(engine, tokens, kv) == len(tokens)

        eventually(serves, "serving from the tier")

        def exact() -> bool:
            engine.lookup(tokens)
            return engine.flush() and ledger_bytes(engine, "faulty") == self.shelf.bytes

        eventually(exact, "exact accounting", 20)
        forget_memory(engine)
        eventually(lambda: engine.health().ok, "good health")
        assert engine.tiers["faulty"].abandoned_calls == 0  # type: ignore[attr-defined]
        engine.close()


REGISTRY = plugins_with("faulty_backend")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.ERROR, "kvloom")
    yield
    FaultyBackend.shelves.clear()


def fail_each(tier: dict[str, Any], when: When, *, for_good: bool, step: int = 1) -> tuple[int, int]:
    """Runs, and the calls of the longest run."""
    for run_number, k in enumerate(range(1, 10_000, step), start=1):
        run = Run(tier)
        run.shelf.when = when
        run.shelf.fails = (lambda call, k=k: call >= k) if for_good else (lambda call, k=k: call == k)  # type: ignore[misc]
        try:
            run.scenario()
            calls = run.shelf.calls
            run.recovers()
        except BaseException as error:
            error.add_note(
                f"call {k} failed {'for good' if for_good else 'once'}, {when}: {run.shelf.verbs[k - 1 : k]}"
            )
            raise
        if calls < k:
            return run_number, k
    raise AssertionError("never got through without a fault")


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every bound": {"policy": "tiny_lfu", "ttl": "5m", "quota": {"*": "64KiB"}},
    "on evict": {"write": "on_evict"},
}


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_the_kth_call_fails(when: When, for_good: bool, tally: Callable[..., None]) -> None:
    runs, calls = fail_each(CONFIGS["plain"], when, for_good=for_good, step=7 if for_good else 5)
    tally(runs=runs, calls=calls)


@pytest.mark.slow
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_kth_call_fails_whatever_the_policy(
    config: str, when: When, for_good: bool, tally: Callable[..., None]
) -> None:
    runs, calls = fail_each(CONFIGS[config], when, for_good=for_good)
    tally(runs=runs, calls=calls)
