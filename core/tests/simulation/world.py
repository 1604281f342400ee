"""One run: stores, engines and clients drawn from a seed, what befalls them, and whether all is well at the end."""

from __future__ import annotations

import functools
import gc
import logging
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from kvloom import Engine, Registry
from kvloom.engine.lookup import Index
from kvloom.tiers.stored import layer_ranges
from simulation import interrupts, peek, plugin
from simulation.clients import Client, Site
from simulation.connection import Client as StoreClient
from simulation.connection import Guard
from simulation.content import CHUNK_TOKENS, SPECS, TOKEN_BYTES, Prompt, prompts
from simulation.ending import Ending, House
from simulation.fibers import Process, Scheduler, Violation
from simulation.oracle import Allowance, LeakWatch, Oracle
from simulation.runtime import SimRuntime
from simulation.store import Faults, SimStore

_VERBS = {
    "store": 22.0, "retrieve": 30.0, "lookup": 12.0, "prefetch": 7.0, "load": 5.0, "save": 4.0, "pin": 2.0,
    "unpin": 3.0, "remove": 2.0, "clear": 0.3, "flush": 2.5, "tier": 8.0, "health": 2.0, "find": 1.0,
    "retrieve_layers": 9.0, "store_layers": 6.0,
}  # fmt: skip
_INDEX_VERBS = {"ask": 5.0, "find": 2.0, "health": 1.0}
DEFAULT_OPS = 400
"""Operations of one seed, unless said otherwise."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    seed: str
    ops: int
    digest: str
    served_chunks: int
    faults: int
    verbs: dict[str, int]
    longest: dict[str, tuple[float, str]]
    seconds: float
    """Virtual time."""
    violation: Violation | None = None


@dataclass(frozen=True)
class Plan:
    """The world that a seed describes."""

    kind: str
    config: dict[str, Any]
    stores: dict[str, Faults]
    limits: dict[str, int]
    deadline: float
    engines: int
    clients: int
    lossy: bool
    crashes: float
    """The chance that a process dies, each time that something may befall it."""
    think_seconds: float
    prompts: int
    strict: bool
    pace: peek.Pace
    index: bool
    """A scheduler's process asks what there is."""
    ttl: float | None
    """Age after which no tier serves anything; None if one does."""

    @staticmethod
    def draw(rng: random.Random) -> Plan:
        kind = rng.choices(("ample", "tight", "faulty"), (15, 25, 60))[0]
        engines = 2 if rng.random() < 0.2 else 1
        deadline = 10.0 if kind == "ample" else rng.choice((0.05, 0.2, 1.0))
        count = rng.choices((0, 1, 2, 3), (6, 40, 34, 20))[0] if engines == 1 else rng.choice((1, 2))
        ttl = rng.choice((0.2, 1.0, 2.0)) if kind != "ample" and rng.random() < 0.12 else None
        blocks: list[dict[str, Any]] = []
        if kind == "ample" or count == 0 or rng.random() < 0.85:
            blocks.append(_draw_memory(rng, kind, deadline))
        stores, limits = {}, {}
        for index in range(count):
            name = f"s{index}"
            block, faults = _draw_tier(
                rng, kind, name, deadline, shared=engines > 1, memory=bool(blocks) and blocks[0]["type"] == "memory"
            )
            if block["type"] == "sim_bounded":
                limits[name] = rng.choice((40, 120)) << 10
            blocks.append(block)
            stores[name] = faults
        if ttl is not None:
            for block in blocks:
                block["ttl"] = f"{ttl}s"
        lossy = any(block.get("serializer") == "sim_lossy" for block in blocks)
        exact = not lossy and rng.random() < 0.2
        tails = random.Random(repr(blocks)).random() < 0.7  # apart, so that all else of a seed is what it was
        for block in blocks:
            apart = random.Random(repr(block))
            if block["type"] == "sim_shared" and apart.random() < 0.6:
                block["type"] = "sim_mapped"
                if kind == "faulty" and apart.random() < 0.5:
                    stores[block["name"]] = replace(stores[block["name"]], decay=0.3)
        config = {
            "chunk_tokens": CHUNK_TOKENS, "connector": "sim_plain", "tiers": blocks, "exact": exact,
            "save_tails": tails,
        }  # fmt: skip
        index = rng.random() < 0.25 and any(
            block["type"] in ("sim_shared", "sim_mapped", "sim_bounded") for block in blocks
        )
        return Plan(
            kind, config, stores, limits, deadline, engines, rng.choice((1, 2, 3, 5, 8)), lossy,
            crashes=rng.choice((0.0, 0.0, 0.1, 0.3)),
            think_seconds=rng.choice((0.0, 1e-4, 3e-3)) if ttl is None else ttl / 2,
            prompts=rng.choice((2, 5, 12, 40)), strict=engines == 1, pace=_draw_pace(rng), index=index, ttl=ttl,
        )  # fmt: skip

    def block(self, name: str) -> dict[str, Any]:
        """A tier's block in the configuration."""
        return next(block for block in self.config["tiers"] if block.get("name", block["type"]) == name)


