"""An engine without KV: what each request would have got from which tier, and what that would have moved and evicted.

Requests come one after the other, and every write is over before the next: of what an engine does this leaves out what
depends on how long things take, and the gaps in the pool of a memory tier of fewer than 32 chunks, which holds a little
less. The rules are those of `kvloom.pipeline.stack`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvloom_tools.replay.memory import Memory
from kvloom_tools.replay.sizes import TierPlan
from kvloom_tools.replay.stored import Stored
from kvloom_tools.replay.trace import Line

_STORES = frozenset({"store", "store_layer"})
_ASKS = frozenset({"retrieve", "retrieve_layer"})


@dataclass
class Sums:
    """The sums so far. Tokens are of whole chunks, except where it says otherwise."""

    requests: int = 0
    """Requests for KV."""
    whole: int = 0
    """Requests that got all chunks that they asked for."""
    partly: int = 0
    """Requests that got some of them."""
    asked_tokens: int = 0
    """All tokens of the prompts, but for those that the engine had, and what fills no chunk."""
    asked_chunks: int = 0
    hit_chunks: Counter[str] = field(default_factory=Counter)
    """By tier."""
    recorded_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that the recorded engine got, by its tiers."""
    unfit: int = 0
    """Lines whose blocks do not go with the chunks of this configuration."""


