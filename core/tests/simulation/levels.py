"""One stack of tiers, its chunks in one of them, and slower tiers that are frozen or slow: what a verb makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvloom import Engine
from simulation import peek, plugin
from simulation.connection import Client, Guard
from simulation.content import CHUNK_TOKENS, SPECS, UNTOUCHED, Prompt
from simulation.fibers import Process, Scheduler, Temper
from simulation.oracle import Oracle
from simulation.runtime import SimRuntime
from simulation.store import Faults, SimStore
from simulation.world import _registry

DEADLINE_SECONDS = 10.0
QUICK_SECONDS = 1e-3
"""Time of a call of a healthy store."""
EARLY_SECONDS = 50 * QUICK_SECONDS
SLOW_SECONDS = 0.5
SLUGGISH_SECONDS = 2.0
"""In time for one call, but not for all of a prompt's."""
SEED = 30
"""For the parts in which blobs arrive: with these none takes a deadline to arrive from a sluggish store."""
PROMPT = Prompt([9_000_000 + at for at in range(6 * CHUNK_TOKENS)])


class _Steady(random.Random):
    """Calls take just as long as they should."""

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1 / lambd


@dataclass(frozen=True)
class Found:
    """The result of a call."""

    seconds: float
    """Virtual time."""
    tokens: int
    early: int
    """Number of tokens in the caller's KV after `EARLY_SECONDS`."""
    asked: frozenset[str]
    """The stores of which the verb has asked something."""
    charged: frozenset[str]
    """The tiers that are said to have failed."""


class Levels:
    """Stored tiers `s0`, `s1` and so on, fastest first, below a memory tier if `memory` says so."""

    def __init__(self, types: tuple[str, ...], *, memory: bool) -> None:
        self._types = types
        self._memory = memory
        self._scheduler = Scheduler("levels")
        self._scheduler.temper = Temper(1e12, False, 0.0, False)
        self._scheduler._countdown = 1 << 60
        self._oracle = Oracle(self._scheduler)
        self._process = Process("p")
        self.stores = {
            f"s{number}": SimStore(f"s{number}", self._scheduler, _Steady(number), Faults(QUICK_SECONDS))
            for number in range(len(types))
        }  # fmt: skip

    def run(
        self, verb: str, *, holder: int, chunks: int, everywhere: bool = False, hurt: dict[int, str],
        without: int | None = None,
    ) -> Found:  # fmt: skip
        """`verb` by an engine that has just opened. The first `chunks` are in the tier `holder` (-1: in memory).

        everywhere: and in all tiers below it. without: the number of a chunk that is in no stored tier. hurt: by
        number, tiers that are `frozen`, `slow` or `sluggish` meanwhile.
        """
        found: list[Found] = []
        plugin.host.connect = lambda name: Client(self.stores[name], self._process, lambda: Guard())
        plugin.host.pause = lambda: None
        try:
            with peek.constants(peek.Pace()):
                self._scheduler.run(
                    lambda: found.append(self._conduct(verb, holder, chunks, everywhere, hurt, without))
                )
        finally:
            self._scheduler.end()
        return found[0]

    def _conduct(
        self, verb: str, holder: int, chunks: int, everywhere: bool, hurt: dict[int, str], without: int | None
    ) -> Found:  # fmt: skip
        tokens = PROMPT.tokens[: chunks * CHUNK_TOKENS]
        kv = PROMPT.kv(0, "").view(torch.bfloat16)[:, :, : chunks * CHUNK_TOKENS].contiguous()
        for number in range(max(0, holder), len(self._types) if everywhere else holder + 1):
            self._process = Process(f"writer {number}")
            with self._open([number], memory=False) as writer:
                writer.store(tokens, kv=kv)
                assert writer.flush(60)
        for store in self.stores.values():
            for key in [key for key in store.blobs if f"/{without}-" in key]:
                del store.blobs[key]
        self._process = Process("reader")
        engine = self._open(range(len(self._types)), memory=self._memory)
        if holder < 0:
            engine.store(tokens, kv=kv)
            assert engine.flush(60)
            for store in () if everywhere else self.stores.values():
                store.blobs.clear()
        self._scheduler.park(self._scheduler.time + 1.0, "listings to end")
        for number, store in enumerate(self.stores.values()):
            store.rng.seed(SEED + number)  # however they were filled
        for number, how in hurt.items():
            store = self.stores[f"s{number}"]
            if how == "frozen":
                store.freeze()
            else:
                store.faults = Faults(SLOW_SECONDS if how == "slow" else SLUGGISH_SECONDS)
        asked: set[str] = set()
        for store in self.stores.values():
            store.take_time = self._told(store, asked)  # type: ignore[method-assign]
        before = engine.counters()
        began = self._scheduler.time
        kv, early = PROMPT.blank(), [0]
        self._scheduler.spawn(self._process, lambda: self._look(kv, early), "watcher")
        got = VERBS[verb](engine, kv)
        seconds, reached = self._scheduler.time - began, frozenset(asked)
        errors = {
            tier for (event, tier, _), totals in engine.counters().items()
            if event == "tier_error" and totals != before.get((event, tier, _))
        }  # fmt: skip
        return Found(seconds, got, early[0], reached, frozenset(errors))

    def _look(self, kv: torch.Tensor, early: list[int]) -> None:
        self._scheduler.park(self._scheduler.time + EARLY_SECONDS, "time to pass")
        early[0] = int((kv != UNTOUCHED).all(-1).all(0).all(0).sum())

    def _told(self, store: SimStore, asked: set[str]) -> Callable[[], None]:
        take_time = type(store).take_time.__get__(store)

        def told() -> None:
            if "-chore" not in self._scheduler.current.name:
                asked.add(store.name)
            take_time()

        return told

    def _open(self, numbers: Any, *, memory: bool) -> Engine:
        tiers: list[dict[str, Any]] = [
            {"type": self._types[number], "name": f"s{number}", "store": f"s{number}", "deadline": DEADLINE_SECONDS}
            for number in numbers
        ]
        above = [{"type": "memory", "capacity": 1 << 20}] if memory else []
        runtime = SimRuntime(self._scheduler, self._process, random.Random(0))
        config = {"chunk_tokens": CHUNK_TOKENS, "connector": "sim_plain", "tiers": [*above, *tiers]}
        return Engine.open(config, SPECS[0], registry=_registry(), runtime=runtime)


