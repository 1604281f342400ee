"""A simulation of the scheduler's half: an engine with few blocks, and workers that are late, fail and forget.

Everything comes from one seed. The oracle knows what each block of each rank holds: a violation is KV that a step
computes with, or a worker stores, and that is not that of its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from test_planner_model import KINDS, STATES, attended, groups_of
from vllm_fakes import BLOCK, FakeRequest

from kvloom import ChunkKey, KVSpec, MemoryFormat
from kvloom_connector_vllm.names import Names, owner_of
from kvloom_connector_vllm.paged.settings import Geometry
from kvloom_connector_vllm.scheduling.messages import Report
from kvloom_connector_vllm.scheduling.plan import NULL, Boundary, Move, Scheduled
from kvloom_connector_vllm.scheduling.planner import Planner
from kvloom_connector_vllm.scheduling.scheduler import Scheduler

MOST_TOKENS = 64
Value = tuple[int, int, int]
"""The KV of a token in one rank: group, a digest of all up to it and of its owner, the weights it was computed with."""


class Violation(AssertionError):
    """Wrong KV, or a promise that is not kept."""


@dataclass
class _Request:
    its: FakeRequest
    weights: int
    known: bool
    """False: with an adapter that cannot be identified, so that the scheduler's half is not told of it."""
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    loading: set[int] = field(default_factory=set)
    """Ranks that have not said that its load is over."""
    failed: bool = False
    """A load of it failed: it has begun anew."""
    over: bool = False
    running: bool = False
    wrong: bool = False
    """It computes with KV that did not come, and the engine has not been told."""
    digests: list[int] = field(default_factory=list)

    def digest(self, position: int) -> int:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else hash(self.its.cache_salt)
            self.digests.append(hash((before, self.its.tokens[len(self.digests)])))
        return self.digests[position]


class _Worker:
    """One rank: its part of every block, its memory tier, and the saves and loads that it was told of."""

    def __init__(self, blocks: int) -> None:
        self.blocks: list[list[Any]] = [[None] * 3 * BLOCK for _ in range(blocks)]
        self.stored: dict[ChunkKey, tuple[Any, ...]] = {}
        self.saves: dict[int, Move] = {}
        self.loads: dict[str, list[Move]] = {}
        self.came: dict[ChunkKey, None] = {}
        self.left: dict[ChunkKey, None] = {}
        self.report = Report()
        self.failures = 0

    def put(self, key: ChunkKey, values: tuple[Any, ...]) -> None:
        self.stored[key] = values
        self.left.pop(key, None)
        self.came[key] = None

    def drop(self, key: ChunkKey) -> None:
        del self.stored[key]
        self.came.pop(key, None)
        self.left[key] = None


