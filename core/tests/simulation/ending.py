"""The end of a run: faults stop, time passes, and then everything must be in order and work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvloom import CorruptBlobError, Engine, envelope
from simulation import peek
from simulation.clients import Site
from simulation.connection import Client as StoreClient
from simulation.content import SALTS, Prompt
from simulation.fibers import EPOCH, Fiber, Process
from simulation.store import SimStore

if TYPE_CHECKING:
    from simulation.world import World


@dataclass(eq=False)
class House:
    """A process: its engine, its clients."""

    process: Process
    site: Site
    guard: peek.PoolGuard | None
    """None: an index, which has no memory."""
    stores: dict[str, StoreClient]
    clients: list[Fiber] = field(default_factory=list)


class Ending:
    """Looks over a world whose clients have gone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scheduler = world.scheduler
        self._oracle = world.oracle

    def check(self) -> None:
        """Faults stop, time passes, and then everything must be in order and work."""
        self._world.trace(f"{self._scheduler.time:.6f} the end begins")
        for store in self._world.stores.values():
            store.heal()
        self._world.pass_time(10 * self._world.plan.deadline + 4.0 + self._world.plan.pace.settling)
        listed = max((peek.listed_again(house.site.engines[0]) for house in self._world.houses), default=0.0)
        self._world.pass_time(max(0.0, listed - self._scheduler.time) + 3 * self._world.plan.pace.round)
        for house in self._world.houses:
            self._settle(house)
        for house in self._world.houses:
            self._oracle.check_counters(house.site.engines[0])
            self._check_accounts(house)
            self._check_gone(house)
        self._check_stores()
        for house in self._world.houses:
            self._check_progress(house)
        for house in self._world.indexes:
            self._check_index(house)
        for house in [*self._world.houses, *self._world.indexes]:
            self._world.close(house)
            self._check_closed(house)
        self._check_reopened()

    def _settle(self, house: House) -> None:
        engine = house.site.engines[0]
        for tier in peek.stored_tiers(engine):
            if tier.abandoned_calls:
                where = "\n".join(
                    f"-- {fiber.name}\n{fiber.stack()}"
                    for fiber in self._scheduler.living(house.process)
                    if tier.name in fiber.name
                )
                self._oracle.violated(
                    "stuck", f"{tier.name}: {tier.abandoned_calls} calls are abandoned in a sound store\n{where}"
                )
        with self._oracle.operation("flush", "at the end", house.site.allowance) as op:
            done = engine.flush(60.0)
        if not done:
            self._oracle.violated("stuck", "a write is still under way in a sound store")
        self._oracle.tell(op, "flushed")
        for name, client in house.stores.items():
            threads = self._world.plan.block(name)["threads"]
            if client.most.get("get", 0) > threads + 3 or client.most.get("put", 0) > 4:
                self._oracle.violated("unbounded", f"{name} with {threads} threads had {client.most} calls at once")

    def _check_accounts(self, house: House) -> None:
        engine = house.site.engines[0]
        self._scheduler.collect_garbage()
        assert house.guard is not None
        pool = peek.pool_of(engine)
        held = peek.held_chunks(engine)
        leased = [one.key for one in held if one.leased]
        if leased:
            self._oracle.violated("leaked lease", f"nobody works, and {len(leased)} chunks are leased: {leased[:3]}")
        total = sum(one.size for one in held)
        if pool.used_bytes != total or house.guard.used_bytes != total:
            self._oracle.violated(
                "accounts",
                f"the pool has {pool.used_bytes} bytes in use ({house.guard.used_bytes}), chunks hold {total}",
            )
        self._check_pins(house)

    def _check_stores(self) -> None:
        """Check that ledgers match their stores, and that stores keep to their bounds."""
        for name, store in self._world.stores.items():
            tiers = [tier for house in self._world.houses for tier in peek.stored_tiers(house.site.engines[0])]
            tiers = [tier for tier in tiers if tier.name == name]
            policy, shared = tiers[0].policy, tiers[0].backend.shared
            evictors = [tier for tier in tiers if tier.maintenance.evicts]
            if len(evictors) != int(policy.bounded):
                self._oracle.violated("evictors", f"{name}: {len(evictors)} processes evict, of {len(tiers)}")
            if store.limit_bytes is not None:
                continue
            # Of a store that went wrong, only one that is listed again and again can be known exactly.
            relisted = policy.bounded and shared
            if relisted or (store.honest and len(tiers) == 1 and (policy.bounded or not self._world.crashed)):
                self._check_ledger((evictors or tiers)[0], store)
                if policy.bounded:
                    self._check_bounds(evictors[0], store)

    def _check_ledger(self, tier: Any, store: SimStore) -> None:
        there = {key: blob.space for key, blob in store.chunk_blobs.items()}
        believed = peek.ledger_bytes(tier)
        if believed != there:
            wrong = [(key, believed.get(key), there.get(key)) for key in {**believed, **there}]
            wrong = [entry for entry in wrong if entry[1] != entry[2]]
            self._oracle.violated("accounts", f"{tier.name}: ledger and store differ in {len(wrong)}: {wrong[:3]}")
        if (tier.ledger.bytes, len(tier.ledger)) != (sum(there.values()), len(there)):
            text = f"the ledger counts {tier.ledger.bytes} bytes in {len(tier.ledger)} blobs, and has {len(there)}"
            self._oracle.violated("accounts", f"{tier.name}: {text}")

    def _check_bounds(self, tier: Any, store: SimStore) -> None:
        policy, blobs = tier.policy, store.chunk_blobs
        total = sum(blob.space for blob in blobs.values())
        if policy.capacity is not None and total > policy.capacity:
            self._oracle.violated("over a bound", f"{tier.name}: {total} bytes are over {policy.capacity}")
        for tag in {key.split("/")[1] for key in blobs} if policy.quota else ():
            quota = policy.quota.get(tag, policy.quota.get("*"))
            total = sum(blob.space for key, blob in blobs.items() if key.split("/")[1] == tag)
            if quota is not None and total > quota:
                self._oracle.violated("over a bound", f"{tier.name}: {total} bytes of one salt are over {quota}")
        if policy.ttl is not None:
            since = EPOCH + self._scheduler.time - 1.01 * policy.ttl - 3 * self._world.plan.pace.round - 1.0
            old = [key for key, blob in blobs.items() if blob.modified < since]
            if old:
                self._oracle.violated("over a bound", f"{tier.name}: {len(old)} blobs are past their time: {old[:2]}")

    def _check_pins(self, house: House) -> None:
        if house.site.expires:
            return
        held = {one.key for one in peek.held_chunks(house.site.engines[0]) if one.pinned}
        lost = [key for key in house.site.pinned if key not in held]
        if lost:
            self._oracle.violated("lost pin", f"{lost[0]} was pinned and is not in memory")

    def _check_gone(self, house: House) -> None:
        held = {one.key for one in peek.held_chunks(house.site.engines[0])}
        for key, when in self._oracle.gone.items():
            where = [store.name for store in self._world.stores.values() if key in store.blobs] + ["memory"] * (
                key in held
            )
            if where:
                self._oracle.violated("resurrected", f"{key} was removed at {when:.6f} and is in {where}")

    def _check_progress(self, house: House) -> None:
        """Check that a healed system serves: a prompt goes through every tier and comes back, alone and from the
        engine."""
        engine, site, probe = house.site.engines[0], house.site, self._world.probe
        salt = "probe " + house.process.name
        for prompt in self._world.prompts:
            for one in site.engines:
                for each in ("", "alice", "bob"):
                    one.unpin(prompt.tokens, salt=each)
        segments = engine.segments(probe.tokens, salt=salt)
        tiers = [tier for tier in peek.stored_tiers(engine) if self._takes(tier)]
        for _ in range(4):  # a paused tier is asked how it is when it is needed, and serves the next time
            kv = probe.kv(0, salt).clone()
            with self._oracle.operation("store", "the probe", site.allowance) as op:
                engine.store(probe.tokens, salt=salt, kv=kv.view(torch.bfloat16))
            self._oracle.tell(op, "stored")
            if not engine.flush(60.0):
                self._oracle.violated("no progress", "a write into a sound store does not end")
            silent = [tier.name for tier in tiers if tier.get(segments[0].key) is None or not tier.health().ok]
            if not silent:
                break
            self._world.pass_time(2.0)
        else:
            text = f"{silent} are sound and do not give what was just stored\n{engine.health()}\n{engine.counters()}"
            self._oracle.violated("no progress", text)
        got = probe.blank()
        with self._oracle.operation("retrieve", "the probe", site.allowance) as op:
            mask = engine.retrieve(probe.tokens, salt=salt, kv=got.view(torch.bfloat16))
        self._oracle.check_kv(probe, got, mask, model=0, salt=salt, lossy=site.lossy)
        self._oracle.tell(op, str(mask.tolist()))
        if site.allowance.prompt_seconds is not None and not bool(mask.all()):
            self._oracle.violated("no progress", f"the probe is not served: {mask.tolist()}\n{engine.counters()}")

    def _takes(self, tier: Any) -> bool:
        """Return whether a tier must hold a chunk that was stored a moment ago."""
        policy = tier.policy
        narrow = policy.ttl is not None or bool(policy.quota) or policy.admission != "lru" or tier.backend.bounded
        return policy.write == "through" and not narrow

    def _check_index(self, house: House) -> None:
        index = house.site.engines[0]
        tokens, tiers = self._world.prompts[0].tokens, peek.stored_tiers(index)
        for _ in range(3):
            run = peek.leading(index, tokens, "", lambda key: any(self._serves(tier, key) for tier in tiers))
            want = run[-1].end if run else 0
            got = index.lookup(tokens).tokens
            if got == want:
                return
            self._world.pass_time(2.0)
        self._oracle.violated(
            "no progress", f"an index finds {got} tokens in sound stores, of {want}\n{index.health()}"
        )

    def _serves(self, tier: Any, key: str) -> bool:
        """Return whether the store has the blob, and it has not expired."""
        blob = self._world.stores[tier.name].blobs.get(key)
        if blob is None or tier.policy.ttl is None:
            return blob is not None
        try:
            header = envelope.parse(memoryview(blob.data), key=key)
        except CorruptBlobError:
            return False
        return header is not None and header.description.written + tier.policy.ttl > EPOCH + self._scheduler.time

    def _check_reopened(self) -> None:
        """Check that a new process serves and counts what the stores hold."""
        blocks = [block for block in self._world.plan.config["tiers"] if "store" in block]
        # One tier's hit is another's victim.
        moving = len(blocks) > 1 and any("capacity" in b or b["type"] == "sim_bounded" for b in blocks)
        if len(self._world.houses) > 1 or moving or any("ttl" in block for block in self._world.plan.config["tiers"]):
            return
        if not all(store.honest for store in self._world.stores.values()):
            return
        self._world.houses.clear()
        self._world.crashed = True
        house = self._world.open("again")
        self._world.pass_time(1.0 + self._world.plan.pace.settling)
        for prompt in self._world.prompts[:6]:
            for model, engine in enumerate(house.site.engines):
                self._check_survived(house, prompt, model, engine)
        self._settle(house)
        self._check_stores()
        self._world.close(house)

    def _check_survived(self, house: House, prompt: Prompt, model: int, engine: Engine) -> None:
        salt = self._world.rng.choice(SALTS)
        stores = self._world.stores.values()
        for _ in range(3):  # a call may take longer than its deadline, and count as a miss
            run = peek.leading(engine, prompt.tokens, salt, lambda key: any(key in store.blobs for store in stores))
            want = run[-1].end if run else 0
            got = prompt.blank()
            with self._oracle.operation("retrieve", "after all", house.site.allowance) as op:
                mask = engine.retrieve(prompt.tokens, salt=salt, kv=got.view(torch.bfloat16))
            self._oracle.check_kv(prompt, got, mask, model=model, salt=salt, lossy=house.site.lossy)
            self._oracle.tell(op, str(int(mask.count_nonzero())))
            if int(mask.count_nonzero()) == want:
                return
            self._world.pass_time(2.0)  # a call that was late has to come back
        text = f"{int(mask.count_nonzero())} tokens of {want} that sound stores hold are served after a restart"
        self._oracle.violated("lost", f"{text}\n{engine.counters()}")

    def _check_closed(self, house: House) -> None:
        engine = house.site.engines[0]
        self._world.pass_time(60.0)  # a write that was under way keeps its memory until it returns
        self._scheduler.collect_garbage()
        used = peek.pool_of(engine).used_bytes
        if used or (house.guard is not None and house.guard.used_bytes):
            self._oracle.violated("leak", f"{used} bytes of the pool are in use after close")
        for fiber in self._scheduler.living(house.process):
            self._oracle.violated("leak", f"thread {fiber.name} lives after close\n{fiber.stack()}")