class Replay:
    """The tiers of one configuration, empty at first."""

    def __init__(
        self, plans: Sequence[TierPlan], *, chunk_tokens: int, tenants: Mapping[str, int] | None = None
    ) -> None:
        """tenants: the number in the trace of salts that a quota names."""
        self.chunk_tokens = chunk_tokens
        self.sums = Sums()
        self.plans = tuple(plans)
        numbers = dict(tenants or {})
        memory = next((plan for plan in plans if plan.in_memory), None)
        below = [plan for plan in plans if not plan.in_memory]
        behind = any(plan.write == "on_evict" for plan in below)
        self.memory = None
        if memory is not None:
            named, others = _quotas(memory, numbers)
            self.memory = Memory(
                memory, quota=named, other_quota=others, write_back=self._write_back if behind else None
            )
        lost = self.memory.lost_below if self.memory is not None else None
        self.stored = [
            Stored(plan, quota=named, other_quota=others, on_lost=lost if plan.write == "on_evict" else None)
            for plan in below
            for named, others in [_quotas(plan, numbers)]
        ]
        self._through = [tier for tier in self.stored if tier.plan.write == "through"]
        self._behind = [tier for tier in self.stored if tier.plan.write == "on_evict"]
        self._counting = [tier for tier in self.stored if tier.sketch is not None]
        self._aging = [tier.expire for tier in (self.memory, *self.stored) if tier is not None and tier.plan.ttl]
        self._touches: list[Callable[[Sequence[int]], None]] = [
            tier.touch for tier in (self.memory, *self.stored) if tier is not None and tier.plan.bounded
        ]
        self._touched: list[int] = []
        """The chain that nothing was done to since it was touched."""
        self._now = float("-inf")

    def feed(self, line: Line) -> None:
        """The next request."""
        verb = line.verb
        if verb == "lookup":
            return
        self._now = now = max(self._now, line.seconds)
        for expire in self._aging:
            expire(now)
        split = self._chunks(line)
        if split is None:
            self.sums.unfit += 1
            return
        chunks, first = split
        if line.served:
            self.sums.recorded_tokens.update(line.served)
        if verb in _STORES:
            self._store(chunks, first, line.salt)
            return
        asks = verb != "prefetch" and verb != "pin"
        since = first
        if verb == "save":
            since = max(first, len(chunks) if line.asked == len(line.hash_ids) else self._chunk_at(line, line.asked))
        if asks and (since == first or chunks[since:]):
            self._ask(line, chunks, since)
        gaps = verb in ("load", "save", "prefetch", "pin")  # `load_layers` ends where something is lacking
        hits = self._retrieve(chunks, since, line.salt, gaps=gaps, asks=asks)
        if asks and chunks[since:]:
            self.sums.whole += hits == len(chunks) - since
            self.sums.partly += 0 < hits < len(chunks) - since
        if not verb or verb == "save":
            self._store(chunks, first, line.salt)

    def _ask(self, line: Line, chunks: Sequence[int], first: int) -> None:
        sums = self.sums
        sums.requests += 1
        sums.asked_tokens += max(0, line.input_tokens - first * self.chunk_tokens)
        sums.asked_chunks += len(chunks) - first

    def _chunk_at(self, line: Line, block: int) -> int:
        """The first chunk that has tokens of a block or of later ones."""
        return block * line.block_tokens // self.chunk_tokens

    def _chunks(self, line: Line) -> tuple[list[int], int] | None:
        """The chunks of the prompt and the first that is asked for; None if blocks and chunks do not go together."""
        ids, size, block = line.hash_ids, self.chunk_tokens, line.block_tokens
        count = line.input_tokens // size
        if block == size:
            return (ids if count >= len(ids) else ids[:count]), min(line.first, count)
        if size % block == 0:  # a chunk is known by its last block
            each = size // block
            chunks = ids[each - 1 : count * each : each]
            return chunks, min(-(-line.first // each), len(chunks))
        if block % size == 0:  # a block that is another makes all its chunks others
            each = block // size
            chunks = [block_id * each + part for block_id in ids for part in range(each)][:count]
            return chunks, min(line.first * each, len(chunks))
        return None

    # -- towards the engine --------------------------------------------------------------------------------------------

    def _touch(self, chain: list[int]) -> None:
        if self._touched != chain:
            for touch in self._touches:
                touch(chain)
            self._touched = chain

    def _retrieve(self, chain: list[int], first: int, tenant: int, *, gaps: bool, asks: bool) -> int:
        """The number of chunks that came."""
        self._touch(chain)
        for tier in self._counting:
            tier.count(chain)
        wanted = chain[first:] if first else chain
        memory, hits = self.memory, self.sums.hit_chunks if asks else Counter()
        if memory is not None:
            order = memory.order
            held = sum([chunk in order for chunk in wanted])
            if held == len(wanted):
                hits[memory.plan.name] += held
                return held
        leased = set() if memory is None else {chunk for chunk in wanted if chunk in memory}
        came = 0
        for chunk in wanted:
            if memory is not None and chunk in leased:
                leased.discard(chunk)  # copied to the engine: from here on it may go
                hits[memory.plan.name] += 1
            else:
                source = next((tier for tier in self.stored if chunk in tier.order), None)
                if source is None:
                    if gaps:
                        continue
                    break
                hits[source.plan.name] += 1
                self._promote(chunk, source, chain, tenant, leased)
            came += 1
        self._touch(chain)
        return came

    def _promote(self, chunk: int, source: Stored, chain: list[int], tenant: int, leased: set[int]) -> None:
        self._touched = []
        written = source.order[chunk]
        memory = self.memory
        nbytes = source.plan.landed_bytes
        if memory is not None and memory.make_room(nbytes, leased=leased) and self._is_young(memory.plan, written):
            held = (nbytes, float(int(written)))  # a blob says when, in whole seconds
            memory.keep(chunk, held, chain, tenant, fresh=False)
        if not source.plan.exact:
            return
        for tier in self.stored:
            if tier is source:
                break
            if tier.plan.write == "through" and self._is_young(tier.plan, written) and tier.lacks([chunk], tenant):
                tier.write([chunk], chain, tenant, written)

    def _is_young(self, plan: TierPlan, written: float) -> bool:
        return plan.ttl is None or written + plan.ttl > self._now

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _store(self, chain: list[int], first: int, tenant: int) -> None:
        self._touch(chain)
        memory = self.memory
        wanted = chain[first:] if first else chain
        lacking = [tier.lacks(wanted, tenant) for tier in self._through]
        todo = [] if memory is None else [chunk for chunk in wanted if chunk not in memory.order]
        if todo or any(lacking):
            self._touched = []
            if memory is not None:
                self._fill(todo, lacking, chain, tenant)
            for tier, missing in zip(self._through, lacking, strict=True):
                if missing:
                    tier.write_used(missing, chain, tenant, self._now)
            self._touch(chain)
        for tier in self._counting:
            tier.count(chain)

    def _fill(self, todo: list[int], lacking: Sequence[Sequence[int]], chain: list[int], tenant: int) -> None:
        """Take chunks into memory, as many at once as there is room for."""
        memory = self.memory
        assert memory is not None
        nbytes = memory.plan.stored_bytes
        most = memory.fits(len(todo))
        if len(todo) > most and not any(set(todo).intersection(missing) for missing in lacking):
            todo = todo[:most]  # memory is all there is: a tail that would push out its own head is not worth it
        while todo:
            now, todo = todo[:most], todo[most:]
            if not memory.make_room(nbytes * len(now)):
                memory.dropped += len(now) + len(todo)
                return
            memory.keep_all(now, (nbytes, self._now), chain, tenant)
            if todo:
                memory.touch(now)

    def _write_back(self, chunk: int, written: float, chain: Sequence[int], tenant: int) -> None:
        for tier in self._behind:
            if self._is_young(tier.plan, written) and tier.lacks([chunk], tenant):
                tier.write([chunk], chain, tenant, written)


def _quotas(plan: TierPlan, numbers: Mapping[str, int]) -> tuple[dict[int, int] | None, int | None]:
    """Bytes by tenant, and for those that are not named."""
    if not plan.quota:
        return None, None
    named = {numbers[salt]: nbytes for salt, nbytes in plan.quota.items() if salt in numbers}
    return named, plan.quota.get("*")
