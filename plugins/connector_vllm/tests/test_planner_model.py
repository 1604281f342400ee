"""The planner beside a model of an engine: whatever is saved or loaded is the KV that belongs there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_planner import NOBODY, planner
from vllm_fakes import BLOCK, FakeRequest

from kvloom import leading
from kvloom_connector_vllm.plan import Chunks, Move, Offer, Scheduled


class Engine(RuleBasedStateMachine):
    """Requests that share prefixes, over few blocks, preempted and ended at any time; memory holds what it should."""

    @initialize(save_generated=st.booleans(), tails=st.booleans(), blocks=st.integers(1, 5))
    def open(self, save_generated: bool, tails: bool, blocks: int) -> None:
        self.planner = planner(save_generated=save_generated, tails=tails, chunk_tokens=blocks * BLOCK)
        self.memory: dict[int, list[int | None]] = {block: [None] * BLOCK for block in range(14)}
        self.free = list(self.memory)
        self.requests: dict[str, FakeRequest] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.store: dict[bytes, tuple[int, ...]] = {}
        self.reading: dict[int, Move] = {}
        self.expected: dict[bytes, tuple[int, ...]] = {}
        self.pending: set[int] = set()
        self.count = 0

    def _token(self, request: FakeRequest, position: int) -> int:
        """The KV of a token, for a model whose KV is a digest of everything up to it."""
        return hash(tuple(request.tokens[: position + 1]))

    @rule(prefix=st.integers(0, 2), shared=st.integers(0, 20), own=st.integers(1, 12))
    def arrive(self, prefix: int, shared: int, own: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        tokens = [prefix] * shared + [100 + self.count % 3] * own
        self.requests[name] = FakeRequest(name, tokens)
        self.planner.begin(self.requests[name], NOBODY)

    @precondition(lambda self: any(name not in self.tables for name in self.requests))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Schedule a waiting request: load what the store has, compute some of the rest in the same step."""
        name = data.draw(st.sampled_from([name for name in self.requests if name not in self.tables]))
        request = self.requests[name]
        self.planner.begin(request, NOBODY)
        need = -(-(request.num_tokens + 8) // BLOCK)
        if need > len(self.free):
            return
        table = [self.free.pop(data.draw(st.integers(0, len(self.free) - 1))) for _ in range(need)]
        digests = self.planner.chunks(name).digests
        local = data.draw(st.integers(0, (request.num_tokens - 1) // BLOCK)) * BLOCK
        if local:
            self._step([])
            for number in list(self.reading):
                self._read(number)
        for position in range(local):  # the engine's own prefix cache has them
            block = self.memory[table[position // BLOCK]]
            block[position % BLOCK] = self._token(request, position)
        count = self.planner.held(local, [digest in self.store for digest in digests])
        there = [piece for piece in self.planner.pieces_of(name, count).pieces if piece.digest in self.store]
        pieces = tuple(leading(there, count * self.planner.chunk_tokens))
        tokens = self.planner.loadable(name, local, Offer(count, pieces))
        if tokens:
            self.planner.load(name, table, tokens)
            self._step([])
            self.planner.loaded(name)
            request_kv = [self._token(request, position) for position in range(local + tokens)]
            found = [self.memory[table[position // BLOCK]][position % BLOCK] for position in range(local + tokens)]
            assert found == request_kv, "what was loaded is the KV of these tokens"
        self.tables[name], self.computed[name] = table, local + tokens
        self._compute(name, data.draw(st.integers(1, request.num_tokens - local - tokens)), fresh=True)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        request = self.requests[name]
        left = request.num_tokens - self.computed[name]
        if left == 0:
            if request.num_tokens >= len(self.tables[name]) * BLOCK:
                return self.finish_named(name)
            request.append(1000 + request.num_tokens)
            left = 1
        return self._compute(name, data.draw(st.integers(1, left)), fresh=False)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Its blocks go at once, to be reused; it comes back like a new one."""
        name = data.draw(st.sampled_from(sorted(self.tables)))
        self.free += self.tables.pop(name)
        del self.computed[name]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_named(data.draw(st.sampled_from(sorted(self.tables))))

    def finish_named(self, name: str) -> None:
        table = self.tables.pop(name)
        save = self.planner.end(name, table[: -(-self.computed[name] // BLOCK)])
        self.pending |= set() if save is None else {save.number}
        self.free += table
        del self.computed[name]

    @precondition(lambda self: any(name not in self.tables for name in self.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A request that waits is given up, or one that is over is ended again: it has no blocks."""
        name = data.draw(st.sampled_from([name for name in self.requests if name not in self.tables]))
        self.planner.end(name)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A save gets its turn in the background."""
        self._read(data.draw(st.sampled_from(sorted(self.reading))))

    @rule()
    def forget(self) -> None:
        """The store loses everything, as stores may."""
        self.store.clear()

    def _compute(self, name: str, count: int, *, fresh: bool) -> None:
        before = self.computed[name]
        blocks = self.tables[name] if fresh else []
        self._step([Scheduled(name, blocks, fresh, before, before + count)], name)
        self.computed[name] = before + count

    def _step(self, scheduled: list[Scheduled], *computing: str) -> None:
        step = self.planner.step(scheduled)
        self.pending.clear()
        self._begin(step.ended)
        for number in step.fence:
            if number in self.reading:
                self._read(number)
        for load in step.loads:
            kv = [token for digest, _, _ in self._spans(load.chunks) for token in self.store[digest]]
            assert len(kv) == len(load.blocks) * BLOCK
            for index, block in enumerate(load.blocks):
                if block >= 0:
                    self.memory[block] = kv[index * BLOCK : (index + 1) * BLOCK]
        for name, part in zip(computing, scheduled, strict=True):
            for position in range(part.computed, part.after):
                block = self.tables[name][position // BLOCK]
                self.memory[block] = [*self.memory[block]]
                self.memory[block][position % BLOCK] = self._token(self.requests[name], position)
        self._begin(step.saves)

    def _begin(self, saves: Sequence[Move]) -> None:
        for save in saves:
            self.reading[save.number] = save
            request = self.requests[save.request]
            for digest, start, end in self._spans(save.chunks):
                kv_of_tokens = tuple(self._token(request, position) for position in range(start, end))
                assert self.expected.setdefault(digest, kv_of_tokens) == kv_of_tokens, "one name, one KV"

    def _read(self, number: int) -> None:
        save = self.reading.pop(number)
        kv = [token for block in save.blocks for token in self.memory[block]]
        first = save.first_block * BLOCK
        for digest, start, end in self._spans(save.chunks):
            self.store[digest] = tuple(kv[start - first : end - first])
            assert self.store[digest] == self.expected[digest], "the name of a chunk is the name of its KV"
        assert end - first == len(kv), "no block is read for nothing"
        self.planner.done([number])

    def _spans(self, chunks: Chunks) -> list[tuple[bytes, int, int]]:
        """The digest, the first token and the end of each chunk and piece."""
        step = self.planner.chunk_tokens
        whole = [(digest, n * step, (n + 1) * step) for n, digest in enumerate(chunks.digests, chunks.first)]
        return whole + [(piece.digest, piece.start, piece.end) for piece in chunks.pieces]

    @invariant()
    def nothing_is_remembered_that_is_over(self) -> None:
        if hasattr(self, "planner"):
            assert set(self.planner.reading) == self.reading.keys() | self.pending


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