def _right(kv: torch.Tensor, mask: torch.Tensor) -> int:
    """Number of tokens delivered. Checks that they are right, and that nothing else was written."""
    count = int(mask.sum())
    assert bool(mask[:count].all()) and torch.equal(kv[:, :, :count], PROMPT.kv(0, "")[:, :, :count])
    assert bool((kv[:, :, count:] == UNTOUCHED).all())
    return count


def _retrieve(engine: Engine, kv: torch.Tensor) -> int:
    return _right(kv, engine.retrieve(PROMPT.tokens, kv=kv.view(torch.bfloat16)))


def _retrieve_layer(engine: Engine, kv: torch.Tensor) -> int:
    with engine.retrieve_layer(PROMPT.tokens, kv=kv.view(torch.bfloat16)) as loading:
        return _right(kv, loading.result())


def _wait(engine: Engine, kv: torch.Tensor) -> int:
    with engine.retrieve_layer(PROMPT.tokens, kv=kv.view(torch.bfloat16)) as loading:
        return int(loading.wait(loading.num_layers - 1).sum())


def _load_layers(engine: Engine, kv: torch.Tensor) -> int:
    with engine.load_layers(engine.segments(PROMPT.tokens), kv=kv.view(torch.bfloat16)) as loading:
        return _right(kv, loading.result())


def _load(engine: Engine, kv: torch.Tensor) -> int:
    moved = engine.load(engine.segments(PROMPT.tokens), kv=kv.view(torch.bfloat16)).result()
    return _right(kv, moved.repeat_interleave(CHUNK_TOKENS))


def _load_some(engine: Engine, kv: torch.Tensor) -> int:
    moved = engine.load(engine.segments(PROMPT.tokens), kv=kv.view(torch.bfloat16)).result()
    mask = moved.repeat_interleave(CHUNK_TOKENS)
    assert torch.equal(kv[:, :, mask], PROMPT.kv(0, "")[:, :, mask])
    assert bool((kv[:, :, ~mask] == UNTOUCHED).all())
    return int(mask.sum())


def _store(engine: Engine, kv: torch.Tensor) -> int:
    engine.store(PROMPT.tokens, kv=PROMPT.kv(0, "").view(torch.bfloat16))
    return PROMPT.length


VERBS: dict[str, Callable[[Engine, torch.Tensor], int]] = {
    "retrieve": _retrieve,
    "retrieve_layer": _retrieve_layer,
    "load": _load,
    "lookup": lambda engine, kv: engine.lookup(PROMPT.tokens).tokens,
    "find": lambda engine, kv: int(engine.find(engine.segments(PROMPT.tokens)).sum()) * CHUNK_TOKENS,
    "prefetch": lambda engine, kv: int(engine.prefetch(PROMPT.tokens).result().sum()) * CHUNK_TOKENS,
    "pin": lambda engine, kv: engine.pin(PROMPT.tokens),
    "store": _store,
    "wait": _wait,
    "load some": _load_some,
    "load_layers": _load_layers,
}
