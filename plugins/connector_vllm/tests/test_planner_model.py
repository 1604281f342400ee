"""The planner beside a model of an engine: whatever is saved or loaded is the KV that belongs there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_planner import NOBODY
from vllm_fakes import BLOCK, FakeRequest

from kvloom import leading
from kvloom_connector_vllm.scheduling.plan import NULL, Boundary, Chunks, Group, Move, Scheduled
from kvloom_connector_vllm.scheduling.planner import Planner
from kvloom_connector_vllm.scheduling.reach import reach
from kvloom_connector_vllm.scheduling.tail import Piece

KINDS = (
    [{}], [{"window": 7}], [{}, {"window": 9}], [{"window": 5}, {}, {"window": 20}], [{}, {"span": 12}],
    [{"window": 16}, {"window": 3}], [{}, {"window": 8, "blocks": 2}], [{"blocks": 2}, {"window": 13}],
    [{"blocks": 3}, {"window": 5}], [{"blocks": 2, "window": 30}, {"window": 9, "blocks": 3}, {"window": 2}],
)  # fmt: skip
"""Models: of each group of layers, what a token attends to, and the size of a block in the smallest ones."""
STATES = ([{"state": 1}], [{}, {"state": 1}], [{"state": 1}, {"window": 7}, {}, {"state": 1}])
"""Those with states: only the last token's is there."""


def groups_of(kinds: Sequence[dict[str, int]], blocks: int) -> list[Group]:
    """blocks: of a chunk."""
    unit = BLOCK * lcm(*(kind.get("blocks", 1) for kind in kinds))
    return [
        Group.of(
            BLOCK * kind.get("blocks", 1), most=blocks * unit, hash_tokens=BLOCK, window=kind.get("window", 0),
            span=kind.get("span", 0), state=bool(kind.get("state")),
        )
        for kind in kinds
    ]  # fmt: skip