def _draw_pace(rng: random.Random) -> peek.Pace:
    if rng.random() < 0.4:
        return peek.Pace()
    return peek.Pace(
        pause=rng.choice((0.005, 0.05, 1.0)), round=rng.choice((0.05, 0.5)), relist=rng.choice((0.02, 0.2)),
        tell=rng.choice((0.0, 0.1)), whole_bytes=rng.choice((0, layer_ranges.WHOLE_BYTES)),
    )  # fmt: skip


def _draw_memory(rng: random.Random, kind: str, deadline: float) -> dict[str, Any]:
    if kind == "ample":
        return {"type": "memory", "capacity": 1 << 20, "deadline": deadline}
    pages = rng.choice((3, 4, 8, 16, 64))
    block = {"type": "memory", "capacity": pages * 4096, "deadline": deadline}
    if rng.random() < 0.12:
        block["ttl"] = rng.choice(("100ms", "1s", "1h"))
    if rng.random() < 0.15:
        block["quota"] = _draw_quota(rng, pages, 4096)
    return block


def _draw_quota(rng: random.Random, most: int, blob_bytes: int) -> Any:
    def draw() -> int:
        return rng.randrange(1, most + 1) * blob_bytes

    return draw() if rng.random() < 0.5 else {"*": draw(), "alice": draw()} if rng.random() < 0.5 else {"": draw()}


def _draw_tier(
    rng: random.Random, kind: str, name: str, deadline: float, *, shared: bool, memory: bool
) -> tuple[dict[str, Any], Faults]:
    types = ("sim_shared", "sim_bounded") if shared else ("sim", "sim", "sim_shared", "sim_volatile", "sim_bounded")
    if kind == "ample":
        types = ("sim_shared",) if shared else ("sim", "sim_shared")
    block: dict[str, Any] = {
        "type": rng.choice(types), "name": name, "store": name, "deadline": deadline,
        "threads": rng.choice((1, 2, 4, 4)),
    }  # fmt: skip
    latency = rng.choice((3e-5, 3e-4, 2e-3))
    if kind == "ample":
        return block, Faults(latency)
    if rng.random() < 0.2:
        block["deadline"] = deadline * rng.choice((0.3, 0.7))
    if rng.random() < 0.5 and block["type"] != "sim_bounded":
        blobs = rng.choice((2, 5, 12, 40))
        block["capacity"] = blobs * 8192
        if rng.random() < 0.3:
            block["quota"] = _draw_quota(rng, blobs, 8192)
        if rng.random() < 0.4:
            block["policy"] = "tiny_lfu"
    write = rng.random()
    if write < 0.1:
        block["write"] = "never"
        for bound in ("capacity", "quota", "policy"):  # those who fill it keep them
            block.pop(bound, None)
    elif write < 0.35 and memory:
        block["write"] = "on_evict"
    if rng.random() < 0.12:
        block["serializer"] = "sim_lossy"
    if rng.random() < 0.15:
        block["ttl"] = rng.choice(("100ms", "1s", "2s", "1h"))
    return block, (Faults(latency) if kind == "tight" else _draw_faults(rng, latency, deadline))


def _draw_faults(rng: random.Random, latency: float, deadline: float) -> Faults:
    """Usually a few faults at a time, so that what one does is not hidden by another."""
    often = {
        "slow": 0.02, "fail": 0.05, "fail_after": 0.03, "hang": 0.01, "hang_for_good": 0.003, "flip": 0.03, "rot": 0.03,
        "lose": 0.03, "late": 0.03, "twice": 0.03, "partial": 0.3,
    }  # fmt: skip
    chosen = rng.sample(sorted(often), rng.choice((0, 1, 2, 3, len(often))))
    factor = rng.choice((0.3, 1.0, 4.0))
    return replace(Faults(latency, slow_seconds=deadline), **{name: min(0.5, often[name] * factor) for name in chosen})


@functools.cache
def _registry() -> Registry:
    mine = EntryPoint("simulation", "simulation.plugin", "kvloom.v1")
    return Registry.discover(entry_points=[*entry_points(group="kvloom.v1", name="builtin"), mine])


