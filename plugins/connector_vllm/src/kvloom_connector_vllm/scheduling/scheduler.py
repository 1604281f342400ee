"""The scheduler's half: which tokens can be loaded, and what the workers do in each step. Knows no vLLM."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvloom import ChunkKey, Index, leading, one_line

from ..names import Names
from .announcing import Announcement, Announcer
from .messages import Orders, Report
from .plan import Boundary, Chunks, Group, Hit, Owner, Request, Scheduled, Step
from .planner import Planner
from .tail import Piece

log = logging.getLogger(__name__)

MEMORY = "memory"
"""The workers' memory in lists of tiers, whatever its name in the configuration."""
LOOKUP_SECONDS = 0.005
"""Time that a step waits for the tiers' answers, for all of its requests together; later answers count
in later steps."""
LATE_SECONDS = 1.0
"""After so long without an answer a request computes itself."""
AGAIN_SECONDS = 0.02
"""First interval between questions to the tiers for a waiting request; later, an eighth of its waiting time."""
STALE_SECONDS = 1.0
"""Age of an answer after which the tiers are asked again: another engine may have stored the missing chunks."""

MOST_PATIENCE = 60.0
"""Seconds that a request waits at most for KV that another engine is to store."""


Told = Mapping[ChunkKey, str]
"""Chunks and pieces of the shared tiers, each with the fastest tier that has it."""


_Keys = Sequence[tuple[set[ChunkKey], list[ChunkKey]]]
"""For each part of each rank, what its memory holds, and the keys of some chunks and pieces."""


class _Found(NamedTuple):
    """The KV that can be loaded for a request, and its tiers."""

    hit: Hit
    tiers: list[tuple[int, int, str]]
    """For each chunk and piece of the first group its first token, its end and its tier."""
    complete: bool
    """Nothing more of this prompt can be loaded, or would be stored."""


@dataclass(slots=True)
class _Lookup:
    """The shared tiers' answer about a request's chunks. Asking again makes a new one."""

    chunks: tuple[Chunks, ...]
    """By group."""
    keys: Sequence[_Keys]
    """The keys of these chunks."""
    asked: Future[Told] | None
    """None if no tier need be asked."""
    since: float
    again: float = 0.0
    """Time of the next lookup for a request that waits for another engine; steps are more frequent."""