class Simulation:
    """`run` does so many operations, and then lets all requests end. Raises Violation."""

    def __init__(self, seed: int) -> None:
        self.random = choose = random.Random(seed)
        self.kinds: Sequence[dict[str, int]] = choose.choice(KINDS + STATES)
        self.groups = groups_of(self.kinds, choose.randint(1, 4))
        self.unit = lcm(*(group.block_tokens for group in self.groups))
        planner = Planner(
            self.groups, hash_tokens=BLOCK, save_generated=choose.random() < 0.7, tails=choose.random() < 0.7
        )
        blocks = choose.randint(20, 40) * len(self.groups)
        self.workers = [_Worker(blocks) for _ in range(choose.randint(1, 2))]
        # Stages of a pipeline, the second of which has no layers of some groups.
        lacking = 1 if choose.random() < 0.3 else None
        self.names = [
            [
                [] if rank == lacking and number == len(self.groups) - 1 else [Names(
                    KVSpec("simulated", number + 1, 1, 1, "float32", world_size=len(self.workers), rank=rank),
                    Geometry(layers=number + 1, block_tokens=group.block_tokens, page_elements=1),
                    MemoryFormat.KV_PAGES, chunk_tokens=group.chunk_tokens,
                )]
                for number, group in enumerate(self.groups)
            ]
            for rank in range(len(self.workers))
        ]  # fmt: skip
        self.planner = planner
        self.scheduler = Scheduler(planner, self.names, None)
        self.free = list(range(1, blocks))
        self.requests: dict[str, _Request] = {}
        self.every: dict[str, _Request] = {}
        self.reports: list[tuple[Report, list[tuple[int, str, bool]], list[str]]] = []
        self.arrivals: list[tuple[int, str, bool]] = []
        self.weights = 0
        self.count = 0
        self.done: Counter[str] = Counter()

    def run(self, operations: int) -> Counter[str]:
        verbs = [self.arrive, self.step, self.abort, self.evict, self.reset]
        for _ in range(operations):
            self.random.choices(verbs, (6, 30, 1, 1, 0.05))[0]()
        for _ in range(10_000):
            if not self.requests and not self.scheduler.busy and not self.reports:
                break
            self.step()
        self._promise(not self.requests and not self.scheduler.busy, "all requests end, and all saves")
        self._promise(not self.planner.reading, "no block is held when nothing is under way")
        self._promise(len(self.free) + 1 == len(self.workers[0].blocks), "no block is lost")
        return self.done

    # -- operations ----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if len(self.requests) > 8:
            return
        self.count += 1
        pick, name = self.random, f"r{self.count}"
        tokens = [pick.randint(0, 1)] * pick.randint(0, 30) + [100 + pick.randint(0, 2)] * pick.randint(1, 12)
        its = FakeRequest(name, tokens, cache_salt=pick.choice([None, None, "a"]))
        one = self.every[name] = self.requests[name] = _Request(its, self.weights, pick.random() > 0.1)
        if one.known:
            self.scheduler.begin(its, self._owner(one))

    def abort(self) -> None:
        if self.requests:
            self._end(self.random.choice(list(self.requests)))

    def evict(self) -> None:
        worker = self.random.choice(self.workers)
        for key in self.random.sample(list(worker.stored), len(worker.stored) // 3):
            worker.drop(key)

    def reset(self) -> None:
        """The weights change; requests that run go on."""
        self.weights += 1
        self.scheduler.clear()

    def step(self) -> None:
        """The engine schedules some requests, and the workers do some of what they were told."""
        scheduled, boundaries = [], []
        for name, one in list(self.requests.items()):
            if one.loading or one.over or self.random.random() < 0.3:
                continue
            part = self._continued(name, one) if one.tables else self._started(name, one)
            if part is not None:
                scheduled.append(part)
        for part in scheduled:
            boundaries += self._boundaries(part)
        # Set to zero, because requests that were preempted in this same step had them.
        zeroed = self.random.sample(self.free, len(self.free) // 2) if self.random.random() < 0.05 else []
        orders = self.scheduler.orders(scheduled, boundaries, zeroed, awaits_loads=self.awaits_loads(scheduled))
        for rank, worker in enumerate(self.workers):
            if orders.clear:
                worker.report.saved.update(list(worker.saves))
                worker.saves.clear()
                for key in list(worker.stored):
                    worker.drop(key)
            for number in orders.step.fence:
                if number in worker.saves:
                    self._read(rank, number, cancelled=self.random.random() < 0.2)
            self.written_by_others(rank)
            worker.report.ascertained = orders.step.uncertain
            worker.saves.update((save.number, save) for save in orders.step.ended)
            for load in orders.step.loads:
                worker.loads.setdefault(load.request, []).append(load)
            self._some(rank)
            for block in zeroed:
                worker.blocks[block] = [None] * len(worker.blocks[block])
            for part in scheduled:
                self._compute(rank, part)
            worker.saves.update((save.number, save) for save in orders.step.saves)
            for request in orders.step.cancelled:
                if worker.loads.pop(request, None) is not None:
                    self._loaded(rank, request)
            self._some(rank)
        for part in scheduled:
            self.requests[part.request].computed = part.after
            self.done["tokens"] += part.after - part.computed
        self._reported()
        for name, one in list(self.requests.items()):
            if one.running and one.computed >= one.its.num_tokens:
                self._generated(name, one)

    # -- another connector ---------------------------------------------------------------------------------------------

    def awaits_loads(self, scheduled: Sequence[Scheduled]) -> bool:
        """The step computes with KV that is loaded meanwhile."""
        return False

    def written_by_others(self, rank: int) -> None:
        """Another connector writes to a rank's blocks, once the step's fence is over."""

    def failed_by_others(self) -> list[str]:
        """Requests that lack KV which another connector was to load in this step. The engine is told with its report,
        and computes them anew."""
        return []

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _owner(self, one: _Request) -> Any:
        return owner_of("", one.its.cache_salt or "")

    def _started(self, name: str, one: _Request) -> Scheduled | None:
        """Load what is offered, or begin to compute; neither if there is no room."""
        tokens = 0
        if one.known:
            found = self.scheduler.matched(one.its, self._owner(one), 0)
            assert found is not None
            tokens = found
            self._promise(not (one.failed and tokens), "what did not come once is not offered again")
            self._promise(tokens % self.unit == 0 and tokens < one.its.num_tokens, "whole blocks, and a token is left")
        after = tokens or self.random.randint(1, one.its.num_tokens)
        if not self._grow(one, after):
            return None
        if not tokens:
            self.scheduler.give(name, [list(table) for table in one.tables])
        if tokens:
            self.done["hits"] += 1
            one.loading = set(range(len(self.workers)))
            self.scheduler.load(one.its, [list(table) for table in one.tables], tokens)
            one.computed = tokens
            return None
        return self._running(name, one, after)

    def _continued(self, name: str, one: _Request) -> Scheduled | None:
        """Compute more, or give all blocks up if there is no room."""
        self._give_up(one)
        before = [len(table) for table in one.tables]
        after = self.random.randint(one.computed + 1, one.its.num_tokens)
        if self._grow(one, after):
            return self._running(name, one, after, before)
        self._release(one)
        self.done["preempted"] += 1
        return None

    def _running(self, name: str, one: _Request, after: int, before: Sequence[int] = ()) -> Scheduled:
        """before: lengths of the tables that are known, unless it was not running."""
        fresh, one.running = not one.running, True
        known = [0] * len(self.groups) if fresh else before
        tables = [table[count:] for table, count in zip(one.tables, known, strict=True)]
        return Scheduled(name, tables, fresh, one.computed, after)

    def _grow(self, one: _Request, tokens: int) -> bool:
        """Give a request blocks for so many tokens, if there are enough. New ones need none that are not attended to,
        and of states only the last."""
        tables = one.tables or [
            [NULL] * (attended(kind, tokens if group.state else one.computed).start // group.block_tokens)
            for kind, group in zip(self.kinds, self.groups, strict=True)
        ]
        need = [-(-tokens // g.block_tokens) - len(t) for g, t in zip(self.groups, tables, strict=True)]
        nulls = [max(0, count - 1) if group.state else 0 for group, count in zip(self.groups, need, strict=True)]
        if sum(need) - sum(nulls) > len(self.free):
            return False
        for table, count, skipped in zip(tables, need, nulls, strict=True):
            table += [NULL] * skipped
            table += [self.free.pop(self.random.randrange(len(self.free))) for _ in range(count - skipped)]
        one.tables = tables
        return True

    def _give_up(self, one: _Request) -> None:
        """Free blocks that no token to come attends to."""
        for kind, group, table in zip(self.kinds, self.groups, one.tables, strict=True):
            for index in range(min(len(table), attended(kind, one.computed).start // group.block_tokens)):
                if table[index] != NULL:
                    self.free.append(table[index])
                    table[index] = NULL

    def _release(self, one: _Request) -> None:
        self.free += [block for table in one.tables for block in table if block != NULL]
        one.tables, one.computed, one.running, one.wrong = [], 0, False, False

    def _end(self, name: str) -> None:
        one = self.requests[name]
        if one.over:
            return
        if one.loading:
            one.over = True  # its blocks are kept until no rank writes to them
            self.scheduler.end(name, [list(table) for table in one.tables])
            return
        if one.tables:
            self._give_up(one)
        tables = one.tables or [[] for _ in self.groups]
        self.scheduler.end(
            name, [t[: -(-one.computed // g.block_tokens)] for t, g in zip(tables, self.groups, strict=True)]
        )
        self._release(one)
        del self.requests[name]

    def _generated(self, name: str, one: _Request) -> None:
        """It has a new token, whose block may get its hash steps later, or is over."""
        if one.its.num_tokens >= MOST_TOKENS or self.random.random() < 0.1:
            self._end(name)
        else:
            one.its.tokens.append(1000 + self.random.randint(0, 1))
            if self.random.random() < 0.4:
                one.its.rehash()

    def _boundaries(self, part: Scheduled) -> Iterator[Boundary]:
        """Most states at the ends of blocks, and some that are not."""
        for number, group in enumerate(self.groups):
            if group.state and self.random.random() < (0.1 if part.after % group.block_tokens else 0.9):
                yield Boundary(part.request, number, self.requests[part.request].tables[number][-1], part.after)

    # -- the workers ---------------------------------------------------------------------------------------------------

    def _some(self, rank: int) -> None:
        """Do some of the saves and loads, in any order."""
        worker = self.workers[rank]
        for number in [number for number in worker.saves if self.random.random() < 0.3]:
            self._read(rank, number)
        for request in [request for request in worker.loads if self.random.random() < 0.3]:
            self._load(rank, request)

    def _compute(self, rank: int, part: Scheduled) -> None:
        one, memory = self.requests[part.request], self.workers[rank].blocks
        for number, (kind, group, table) in enumerate(zip(self.kinds, self.groups, one.tables, strict=True)):
            size = group.block_tokens
            if not self.names[rank][number]:
                continue
            for position in () if one.wrong else attended(kind, part.computed):
                value = memory[table[position // size]][position % size]
                if value is None or value[:2] != (number, one.digest(position)) or value[2] < one.weights:
                    raise Violation(f"{part.request} computes with {value} in place of token {position}")
            for position in range(part.after - 1 if group.state else part.computed, part.after):
                value = None if one.wrong else (number, one.digest(position), self.weights)
                memory[table[position // size]][position % size] = value

    def _spans(self, rank: int, move: Move) -> Iterator[tuple[ChunkKey, int, int]]:
        """Yield each chunk and piece, with its place in the values of the move's blocks."""
        first = move.first_block * self.groups[move.chunks.group].block_tokens
        for names in self.names[rank][move.chunks.group]:
            for one in names.segments(move.chunks):
                yield one.key, one.start - first, one.end - first

    def _read(self, rank: int, number: int, *, cancelled: bool = False) -> None:
        worker = self.workers[rank]
        save = worker.saves.pop(number)
        worker.report.saved[number] += 1
        if cancelled:
            return
        group, one = self.groups[save.chunks.group], self.every[save.request]
        values = [value for block in save.blocks for value in worker.blocks[block][: group.block_tokens]]
        for key, start, end in self._spans(rank, save):
            for place in range(end - 1 if group.state else start, end):
                position = save.first_block * group.block_tokens + place
                right = (save.chunks.group, one.digest(position), one.weights)
                if values[place] != right:
                    raise Violation(f"{values[place]} is stored as {right} of {save.request}")
            worker.put(key, tuple(values[start:end]))
            self.done["stored"] += 1

    def _load(self, rank: int, request: str) -> None:
        worker, failed = self.workers[rank], self.random.random() < 0.03
        for move in worker.loads.pop(request):
            size = self.groups[move.chunks.group].block_tokens
            for key, start, _ in self._spans(rank, move) if move.blocks else ():
                values = worker.stored.get(key)
                failed |= values is None
                for index in range(0, len(values or ()), size):
                    block = move.blocks[(start + index) // size]
                    if block >= 0:
                        worker.blocks[block][:size] = values[index : index + size]
        self._loaded(rank, request, failed=failed)

    def _loaded(self, rank: int, request: str, *, failed: bool = False) -> None:
        worker = self.workers[rank]
        worker.report.loaded.add(request)
        worker.failures += failed
        if failed:
            worker.report.failed.add(request)
        self.arrivals.append((rank, request, failed))

    def _reported(self) -> None:
        """Reports of this step, and later than that."""
        whole = Report()
        for rank, worker in enumerate(self.workers):
            report, worker.report = worker.report, Report()
            report.came[rank], report.left[rank] = list(worker.came), list(worker.left)
            report.failures[rank] = worker.failures
            worker.came, worker.left = {}, {}
            whole.add(report)
        self.reports.append((whole, self.arrivals, self.failed_by_others()))
        self.arrivals = []
        while self.reports and self.random.random() < 0.7:
            report, arrivals, wrong = self.reports.pop(0)
            self.scheduler.report(report, failed=bool(wrong))
            for name in wrong:
                if name in self.requests and self.requests[name].wrong:
                    self._release(self.requests[name])
            for rank, name, failed in arrivals:
                one = self.requests[name]
                one.loading.discard(rank)
                one.failed |= failed
                if one.loading or not (one.over or one.failed):
                    continue
                self._release(one)
                if one.over:
                    del self.requests[name]
                else:
                    self.done["failed"] += 1

    def _promise(self, kept: bool, what: str) -> None:
        if not kept:
            raise Violation(what)


class Sessions(Simulation):
    """Some requests get another input when they have answered one."""

    def _generated(self, name: str, one: _Request) -> None:
        if one.its.num_tokens > MOST_TOKENS - 20 or self.random.random() < 0.8:
            super()._generated(name, one)
            return
        one.its.append(1000)  # the last token of the answer, which goes
        one.its.continued(one.computed, *[100 + self.random.randint(0, 2)] * self.random.randint(1, 12))
        one.running = False
        self.done["continued"] += 1