def attended(kind: dict[str, int], tokens: int) -> range:
    """The positions that the token behind these attends to, before itself; of a state, the one that it stands for."""
    if kind.get("state"):
        return range(max(0, tokens - 1), tokens)
    window, span = kind.get("window", 0), kind.get("span", 0)
    near = (place for place in range(tokens) if not window or tokens - place < window)
    return range(next((place for place in near if not span or place // span == tokens // span), tokens), tokens)


class Engine(RuleBasedStateMachine):
    """Requests that share prefixes, over few blocks, preempted and ended at any time; memory holds what it should.

    Blocks are any group's, and leave a window as soon as vLLM would have them leave. What is computed with is right.
    """

    @initialize(
        kinds=st.sampled_from(KINDS + STATES),
        save_generated=st.booleans(),
        tails=st.booleans(),
        blocks=st.integers(1, 5),
    )
    def open(self, kinds: Sequence[dict[str, int]], save_generated: bool, tails: bool, blocks: int) -> None:
        self.kinds, self.groups = kinds, groups_of(kinds, blocks)
        self.planner = Planner(self.groups, hash_tokens=BLOCK, save_generated=save_generated, tails=tails)
        self.unit = lcm(*(group.block_tokens for group in self.groups))
        # By block, and by the token in it.
        self.memory: dict[int, list[object]] = {block: [None] * 3 * BLOCK for block in range(1, 16 + 10 * len(kinds))}
        self.free = list(self.memory)
        self.requests: dict[str, FakeRequest] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}
        self.store: dict[tuple[int, bytes], tuple[object, ...]] = {}
        self.reading: dict[int, Move] = {}
        self.expected: dict[tuple[int, bytes], tuple[object, ...]] = {}
        self.pending: set[int] = set()
        self.count = 0

    def _token(self, request: FakeRequest, group: int, position: int) -> object:
        """The KV of a token, for a model whose KV is a digest of everything up to it."""
        return group, hash(tuple(request.tokens[: position + 1]))

    def _there(self, name: str, group: int, position: int) -> object:
        size = self.groups[group].block_tokens
        block = self.tables[name][group][position // size]
        return None if block == NULL else self.memory[block][position % size]

    def _attended(self, name: str, tokens: int) -> None:
        """Return whether all is there that the token behind these attends to."""
        for number, kind in enumerate(self.kinds):
            for position in attended(kind, tokens):
                right = self._token(self.requests[name], number, position)
                assert self._there(name, number, position) == right, "it is computed with the KV of these tokens"

    def _grow(self, name: str, tokens: int) -> list[list[int]]:
        """Give a request blocks for so many tokens; return the new ones. It has to fit."""
        new = []
        for group, table in zip(self.groups, self.tables[name], strict=True):
            need = -(-tokens // group.block_tokens) - len(table)
            skipped = max(0, need - 1) if group.state else 0
            own = [self.free.pop((7 * self.count) % len(self.free)) for _ in range(need - skipped)]
            new.append([NULL] * skipped + own)
            table.extend(new[-1])
        return new

    def _fits(self, name: str, tokens: int) -> bool:
        tables = self.tables.get(name) or [[] for _ in self.groups]
        needed = (
            -(-tokens // group.block_tokens) - len(table) for group, table in zip(self.groups, tables, strict=True)
        )
        return sum(needed) <= len(self.free)

    def _give_up(self, name: str, tokens: int) -> None:
        """Free the blocks that no token behind these attends to."""
        for kind, group, table in zip(self.kinds, self.groups, self.tables[name], strict=True):
            for index in range(min(len(table), attended(kind, tokens).start // group.block_tokens)):
                if table[index] != NULL:
                    self.free.insert(0, table[index])
                    table[index] = NULL

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
        if not self._fits(name, request.num_tokens):
            return
        local = data.draw(st.integers(0, (request.num_tokens - 1) // self.unit)) * self.unit
        held = [
            [(group, digest) in self.store for digest in chunks.digests]
            for group, chunks in enumerate(self.planner.chunks(name))
        ]

        def pieces(group: int, number: int) -> list[Piece]:
            found = [
                piece for piece in self.planner.pieces_of(name, group, number).pieces
                if (group, piece.digest) in self.store
            ]  # fmt: skip
            return leading(found, number * self.groups[group].chunk_tokens)

        hit, _ = self.planner.reach(name, local, held, pieces)
        tokens = self.planner.loadable(name, local, hit)
        assert tokens % self.unit == 0 and local + tokens < request.num_tokens
        self.tables[name] = [
            [NULL] * (attended(kind, local + tokens).start // group.block_tokens)
            for kind, group in zip(self.kinds, self.groups, strict=True)
        ]
        self._grow(name, local + tokens)
        self._own_cache(name, local)
        if tokens:
            self.planner.load(name, self.tables[name], tokens)
            self._step([])
            self.planner.loaded(name)
        self._attended(name, local + tokens)
        self.computed[name] = local + tokens
        self._compute(name, data.draw(st.integers(1, request.num_tokens - local - tokens)), fresh=True)

    def _own_cache(self, name: str, local: int) -> None:
        """The engine's own prefix cache has the first tokens; nothing else wants these blocks now."""
        if local:
            self._step([])
            for number in list(self.reading):
                self._read(number)
        for number, group in enumerate(self.groups):
            for position in range(local):
                block = self.tables[name][number][position // group.block_tokens]
                if block != NULL:
                    right = self._token(self.requests[name], number, position)
                    self.memory[block][position % group.block_tokens] = right

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        request = self.requests[name]
        left = request.num_tokens - self.computed[name]
        if left == 0:
            request.tokens.append(1000 + request.num_tokens)
            left = 1
        if data.draw(st.booleans()):  # the engine may know the hash of a block a step late
            request.rehash()
        count = data.draw(st.integers(1, left))
        self._give_up(name, self.computed[name])
        if not self._fits(name, self.computed[name] + count):
            return self.finish_named(name)
        return self._compute(name, count, fresh=False)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Its blocks go at once, to be reused; it comes back like a new one."""
        self._free(data.draw(st.sampled_from(sorted(self.tables))))

    def _free(self, name: str) -> None:
        self.free += [block for table in self.tables.pop(name) for block in table if block != NULL]
        del self.computed[name]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_named(data.draw(st.sampled_from(sorted(self.tables))))

    def finish_named(self, name: str) -> None:
        self._give_up(name, self.computed[name])
        tables = [
            table[: -(-self.computed[name] // group.block_tokens)]
            for group, table in zip(self.groups, self.tables[name], strict=True)
        ]
        self.pending |= {save.number for save in self.planner.end(name, tables)}
        self._free(name)

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

    @precondition(lambda self: self.store)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """The store loses some of it, as stores may."""
        for key in data.draw(st.lists(st.sampled_from(sorted(self.store)), max_size=4)):
            self.store.pop(key, None)

    @rule()
    def forget(self) -> None:
        self.store.clear()

    def _compute(self, name: str, count: int, *, fresh: bool) -> None:
        before = self.computed[name]
        new = self._grow(name, before + count)
        blocks = [list(table) for table in self.tables[name]] if fresh else new
        whole = [
            Boundary(name, number, self.tables[name][number][-1], before + count)
            for number, group in enumerate(self.groups)
            if group.state and not (before + count) % group.block_tokens
        ]
        self._step([Scheduled(name, blocks, fresh, before, before + count)], name, boundaries=whole)
        self.computed[name] = before + count

    def _step(self, scheduled: list[Scheduled], *computing: str, boundaries: Sequence[Boundary] = ()) -> None:
        step = self.planner.step(scheduled, boundaries)
        self.pending.clear()
        self._begin(step.ended)
        for number in step.fence:
            if number in self.reading:
                self._read(number)
        for load in step.loads:
            group, size = load.chunks.group, self.groups[load.chunks.group].block_tokens
            kv = [token for digest, _, _ in self._spans(load.chunks) for token in self.store[group, digest]]
            assert len(kv) == len(load.blocks) * size
            for index, block in enumerate(load.blocks):
                if block >= 0:
                    self.memory[block][:size] = kv[index * size : (index + 1) * size]
        for name, part in zip(computing, scheduled, strict=True):
            self._attended(name, part.computed)
            for number, group in enumerate(self.groups):
                for position in range(part.after - 1 if group.state else part.computed, part.after):
                    block = self.tables[name][number][position // group.block_tokens]
                    token = self._token(self.requests[name], number, position)
                    self.memory[block][position % group.block_tokens] = token
        self._begin(step.saves)

    def _begin(self, saves: Sequence[Move]) -> None:
        for save in saves:
            self.reading[save.number] = save
            request, group = self.requests[save.request], save.chunks.group
            for digest, start, end in self._spans(save.chunks):
                alone = self.groups[group].state
                kv_of_tokens = tuple(
                    self._token(request, group, position) for position in range(end - 1 if alone else start, end)
                )
                assert self.expected.setdefault((group, digest), kv_of_tokens) == kv_of_tokens, "one name, one KV"

    def _read(self, number: int) -> None:
        save = self.reading.pop(number)
        group, size = save.chunks.group, self.groups[save.chunks.group].block_tokens
        kv = [token for block in save.blocks for token in self.memory[block][:size]]
        first = save.first_block * size
        for digest, start, end in self._spans(save.chunks):
            self.store[group, digest] = tuple(kv[start - first : end - first])
            right = self.expected[group, digest]
            assert self.store[group, digest][-len(right) :] == right, "the name of a chunk is that of its KV"
        assert end - first == len(kv), "no block is read for nothing"
        self.planner.done([number])

    def _spans(self, chunks: Chunks) -> list[tuple[bytes, int, int]]:
        """The digest, the first token and the end of each chunk and piece."""
        step = self.groups[chunks.group].chunk_tokens
        whole = [(digest, n * step, (n + 1) * step) for n, digest in enumerate(chunks.digests, chunks.first)]
        return whole + [(piece.digest, piece.start, piece.end) for piece in chunks.pieces]

    @invariant()
    def nothing_is_remembered_that_is_over(self) -> None:
        if hasattr(self, "planner"):
            assert set(self.planner.reading) == self.reading.keys() | self.pending


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@given(
    window=st.integers(0, 30), span=st.sampled_from([0, 8, 12]), blocks=st.integers(1, 4), local=st.integers(0, 8),
    more=st.integers(0, 8), held=st.lists(st.booleans(), max_size=16), cut=st.lists(st.integers(0, 3), min_size=60),
    unit=st.sampled_from([BLOCK, 2 * BLOCK, 3 * BLOCK]),
)  # fmt: skip
def test_the_longest_prefix_is_found(
    window: int, span: int, blocks: int, local: int, more: int, held: list[bool], cut: list[int], unit: int
) -> None:
    """Beside every prefix tried in turn. cut: how much of each chunk that is not whole is held in pieces."""
    kind = {"window": window, "span": 0 if window else span}
    group = Group.of(BLOCK, most=blocks * unit, hash_tokens=BLOCK, **kind)
    size = group.chunk_tokens

    def ends(chunk: int) -> int:
        return chunk * size + min(cut[chunk] * BLOCK, size - BLOCK)

    def there(position: int, end: int) -> bool:
        chunk = position // size
        whole = chunk < len(held) and held[chunk]
        return position < local * unit or whole or (chunk == end // size and end <= ends(chunk))

    fine = [
        end for end in range(local * unit, (local + more) * unit + 1, unit)
        if all(there(position, end) for position in attended(kind, end))
    ]  # fmt: skip
    found = reach(group, local * unit, (local + more) * unit, held, ends, unit=unit)
    # What full attention has is rounded down by the planner.
    assert (found // unit * unit if group.full else found) == max(fine)


@given(
    kinds=st.sampled_from(KINDS), tokens=st.integers(1, 90), blocks=st.integers(1, 5),
    steps=st.lists(st.integers(1, 30), min_size=90), longer=st.integers(0, 20), session=st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_a_prompt_is_found_whole_however_it_was_computed(
    kinds: list[dict[str, int]], tokens: int, blocks: int, steps: list[int], longer: int, session: bool
) -> None:
    """As by the engine's own prefix cache: all of its whole blocks, by itself and by longer ones.

    session: each step computes an input of its own.
    """
    groups = groups_of(kinds, blocks)
    one = Planner(groups, hash_tokens=BLOCK, save_generated=False)
    unit = lcm(*(group.block_tokens for group in groups))
    ends = [0, *(end for end in accumulate(steps) if end < tokens), tokens]
    first = FakeRequest("a", list(range(ends[1] if session else tokens)))
    one.begin(first, NOBODY)
    stored: set[tuple[int, bytes]] = set()
    table = [list(range(1, 100)) for _ in groups]
    for begin, end in pairwise(ends):
        if session and begin:
            first.continued(begin, *range(begin, end))
        fresh = session or not begin
        step = one.step([Scheduled("a", table if fresh else (), fresh, begin, end)])
        for save in step.saves:
            begins = attended(kinds[save.chunks.group], begin).start
            assert save.first_block >= begins // groups[save.chunks.group].block_tokens, "the engine still has these"
            stored |= {(save.chunks.group, digest) for digest in save.chunks.digests}
            stored |= {(save.chunks.group, piece.digest) for piece in save.chunks.pieces}
    one.begin(FakeRequest("r", list(range(tokens + longer))), NOBODY)
    held = [[(group, digest) in stored for digest in chunks.digests] for group, chunks in enumerate(one.chunks("r"))]

    def pieces(group: int, number: int) -> list[Piece]:
        found = [piece for piece in one.pieces_of("r", group, number).pieces if (group, piece.digest) in stored]
        return leading(found, number * groups[group].chunk_tokens)

    hit, complete = one.reach("r", 0, held, pieces)
    assert hit.tokens == min(tokens, tokens + longer - 1) // unit * unit
    assert complete or longer