class World:
    """Everything of one run. Make one, `run` it once."""

    def __init__(self, seed: str, ops: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.ops = ops
        self.rng = random.Random(f"{seed}/world")
        self.plan = Plan.draw(self.rng)
        self.scheduler = Scheduler(seed)
        self.scheduler.step_limit = 2_000_000 + 20_000 * ops
        self.oracle = Oracle(self.scheduler, trace, strict_removal=self.plan.strict)
        self.trace = trace or (lambda line: None)
        self.prompts = list(prompts())
        self.rng.shuffle(self.prompts)
        self.probe = Prompt(
            [7_000_000 + at for at in range(2 * CHUNK_TOKENS + 3)][: None if self.plan.config["save_tails"] else -3]
        )
        del self.prompts[self.plan.prompts :]
        self.stores = {
            name: SimStore(
                name, self.scheduler, random.Random(f"{seed}/{name}"), faults, self.plan.limits.get(name),
                self.oracle.excuse, self.trace, self.oracle.expect_damage, lambda: self.oracle.memory_was_damaged,
            )
            for name, faults in self.plan.stores.items()
        }  # fmt: skip
        self.houses: list[House] = []
        self.indexes: list[House] = []
        self.crashed = False
        self._begun = 0
        self._opening: tuple[Process, dict[str, StoreClient], list[peek.PoolGuard]]

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        logger = logging.getLogger("kvloom")
        before = logger.handlers, logger.propagate, logger.level
        logger.handlers, logger.propagate = [LeakWatch(self.oracle)], False
        logger.setLevel(logging.WARNING)
        collecting = gc.isenabled()
        gc.disable()
        plugin.host.connect, plugin.host.pause = self._connect, self.scheduler.point
        violation = None
        try:
            with (
                interrupts.anywhere(self.scheduler.tick, self.scheduler.interrupted)
                if self.scheduler.temper.anywhere
                else nullcontext(),
                peek.constants(self.plan.pace),
                peek.told_of_progress(self.oracle.arrived, self.oracle.ended),
            ):
                self.scheduler.run(self._conduct)
        except Violation as found:
            violation = found
        finally:
            digest = self.oracle.digest
            self.scheduler.end()
            logger.handlers, logger.propagate = before[0], before[1]
            logger.setLevel(before[2])
            if collecting:
                gc.enable()
        oracle = self.oracle
        return Outcome(
            self.seed, oracle.done, digest, oracle.served_chunks, sum(store.injected for store in self.stores.values()),
            oracle.verbs, {verb: (most.deadlines, most.text) for verb, most in oracle.longest.items()},
            self.scheduler.time, violation,
        )  # fmt: skip

    def _conduct(self) -> None:
        plan = self.plan
        self.trace(f"seed {self.seed}: {plan}")
        for number in range(plan.engines):
            self._staff(self.open(f"e{number}"))
        if plan.index:
            self._open_index("i0")
        collect_at = 0
        while self._begun < self.ops:
            self.pass_time(self.rng.expovariate(1 / 0.03))
            for house in [*self.houses, *self.indexes]:
                if all(client.done for client in house.clients):
                    self._staff(house)
            if plan.kind == "faulty" and self.rng.random() < 0.1:
                self._freeze()
            if self.rng.random() < 0.1 * plan.crashes:
                self._replace(self.rng.choice(self.houses))
            if self._begun >= collect_at:
                collect_at += 150
                self.scheduler.collect_garbage()
        for house in [*self.houses, *self.indexes]:
            for client in house.clients:
                client.join()
        Ending(self).check()

    def pass_time(self, seconds: float) -> None:
        """Let the others work."""
        self.scheduler.park(self.scheduler.time + seconds, "time to pass")

    def _more(self) -> bool:
        self._begun += 1
        return self._begun <= self.ops

    def _freeze(self) -> None:
        if not self.stores:
            return
        store = self.stores[self.rng.choice(sorted(self.stores))]
        store.freeze()
        self.trace(f"{self.scheduler.time:.6f} store {store.name} freezes")
        self.pass_time(self.rng.uniform(0.0, 4 * self.plan.deadline))
        store.thaw()
        self.trace(f"{self.scheduler.time:.6f} store {store.name} thaws")

    # -- processes -----------------------------------------------------------------------------------------------------

    def _connect(self, name: str) -> StoreClient:
        process, clients, guards = self._opening
        clients[name] = StoreClient(self.stores[name], process, lambda: guards[0] if guards else Guard())
        return clients[name]

    def open(self, name: str) -> House:
        """A new process, whose clients are still to come."""
        plan, process = self.plan, Process(name)
        clients: dict[str, StoreClient] = {}
        guards: list[peek.PoolGuard] = []
        self._opening = process, clients, guards
        runtime = SimRuntime(self.scheduler, process, random.Random(f"{self.seed}/{name}/runtime"))
        self.trace(f"{self.scheduler.time:.6f} {name} opens")
        engine = Engine.open(plan.config, SPECS[0], registry=_registry(), runtime=runtime)
        guards.append(peek.PoolGuard(peek.pool_of(engine), self.scheduler.stop))
        engines = [engine]
        if self.rng.random() < 0.3:
            engines.append(engine.sibling(SPECS[1]))
        site = Site(name, engines, self._allowance(engine), plan.lossy, plan.ttl)
        site.expires = "ttl" in plan.config["tiers"][0]
        house = House(process, site, guards[0], clients)
        self.houses.append(house)
        return house

    def _allowance(self, engine: Index) -> Allowance:
        stored = peek.stored_tiers(engine)
        most = max((tier.deadline for tier in stored), default=self.plan.deadline)
        ample = self.plan.kind == "ample" and not self.crashed
        queued = peek.pool_of(engine).capacity // 2 // TOKEN_BYTES + 1
        return Allowance(most, len(stored), 0.5 if ample else None, queued)

    def _open_index(self, name: str) -> None:
        process, clients = Process(name), {}  # type: tuple[Process, dict[str, StoreClient]]
        self._opening = process, clients, []
        runtime = SimRuntime(self.scheduler, process, random.Random(f"{self.seed}/{name}/runtime"))
        self.trace(f"{self.scheduler.time:.6f} {name} opens")
        index = Engine.open(self.plan.config, SPECS[0], role="index", registry=_registry(), runtime=runtime)
        site = Site(name, [index], self._allowance(index), self.plan.lossy, None)
        house = House(process, site, None, clients)
        self.indexes.append(house)
        self._staff(house)

    def _staff(self, house: House) -> None:
        house.clients = []
        verbs = _VERBS if house.guard is not None else _INDEX_VERBS
        for number in range(self.plan.clients if house.guard is not None else 1):
            name = f"c{number}"
            rng = random.Random(f"{self.seed}/{house.process.name}/{name}/{self._begun}")
            client = Client(
                name, house.site, self.scheduler, self.oracle, rng=rng, prompts=self.prompts, verbs=verbs,
                think_seconds=self.plan.think_seconds,
            )  # fmt: skip
            house.clients.append(self.scheduler.spawn(house.process, lambda c=client: c.run(self._more), name))  # type: ignore[misc]

    def _replace(self, house: House) -> None:
        """A process dies, or is asked to stop; another takes its place."""
        self.crashed = True
        self.houses.remove(house)
        if self.rng.random() < 0.7:
            self.trace(f"{self.scheduler.time:.6f} {house.process.name} dies")
        else:
            self.close(house)
            self.pass_time(0.01)  # its clients find out
        # A call that still hangs goes with its process, as a removal by the next one would be undone by it.
        self.scheduler.kill(house.process)
        self.oracle.forget(house.process)
        for store in self.stores.values():
            store.crash(house.process)
        self._staff(self.open(house.process.name + "'"))

    def close(self, house: House) -> None:
        """A process ends as it should."""
        house.site.closing = True
        with self.oracle.operation("close", house.process.name, house.site.allowance) as op:
            for engine in reversed(house.site.engines):
                engine.close()
        self.oracle.tell(op, "closed")


def run_seed(seed: str | int, ops: int = DEFAULT_OPS, *, trace: Callable[[str], None] | None = None) -> Outcome:
    """One run. Its outcome carries the violation, if there was one."""
    _prepare()
    _await_others()
    outcome = World(str(seed), ops, trace=trace).run()
    gc.collect()
    return outcome


_idle: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that do not end, since a test has not closed what they belong to. They wait, and take no steps."""


def _await_others() -> None:
    """Wait for threads of engines that were closed before. Functions that they run would count as steps of this run."""
    for thread in threading.enumerate():
        if thread.name.startswith("kvloom-") and thread not in _idle:
            thread.join(2)
            _idle.add(thread)


@functools.cache
def _prepare() -> None:
    """Prepare a process once, so that runs are quick."""
    torch.set_num_threads(1)
    World("warm-up", 60).run()  # imports whatever is imported late
    gc.collect()
    gc.freeze()  # else every collection in a run looks through all of torch
