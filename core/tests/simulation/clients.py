"""Simulated clients: each calls the verbs of one engine, at random, and has the oracle judge what comes back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvloom import BackendError, DeadlineExceeded, Engine, Segment, Task
from kvloom.tiers.request_context import HURRIED_SHARE
from simulation import peek
from simulation.content import CHUNK_TOKENS, SALTS, Prompt
from simulation.fibers import Scheduler
from simulation.layerwise import LayerVerbs
from simulation.oracle import Allowance, Oracle

_GARBAGE = 0x3C3C
_STATES = ("ok", "paused", "read only", "stuck", "neglected", "degraded")


@dataclass(eq=False)
class Site:
    """One engine and what is special about it. `engines` has the engine of each model, siblings last."""

    name: str
    engines: list[Engine]
    allowance: Allowance
    lossy: bool
    ttl: float | None
    """Age after which no tier serves anything; None if one does."""
    expires: bool = False
    """Memory has a ttl: what is pinned goes too."""
    closing: bool = False
    """All of memory goes."""
    pins: dict[str, int] = field(default_factory=dict)
    """Number of operations on a key that may pin or unpin it."""
    pinned: dict[str, int] = field(default_factory=dict)
    """Keys that are pinned for certain, with their counts in `pins` at that time."""
    segments: dict[tuple[int, str, int], list[Segment]] = field(default_factory=dict)
    """Segments of prompts that were asked for: they never change, and take long to compute."""
    pieces: dict[tuple[int, str, int], list[str]] = field(default_factory=dict)
    """Keys of what shorter prompts may have left of them."""
    unpinning: int = 0
    """Number of calls under way that may unpin something."""


@dataclass(eq=False)
class _Scratch:
    """A caller's KV that nobody may touch any more."""

    kv: torch.Tensor
    copy: torch.Tensor
    about: str


