"""An engine without KV: what each request would have got from which tier, and what that would have moved and evicted.

Requests come one after the other, and every write is over before the next: of what an engine does this leaves out what
depends on how long things take, and the gaps in the pool of a memory tier of fewer than 32 chunks, or of one with
pieces of chunks, which holds a little less. The rules are those of `kvloom.pipeline.stack`.

In the place of a chunk that is nowhere, those of its pieces are taken that the trace names: what the recorded engine
took. Where that had the chunk itself, or none of its pieces, another configuration might have found some that are not
known here; it gets no fewer hits than are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvloom import leading
from kvloom_tools.replay.memory import Memory
from kvloom_tools.replay.sizes import TierPlan
from kvloom_tools.replay.stored import Stored
from kvloom_tools.replay.trace import Line, Piece, Tail, piece_tokens

_STORES = frozenset({"store", "store_layer"})
_ASKS = frozenset({"retrieve", "retrieve_layer"})
_MOST_TIERS = 64
"""Names of recorded tiers that are kept apart."""


@dataclass
class Sums:
    """The sums so far."""

    requests: int = 0
    """Requests for KV."""
    whole: int = 0
    """Requests that got all chunks and pieces that they asked for."""
    partly: int = 0
    """Requests that got some of them."""
    asked_tokens: int = 0
    """All tokens of the prompts, but for those that the engine had, and what fills no chunk."""
    asked_chunks: int = 0
    hit_chunks: Counter[str] = field(default_factory=Counter)
    """Whole chunks, by tier."""
    hit_pieces: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Pieces of chunks, by tier and their number of tokens."""
    recorded_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that the recorded engine got, by its tiers."""
    unfit: int = 0
    """Lines whose blocks do not go with the chunks of this configuration."""

    def note_recorded(self, tokens: Mapping[str, int]) -> None:
        """tokens: of one line, whose names of tiers anybody may have written."""
        known = self.recorded_tokens
        for name, count in tokens.items():
            known[name if name in known or len(known) < _MOST_TIERS else "other"] += count

    def hit_tokens(self, chunk_tokens: int) -> Counter[str]:
        """By tier."""
        found = Counter({name: count * chunk_tokens for name, count in self.hit_chunks.items()})
        for (name, tokens), count in self.hit_pieces.items():
            found[name] += tokens * count
        return found


class Replay:
    """The tiers of one configuration, empty at first."""

    def __init__(
        self, plans: Sequence[TierPlan], *, chunk_tokens: int, tenants: Mapping[str, int] | None = None,
        save_tails: bool = True,
    ) -> None:  # fmt: skip
        """tenants: the number in the trace of salts that a quota names. save_tails: as in the configuration."""
        self.chunk_tokens = chunk_tokens
        self.save_tails = save_tails
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
        whole, tail = len(chunks), line.tail
        if tail is not None:
            if self.save_tails and line.block_tokens == self.chunk_tokens:
                chunks = [*chunks, *[piece.entry for piece in tail.own]]
                first += tail.first if first == whole else 0
            else:
                tail = None
        if line.served:
            self.sums.note_recorded(line.served)
        if verb in _STORES:
            self._store(chunks, first, line.salt)
            return
        asks = verb != "prefetch" and verb != "pin"
        since = first
        if verb == "save":
            since = whole if line.asked == len(line.hash_ids) else self._chunk_at(line, line.asked)
            since = max(first, since + (tail.asked if tail is not None and since == whole else 0))
        if asks and (since == first or chunks[since:]):
            self._ask(line, chunks, since, whole)
        gaps = verb in ("load", "save", "prefetch", "pin")  # `load_layers` ends where something is lacking
        hits = self._retrieve(chunks, since, line.salt, gaps=gaps, asks=asks, tail=tail)
        if asks and chunks[since:]:
            self.sums.whole += hits == len(chunks) - since
            self.sums.partly += 0 < hits < len(chunks) - since
        if not verb or verb == "save":
            self._store(chunks, first, line.salt)

    def _ask(self, line: Line, chunks: Sequence[int], first: int, whole: int) -> None:
        sums = self.sums
        sums.requests += 1
        had = first * self.chunk_tokens
        if first > whole:
            had = whole * self.chunk_tokens + sum(map(piece_tokens, chunks[whole:first]))
        sums.asked_tokens += max(0, line.input_tokens - had)
        more = 0 if len(chunks) == whole else sum(chunk < 0 for chunk in chunks[first:])
        sums.asked_chunks += len(chunks) - first - more

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
            chunks = [*islice((block_id * each + part for block_id in ids for part in range(each)), count)]
            return chunks, min(line.first * each, len(chunks))
        return None

    # -- towards the engine --------------------------------------------------------------------------------------------

    def _touch(self, chain: list[int]) -> None:
        if self._touched != chain:
            for touch in self._touches:
                touch(chain)
            self._touched = chain

    def _retrieve(self, chain: list[int], first: int, tenant: int, *, gaps: bool, asks: bool, tail: Tail | None) -> int:
        """The number that came of the chain's chunks and pieces."""
        self._touch(chain)
        for tier in self._counting:
            tier.count(chain)
        wanted = chain[first:] if first else chain
        memory, hits = self.memory, self.sums.hit_chunks if asks else Counter()
        if memory is not None:
            order = memory.order
            held = sum([chunk in order for chunk in wanted])
            if held == len(wanted):
                if tail is None:
                    hits[memory.plan.name] += held
                else:
                    for chunk in wanted:
                        self._hit(chunk, memory.plan.name, hits, asks=asks)
                return held
        leased = set() if memory is None else memory.held(wanted)
        came = 0
        for chunk in wanted:
            if memory is not None and chunk in leased:
                leased.discard(chunk)  # copied to the engine: from here on it may go
                name = memory.plan.name
            else:
                source = next((tier for tier in self.stored if chunk in tier.order), None)
                if source is None:
                    if gaps:
                        continue
                    break
                name = source.plan.name
                self._promote(chunk, source, chain, tenant, leased)
            if chunk >= 0:
                hits[name] += 1
            else:
                self._hit(chunk, name, hits, asks=asks)
            came += 1
        taken = [] if tail is None or gaps or came == len(wanted) else self._taken(chain, first + came, tail)
        if taken:
            self._take(taken, chain, first + came, tenant, hits, asks=asks)
        self._touch([*chain, *taken] if taken else chain)
        return came

    def _hit(self, chunk: int, name: str, hits: Counter[str], *, asks: bool) -> None:
        if chunk >= 0:
            hits[name] += 1
        elif asks:
            self.sums.hit_pieces[name, piece_tokens(chunk)] += 1

    def _source(self, chunk: int) -> Stored | None:
        return next((tier for tier in self.stored if chunk in tier.order), None)

    def _taken(self, chain: Sequence[int], lacking: int, tail: Tail) -> list[int]:
        """The pieces that lead on from where `lacking` is nowhere. Own ones of a shorter sequence are among them."""
        whole = len(chain) - len(tail.own)
        start = lacking * self.chunk_tokens if lacking < whole else tail.own[lacking - whole].start
        memory = self.memory
        there = [
            piece
            for piece in sorted((*tail.others, *tail.own), key=_end)
            if (memory is not None and piece.entry in memory) or self._source(piece.entry) is not None
        ]
        return [piece.entry for piece in leading(there, start)]

    def _take(
        self, taken: Sequence[int], chain: Sequence[int], lacking: int, tenant: int, hits: Counter[str], *, asks: bool
    ) -> None:
        """Move pieces up that are taken in the place of a chunk."""
        memory = self.memory
        path = [*chain[:lacking], *taken, *[chunk for chunk in chain[lacking:] if chunk not in taken]]
        leased = set() if memory is None else memory.held(taken)
        for chunk in taken:
            if memory is not None and chunk in leased:
                leased.discard(chunk)
                self._hit(chunk, memory.plan.name, hits, asks=asks)
                continue
            source = self._source(chunk)
            if source is None:
                return
            self._hit(chunk, source.plan.name, hits, asks=asks)
            self._promote(chunk, source, path, tenant, leased)

    def _promote(self, chunk: int, source: Stored, chain: list[int], tenant: int, leased: set[int]) -> None:
        self._touched = []
        written = source.order[chunk]
        memory = self.memory
        nbytes = source.plan.landed_bytes if chunk >= 0 else source.plan.piece(piece_tokens(chunk)).landed
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
        most = memory.fits(todo)
        if len(todo) > most and not any(set(todo).intersection(missing) for missing in lacking):
            todo = todo[:most]  # memory is all there is: a tail that would push out its own head is not worth it
        while todo:
            now, todo = todo[:most], todo[most:]
            if not now or not memory.make_room(memory.sizes(now)):
                memory.dropped += len(now) + len(todo)
                return
            memory.keep_all(now, self._now, chain, tenant)
            if todo:
                memory.touch(now)
                most = memory.fits(todo)

    def _write_back(self, chunk: int, written: float, chain: Sequence[int], tenant: int) -> None:
        for tier in self._behind:
            if self._is_young(tier.plan, written) and tier.lacks([chunk], tenant):
                tier.write([chunk], chain, tenant, written)


def _end(piece: Piece) -> int:
    return piece.end


def _quotas(plan: TierPlan, numbers: Mapping[str, int]) -> tuple[dict[int, int] | None, int | None]:
    """Bytes by tenant, and for those that are not named."""
    if not plan.quota:
        return None, None
    named = {numbers[salt]: nbytes for salt, nbytes in plan.quota.items() if salt in numbers}
    return named, plan.quota.get("*")