class Scheduler:
    """One per engine. Nothing here waits for a tier for longer than `LOOKUP_SECONDS`."""

    def __init__(
        self, planner: Planner, ranks: Sequence[Sequence[Sequence[Names]]], index: Index | None,
        announcer: Announcer | None = None, *, asynchronous: bool = True,
    ) -> None:  # fmt: skip
        """ranks: how each rank's chunks are called, by group: names for each of its parts. index: of the tiers that
        processes share, if there are any. announcer: of the first group's chunks."""
        self._planner = planner
        self._ranks = tuple(ranks)
        self._index = index
        self._announcer = announcer
        self._asynchronous = asynchronous
        self._saving: dict[int, Chunks] = {}
        self._held: list[set[ChunkKey]] = [set() for _ in ranks]
        self._lookups: dict[str, _Lookup] = {}
        self._patience: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(2, "kvloom-lookup") if index is not None else None
        self._waiting: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._generation = ""
        self._clear = False
        self._budget: float | None = None
        self._patient = False
        self.counts: Counter[str] = Counter()
        """`lookups`, `late`: whose answer took longer than a step waits, `hits` and `tokens` offered, `failed`."""
        self.sources: dict[str, dict[str, int]] = {}
        """By request, tokens to be loaded by tier (`MEMORY`, or the name of a shared one)."""

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, request: Request, owner: Owner, local: int = 0) -> None:
        """A request has come, of which the engine has `local` tokens: ask for its chunks, so that the answer is there
        when it is its turn."""
        self._planner.begin(request, owner._replace(generation=self._generation), local)
        if request.request_id not in self._lookups:
            self._ask(request.request_id)

    def matched(self, request: Request, owner: Owner, local: int, *, patience: float = 0.0) -> int | None:
        """The number of tokens after the first `local` ones that can be loaded; None: ask again at the next step.

        patience: maximum seconds to wait for the rest, which another engine is storing now.
        """
        self.begin(request, owner, local)
        lookup = self._lookups[request.request_id]
        if patience > 0 and time.monotonic() < lookup.again:
            self._patient = True
            return None
        grown = self._planner.named(request.request_id) != tuple(len(chunks.digests) for chunks in lookup.chunks)
        stale = lookup.asked is None or lookup.asked.done()
        if grown or (stale and time.monotonic() - lookup.since > STALE_SECONDS):
            lookup = self._ask(request.request_id)
        told: Told = {}
        if lookup.asked is not None:
            if not self._answered(lookup.asked):
                if time.monotonic() - lookup.since < LATE_SECONDS:
                    return None
                self.counts["late"] += 1
                lookup.asked.cancel()
            else:
                try:
                    told = lookup.asked.result()
                except Exception as error:  # cancelled, too: it took too long before
                    log.warning("the tiers' content is unknown: %s", one_line(error or type(error).__name__))
        found = self._found(request.request_id, lookup.keys, local, told)
        tokens = self._planner.loadable(request.request_id, local, found.hit)
        pause = self._pause(request.request_id, patience) if patience > 0 and not found.complete else 0.0
        if pause > 0:
            lookup.again = time.monotonic() + pause
            lookup.since = lookup.again - STALE_SECONDS
            self._patient = True
            return None
        self.sources[request.request_id] = _by_tier(found.tiers, local, local + tokens)
        return tokens

    def load(self, request: Request, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has made room for what `matched` offered. blocks: all of the request's, by group."""
        self._planner.load(request.request_id, blocks, tokens)
        self.counts["hits"] += 1
        self.counts["tokens"] += tokens

    def give(self, request: str, blocks: Sequence[Sequence[int]]) -> None:
        """The engine has made room for a request, and for what another connector may load for it. blocks: all of its,
        by group."""
        self._planner.give(request, blocks)

    def end(self, request: str, blocks: Sequence[Sequence[int]] = ()) -> None:
        """It is over; its blocks may be freed at once. blocks: all of them, by group."""
        known = self._planner.request(request)
        for save in self._planner.end(request, blocks):
            if known is not None and self._announcer is not None and not save.chunks.group:
                self._announcer.learn(known, save.chunks)
        self._forget(request)
        self._patience.pop(request, None)
        self.sources.pop(request, None)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def orders(
        self, scheduled: Sequence[Scheduled], boundaries: Iterable[Boundary] = (), written: Sequence[int] = (), *,
        idle: bool = False, awaits_loads: bool = False,
    ) -> Orders:  # fmt: skip
        step = self._planner.step(scheduled, boundaries, written, awaits_loads=awaits_loads)
        for save in (*step.saves, *step.ended):
            self._waiting[save.number] = len(self._ranks)
        if self._announcer is not None:
            self._learn(step, self._announcer)
        clear, self._clear, self._budget = self._clear, False, None
        patient, self._patient = self._patient, False
        return Orders(step, dict(self._failures), clear, idle, patient)

    def report(self, report: Report, *, failed: bool = False) -> None:
        """Apply the workers' reports on the steps so far. failed: a load of some connector's did, in the step that the
        report is of."""
        if report.ascertained:
            self._planner.ascertain(report.ascertained, failed=failed)
        for rank in report.whole:
            self._held[rank].clear()
        for rank, keys in report.came.items():
            self._held[rank].update(keys)
        for rank, keys in report.left.items():
            self._held[rank].difference_update(keys)
        done = []
        for number, ranks in report.saved.items():
            self._waiting[number] = self._waiting.get(number, 0) - ranks
            if self._waiting[number] <= 0:
                del self._waiting[number]
                done.append(number)
        self._planner.done(done)
        if self._announcer is not None:
            self._announce(report, done, self._announcer)
        for request in report.loaded:
            self._planner.loaded(request)
        new = sum(count - self._failures.get(rank, 0) for rank, count in report.failures.items())
        if new > 0:
            self.counts["failed"] += new
            self._failures |= report.failures
            self._planner.doubt(report.failed, everything=not self._asynchronous)
            for request in report.failed:
                self._forget(request)

    def clear(self) -> None:
        """Stop using older KV, and give new names to KV computed from now on.

        Memory is emptied. Shared tiers keep their chunks, which are valid for engines with the weights in their names.
        KV from after a reset is only of use to this engine, whose weights may have changed.
        """
        self._generation = secrets.token_hex(8)
        self._clear = True
        self._planner.seal()
        for request in list(self._lookups):
            self._forget(request)
        if self._announcer is not None:
            self._announcer.cleared()

    def taken(self) -> dict[str, int]:
        """`counts` since the last call."""
        taken, self.counts = dict(self.counts), Counter()
        return taken

    @property
    def busy(self) -> bool:
        """There is something to do that workers do not know of, or have not said to be done."""
        return bool(self._waiting) or self._planner.owes or self._clear

    def close(self) -> None:
        """Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._index is not None:
            self._index.close()

    def announcements(self) -> list[Announcement]:
        """Chunks that entered or left since the last call, if announcements are on."""
        return [] if self._announcer is None else self._announcer.take()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _answered(self, asked: Future[Told]) -> bool:
        """Wait for an answer within the step's remaining time; return whether there is one."""
        now = time.monotonic()
        if self._budget is None:
            self._budget = now + LOOKUP_SECONDS
        return asked.done() or bool(wait([asked], timeout=max(0.0, self._budget - now)).done)

    def _forget(self, request: str) -> None:
        lookup = self._lookups.pop(request, None)
        if lookup is not None and lookup.asked is not None:
            lookup.asked.cancel()

    def _ask(self, request: str) -> _Lookup:
        self._forget(request)
        chunks = self._planner.chunks(request)
        keys = [self._keys(some) for some in chunks]
        self.counts["lookups"] += 1
        asked = None
        if self._pool is not None and not self._found(request, keys, 0, {}).complete:
            asked = self._pool.submit(self._located, chunks, self._planner.hashes(request))
        lookup = self._lookups[request] = _Lookup(chunks, keys, asked, time.monotonic())
        return lookup

    def _pause(self, request: str, patience: float) -> float:
        """For how many seconds it does not look again; none when `patience` is over, since it first asked."""
        now = time.monotonic()
        until = self._patience.setdefault(request, now + patience)
        waited = patience - (until - now)
        return min(max(AGAIN_SECONDS, waited / 8), until - now)

    def _learn(self, step: Step, announcer: Announcer) -> None:
        for move in (*step.saves, *step.loads):
            request = self._planner.request(move.request)
            if request is not None and not move.chunks.group:
                announcer.learn(request, move.chunks)
        if self._index is not None:
            saves = (save for save in (*step.saves, *step.ended) if not save.chunks.group)
            self._saving.update((save.number, save.chunks) for save in saves)

    def _announce(self, report: Report, done: Sequence[int], announcer: Announcer) -> None:
        announcer.came(self._announced(report.came), "CPU")
        announcer.left(self._announced(report.left), "CPU")
        for number in done:
            chunks = self._saving.pop(number, None)
            if chunks is not None:
                announcer.stored(chunks, "STORAGE")

    def _announced(self, changes: Mapping[int, Sequence[ChunkKey]]) -> Sequence[ChunkKey]:
        """The first group's, of the first rank that has its layers, which stands for all; of its parts, the first's.

        changes: by rank.
        """
        rank, its = next((rank, its) for rank, its in enumerate(self._ranks) if its[0])
        keys = changes.get(rank, ())
        return keys if sum(map(len, its)) == 1 else [key for key in keys if its[0][0].made(key)]

    def _located(self, chunks: Sequence[Chunks], hashes: Sequence[bytes]) -> Told:
        """The answer of the tiers about these chunks, and about the pieces of the first that cannot be loaded.

        chunks: by group, from the beginning of a sequence. hashes: of its blocks. The tiers are asked once if that is
        the first that memory lacks.
        """
        planner, told = self._planner, dict[ChunkKey, str]()
        ends = [len(some.digests) for some in chunks]
        asked = [
            some._replace(pieces=of.of(hashes, end)) for some, of, end in zip(chunks, planner.pieces, ends, strict=True)
        ]
        keys, before = [self._keys(some) for some in chunks], -1

        def lacking() -> int:
            return min(map(self._lacking, [self._tiers(its, told) for its in keys], planner.groups))

        while (first := lacking()) != before:
            for number, (group, of) in enumerate(zip(planner.groups, planner.pieces, strict=True)):
                begin, size = first // group.chunk_tokens, group.chunk_tokens
                for chunk in range(begin, min(-(-(first + planner.chunk_tokens) // size), ends[number])):
                    asked.append(Chunks(chunks[number].owner, chunk, (), of.of(hashes, chunk), number))
            told.update(self._told(asked))
            before, asked = first, []
        return told

    def _lacking(self, tiers: Sequence[str | None], group: Group) -> int:
        """The first token of the chunk whose pieces may be of use: behind all that is held without a gap, or, where
        beginnings are not needed, behind all that is held."""
        count = len(tiers)
        if group.full:
            chunk = next((number for number in range(count) if tiers[number] is None), count)
        else:
            chunk = next((number + 1 for number in reversed(range(count)) if tiers[number] is not None), 0)
        return chunk * group.chunk_tokens

    def _told(self, chunks: Sequence[Chunks]) -> dict[ChunkKey, str]:
        """The answer of the tiers about every rank's part of these."""
        assert self._index is not None
        keys = {
            segment.key: segment
            for rank in self._ranks for some in chunks for names in rank[some.group] for segment in names.segments(some)
        }  # fmt: skip
        located = zip(keys, self._index.locate(list(keys.values())), strict=True)
        return {key: tier for key, tier in located if tier is not None}

    def _found(self, request: str, keys: Sequence[_Keys], local: int, told: Told) -> _Found:
        """The KV that can be loaded for a request. The engine has `local` tokens. keys: by group, of its chunks."""
        planner, first = self._planner, {}

        def pieces(group: int, number: int) -> tuple[Piece, ...]:
            candidates = planner.pieces_of(request, group, number)
            where = self._tiers(self._keys(candidates), told)
            there = [piece for piece, tier in zip(candidates.pieces, where, strict=True) if tier is not None]
            found = tuple(leading(there, number * planner.groups[group].chunk_tokens))
            if not group:
                first.update({piece: tier for piece, tier in zip(candidates.pieces, where, strict=True) if tier})
            return found

        tiers = [self._tiers(some, told) for some in keys]
        hit, complete = planner.reach(request, local, tiers, pieces)
        step = planner.groups[0].chunk_tokens
        count = hit.offers[0].chunks
        spans = [(number * step, (number + 1) * step, tier) for number, tier in enumerate(tiers[0][:count]) if tier]
        spans += [(piece.start, piece.end, first[piece]) for piece in hit.offers[0].pieces]
        return _Found(hit, spans, complete)

    def _keys(self, chunks: Chunks) -> _Keys:
        return [
            (held, [segment.key for segment in names.segments(chunks)])
            for rank, held in zip(self._ranks, self._held, strict=True) for names in rank[chunks.group]
        ]  # fmt: skip

    def _tiers(self, keys: _Keys, told: Told) -> list[str | None]:
        """By chunk and piece, where it would come from: None unless every part of every rank is somewhere."""
        (held, first), *others = keys
        tiers = [MEMORY if key in held else told.get(key) for key in first]
        for held, more in others:
            for index, key in enumerate(more):
                if tiers[index] is not None and key not in held:
                    tiers[index] = told.get(key)
        return tiers


def _by_tier(found: Iterable[tuple[int, int, str]], first: int, last: int) -> dict[str, int]:
    """The tokens from `first` to `last`, by tier."""
    tokens: dict[str, int] = {}
    for start, end, tier in found:
        here = min(end, last) - max(start, first)
        if here > 0:
            tokens[tier] = tokens.get(tier, 0) + here
    return tokens


def patience_of(params: Any) -> float:
    """The seconds that a request is willing to wait, if its value is valid: clients write it.

    params: its `kv_transfer_params`.
    """
    wait = params.get("kvloom_wait_seconds") if isinstance(params, dict) else None
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait > 0:
        return 0.0
    return float(min(wait, MOST_PATIENCE))