class Client(LayerVerbs):
    """Calls verbs until there is nothing left to do."""

    def __init__(
        self, name: str, site: Site, scheduler: Scheduler, oracle: Oracle, *, rng: random.Random,
        prompts: list[Prompt], verbs: dict[str, float], think_seconds: float,
    ) -> None:  # fmt: skip
        self.name = name
        self.site = site
        self._scheduler = scheduler
        self._oracle = oracle
        self._rng = rng
        self._prompts = prompts
        self._verbs = [getattr(self, f"_{verb}") for verb in verbs]
        self._weights = list(verbs.values())
        self._think_seconds = think_seconds
        self._left_alone: list[_Scratch] = []
        self._tasks: list[tuple[Task, Callable[[torch.Tensor], Any], Callable[[], Any]]] = []

    def run(self, more: Callable[[], bool]) -> None:
        while more():
            self._aim()
            verb: Callable[[], None] = self._rng.choices(self._verbs, self._weights)[0]
            try:
                verb()
            except BackendError as error:
                # Only a closed engine may say so here; what else verbs raise is caught where it belongs.
                if "closed" not in str(error):
                    raise
                return
            self._check_left_alone()
            if self._think_seconds and self._rng.random() < 0.5:
                seconds = self._rng.expovariate(1 / self._think_seconds)
                self._scheduler.park(self._scheduler.time + seconds, "an idea")
        for task, _, _ in self._tasks:
            task.cancel()

    # -- what a verb is about ------------------------------------------------------------------------------------------

    def _aim(self) -> None:
        rng = self._rng
        self.model = 0 if rng.random() < 0.85 else len(self.site.engines) - 1
        self.engine = self.site.engines[self.model]
        self.salt = SALTS[int(rng.random() ** 3 * len(SALTS))]
        self.prompt = self._prompts[int(rng.random() ** 2 * len(self._prompts))]
        self.about = f"m{self.model} {self.salt!r} p{self._prompts.index(self.prompt)}"
        self.space = f"{self.model}/{self.salt}"

    def _segments(self) -> list[Segment]:
        known = self.site.segments
        where = self.model, self.salt, id(self.prompt)
        if where not in known:
            known[where] = self.engine.segments(self.prompt.tokens, salt=self.salt)
        return list(known[where])

    def _keys(self) -> list[str]:
        """The keys of all that may be served of the prompt, and that is removed with it."""
        known = self.site.pieces
        where = self.model, self.salt, id(self.prompt)
        if where not in known:
            known[where] = [str(one.key) for one in peek.pieces(self.engine, self.prompt.tokens, self.salt)]
        return [*(str(segment.key) for segment in self._segments()), *known[where]]

    def _served(self, skipped: int, tokens: int) -> list[str]:
        """The keys of what was served: the tokens from `skipped` on, up to the token `tokens`."""
        return [str(one.key) for one in self._reaching(tokens) if one.start >= skipped]

    def _reaching(self, tokens: int) -> list[Segment]:
        """The segments that lead to the token `tokens`, the end of one of these or of fewer tokens."""
        own = [segment for segment in self._segments() if segment.end <= tokens]
        if tokens in (0, *(segment.end for segment in own)):
            return own
        found = self.engine.segments(self.prompt.tokens[:tokens], salt=self.salt)
        if not found or found[-1].end != tokens:
            self._oracle.violated("wrong mask", f"{self.about}: no segment ends at {tokens}")
        return found

    def _op(self, verb: str, *, timeout: float | None = None) -> Any:
        return self._oracle.operation(verb, self.about, self.site.allowance, timeout=timeout)

    def _mask(self) -> tuple[torch.Tensor | None, int]:
        """A mask like FFTT (None: everything) and how many tokens it skips."""
        if self._rng.random() < 0.6:
            return None, 0
        skipped = self._rng.randrange(self.prompt.chunks + 1) * CHUNK_TOKENS
        mask = torch.ones(self.prompt.length, dtype=torch.bool)
        mask[:skipped] = False
        return mask, skipped

    def _timeout(self) -> float | None:
        return None if self._rng.random() < 0.5 else self._rng.choice((0.0, 1e-4, 2e-3, 0.05))

    def _leave(self, kv: torch.Tensor, about: str) -> None:
        self._left_alone.append(_Scratch(kv, kv.clone(), about))
        if len(self._left_alone) > 6:
            self._left_alone.pop(0)

    def _check_left_alone(self) -> None:
        for scratch in self._left_alone:
            if not torch.equal(scratch.kv, scratch.copy):
                self._oracle.violated("touched later", f"{scratch.about}: the caller's KV was written after its end")

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        mask, _ = self._mask()
        kv = self.prompt.kv(self.model, self.salt).clone()
        keys = [str(segment.key) for segment in self._segments()]
        with self._op("store") as op, self._oracle.storing(keys, self.space):
            self.engine.store(self.prompt.tokens, mask, salt=self.salt, kv=kv.view(torch.bfloat16))
        kv.fill_(_GARBAGE)  # it is the caller's again
        self._oracle.tell(op, "stored")

    def _retrieve(self) -> None:
        mask, skipped = self._mask()
        kv = self.prompt.blank()
        gone = self._oracle.gone_now(self._keys())
        with self._op("retrieve") as op:
            got = self.engine.retrieve(self.prompt.tokens, mask, salt=self.salt, kv=kv.view(torch.bfloat16))
        self._check(kv, got)
        count = int(got.count_nonzero())
        run = torch.zeros_like(got)
        run[skipped : skipped + count] = True
        if not torch.equal(got, run):
            self._oracle.violated("wrong mask", f"{self.about}: {got.tolist()} is no run from token {skipped}")
        served = self._served(skipped, skipped + count)
        self._oracle.check_not_gone(gone, served)
        self._oracle.check_age(served, op.began, self.site.ttl)
        self._leave(kv, f"retrieve {self.about}")
        self._oracle.tell(op, f"{count} of {self.prompt.length - skipped}")

    def _check(self, kv: torch.Tensor, mask: torch.Tensor) -> None:
        self._oracle.check_kv(self.prompt, kv, mask, model=self.model, salt=self.salt, lossy=self.site.lossy)

    def _lookup(self) -> None:
        names = None if self._rng.random() < 0.6 else [self._rng.choice(list(self.engine.tiers))]
        with self._op("lookup") as op:
            hit = self.engine.lookup(self.prompt.tokens, names, salt=self.salt)
        self._reaching(hit.tokens)
        if sum(hit.by_tier.values()) != hit.tokens or hit.tokens > self.prompt.length:
            self._oracle.violated("wrong hit", f"{self.about}: {hit}")
        self._check_pins()
        if names and set(hit.by_tier) - set(names):
            self._oracle.violated("wrong hit", f"{self.about}: asked {names}, got {hit}")
        self._oracle.tell(op, f"{hit.tokens} {sorted(hit.by_tier.items())}")

    def _prefetch(self) -> None:
        mask, _ = self._mask()
        with self._op("prefetch") as op:
            task = self.engine.prefetch(self.prompt.tokens, mask, salt=self.salt)
        self._oracle.tell(op, "begun")
        self._finish(task, lambda moved: None)

    def _load(self) -> None:
        segments = self._segments()
        self._rng.shuffle(segments)
        segments = segments[: self._rng.randrange(len(segments) + 1)]
        gone = self._oracle.gone_now(str(segment.key) for segment in segments)
        kv, about = self.prompt.blank(), f"load {self.about}"
        prompt, model, salt = self.prompt, self.model, self.salt
        with self._op("load") as op:
            task = self.engine.load(segments, kv=kv.view(torch.bfloat16))
        self._oracle.tell(op, "begun")

        def check(moved: torch.Tensor) -> None:
            mask = torch.zeros(prompt.length, dtype=torch.bool)
            served = []
            for segment, here in zip(segments, moved.tolist(), strict=True):
                if here:
                    mask[segment.start : segment.end] = True
                    served.append(str(segment.key))
            self._oracle.check_kv(prompt, kv, mask, model=model, salt=salt, lossy=self.site.lossy)
            self._oracle.check_not_gone(gone, served)
            self._oracle.check_age(served, op.began, self.site.ttl)
            self._leave(kv, about)

        self._finish(task, check, given_up=lambda: self._leave(kv, about))

    def _save(self) -> None:
        segments = self._segments()
        first = self._rng.randrange(len(segments) + 1)
        segments = segments[first:]
        keys = [str(segment.key) for segment in segments]
        kv = self.prompt.kv(self.model, self.salt).clone()
        with self._oracle.storing(keys, self.space):  # what is saved may be served before this call returns
            with self._op("save") as op:
                task = self.engine.save(segments, kv=kv.view(torch.bfloat16))
            self._oracle.saving(task, keys, self.space)
        self._oracle.tell(op, "begun")
        self._finish(task, lambda moved: kv.fill_(_GARBAGE), given_up=lambda: kv.fill_(_GARBAGE))

    def _finish(
        self, task: Task, done: Callable[[torch.Tensor], Any], *, given_up: Callable[[], Any] = lambda: None
    ) -> None:
        """Wait for a task, or give it up, now or later."""
        roll = self._rng.random()
        if roll < 0.25:
            self._tasks.append((task, done, given_up))
            if len(self._tasks) < 4:
                return
            task, done, given_up = self._tasks.pop(0)
        if roll > 0.75:
            if self._rng.random() < 0.7:
                self._scheduler.park(self._scheduler.time + self._rng.expovariate(1000), "an idea")
            with self._op("cancel", timeout=0.0) as op:
                task.cancel()
            given_up()
            self._oracle.tell(op, "cancelled")
            return
        timeout = self._timeout()
        with self._op("result", timeout=timeout) as op:
            try:
                moved, outcome = task.result(timeout), "done"
            except DeadlineExceeded:
                moved, outcome = None, "given up"
            except BackendError:
                moved, outcome = None, "failed"
        if moved is None:
            given_up()
        else:
            done(moved)
        self._oracle.tell(op, outcome)

    def _pin(self) -> None:
        segments = self._segments()
        keys = [str(segment.key) for segment in segments]
        before = self._stir(keys)
        with self._op("pin") as op:
            count = self.engine.pin(self.prompt.tokens, salt=self.salt)
        if count == segments[-1].end and not self.site.unpinning:
            pins = self.site.pins
            self.site.pinned |= {key: before[key] for key in keys if pins[key] == before[key]}
        self._oracle.tell(op, str(count))

    def _unpin(self) -> None:
        keys = [str(segment.key) for segment in self._segments()]
        with self._unpinning(keys), self._op("unpin") as op:
            self.engine.unpin(self.prompt.tokens, salt=self.salt)
        self._oracle.tell(op, "unpinned")

    def _stir(self, keys: list[str]) -> dict[str, int]:
        """Something is done to these keys that may change whether they are pinned."""
        for key in keys:
            self.site.pins[key] = self.site.pins.get(key, 0) + 1
            self.site.pinned.pop(key, None)
        return {key: self.site.pins[key] for key in keys}

    @contextlib.contextmanager
    def _unpinning(self, keys: list[str]) -> Iterator[None]:
        self._stir(keys)
        self.site.unpinning += 1
        try:
            yield
        finally:
            self.site.unpinning -= 1
            self._stir(keys)

    def _check_pins(self) -> None:
        if self.site.expires or self.site.closing:
            return
        before = dict(self.site.pinned)
        held = {one.key for one in peek.held_chunks(self.engine)}
        for key in before:
            if key not in held:
                self._oracle.violated("lost pin", f"{key} was pinned and is not in memory")

    def _remove(self) -> None:
        keys = self._keys()
        with self._unpinning(keys), self._oracle.removing(keys) as success, self._op("remove") as op:
            try:
                self.engine.remove(self.prompt.tokens, salt=self.salt)
                success.append(True)
            except BackendError as error:
                if "closed" in str(error):
                    raise
        self._oracle.tell(op, f"removed {bool(success)}")

    def _clear(self) -> None:
        salts = list(SALTS) if self._rng.random() < 0.1 else [self.salt]
        keys = self._oracle.known(f"{self.model}/{salt}" for salt in salts)
        listings = self._partial_listings()
        pins = list(self.site.pins)
        with self._unpinning(pins), self._oracle.removing(keys) as success, self._op("clear") as op:
            try:
                self.engine.clear(None if len(salts) > 1 else self.salt)
                if self._partial_listings() == listings:  # else it could not know of them all
                    success.append(True)
            except BackendError as error:
                if "closed" in str(error):
                    raise
        self._oracle.tell(op, f"cleared {bool(success)}")

    def _partial_listings(self) -> int:
        return sum(tier.backend.client.store.partial_listings for tier in peek.stored_tiers(self.engine))

    def _health(self) -> None:
        with self._op("health") as op:
            health = self.engine.health()
        if [one.name for one in health.tiers] != list(self.engine.tiers):
            self._oracle.violated("wrong health", f"{health}")
        for one in health.tiers:
            fine = one.ok == (one.state == "ok") == (not one.reason) and one.state in _STATES
            sums = min(one.failures, one.abandoned_calls, one.waiting_bytes, one.blobs, one.bytes) >= 0
            if not fine or not sums or (one.retry_in_seconds or 0.0) < 0:
                self._oracle.violated("wrong health", f"{one}")
        self._oracle.tell(op, " ".join(f"{one.name}:{one.state}:{one.blobs}:{one.bytes}" for one in health.tiers))

    def _ask(self) -> None:
        """An index says what the stores hold at that time."""
        stores = {tier.name: tier.backend.client.store for tier in peek.stored_tiers(self.engine)}
        before = {name: store.changes for name, store in stores.items()}
        where = {key: name for name, store in reversed(stores.items()) for key in store.blobs}
        run = peek.leading(self.engine, self.prompt.tokens, self.salt, where.__contains__)
        with self._op("lookup") as op:
            hit = self.engine.lookup(self.prompt.tokens, salt=self.salt)
        want: dict[str, int] = {}
        for one in run:
            want[where[str(one.key)]] = want.get(where[str(one.key)], 0) + one.end - one.start
        lasting = all(tier.policy.ttl is None for tier in peek.stored_tiers(self.engine))
        honest = lasting and all(store.honest for store in stores.values())
        # Latency has no bound, so that even an honest store is late now and then.
        # Behind a faster tier that has the beginning, one that takes more than its share of the deadline is left out.
        patience = HURRIED_SHARE * min(tier.deadline for tier in peek.stored_tiers(self.engine))
        in_time = self._scheduler.time - op.began < 0.9 * patience
        same = {name: store.changes for name, store in stores.items()} == before
        if honest and same and in_time and (hit.by_tier, hit.tokens) != (want, run[-1].end if run else 0):
            self._oracle.violated("wrong hit", f"{self.about}: an index says {hit}, there is {want}")
        self._oracle.tell(op, f"{hit.tokens} {sorted(hit.by_tier.items())}")

    def _find(self) -> None:
        segments = self._segments()
        with self._op("find") as op:
            found = self.engine.find(segments)
        self._oracle.tell(op, str(found.tolist()))

    def _flush(self) -> None:
        timeout = self._timeout()
        with self._op("flush", timeout=timeout) as op:
            done = self.engine.flush(timeout)
        self._oracle.tell(op, str(done))

    def _tier(self) -> None:
        """The tiers' own methods, which have the seed's semantics."""
        name = self._rng.choice(list(self.engine.tiers))
        tier = self.engine.tiers[name]
        segment = self._rng.choice(self._segments())
        part = slice(segment.start, segment.end)
        key = str(segment.key)
        verb = self._rng.choice(("put", "get", "get", "contains", "batched_get"))
        with self._op(f"tier.{verb}") as op:
            if verb == "put":
                chunk = self.prompt.kv(self.model, self.salt)[:, :, part].clone()
                with self._oracle.storing([key], self.space):
                    tier.put(segment.key, chunk.view(torch.bfloat16), blocking=self._rng.random() < 0.5)
                chunk.fill_(_GARBAGE)
                outcome = "put"
            elif verb == "contains":
                outcome = str(tier.contains(segment.key))
            else:
                gone = self._oracle.gone_now([key])
                found = tier.get(segment.key) if verb == "get" else next(tier.batched_get([segment.key]))
                outcome = str(found is not None)
                if found is not None:
                    kv, mask = self.prompt.blank(), torch.zeros(self.prompt.length, dtype=torch.bool)
                    kv[:, :, part] = found.view(torch.int16)
                    mask[part] = True
                    self._check(kv, mask)
                    self._oracle.check_not_gone(gone, [key])
                    self._oracle.check_age([key], op.began, self.site.ttl)
        self._oracle.tell(op, f"{name} {outcome}")
