"""The planner beside a model of an engine: whatever is saved or loaded is the KV that belongs there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm_fakes import BLOCK, FakeRequest

from kvloom import leading
from kvloom_connector_vllm.plan import IDLE, Chunks, Move, Offer, Owner, Scheduled
from kvloom_connector_vllm.planner import Planner
from kvloom_connector_vllm.tail import Pieces

CHUNK = 2 * BLOCK
NOBODY = Owner()


def planner(**settings: Any) -> Planner:
    usual = {
        "block_tokens": BLOCK,
        "chunk_tokens": CHUNK,
        "hash_tokens": BLOCK,
        "save_generated": False,
        "tails": False,
    }
    return Planner(**{**usual, **settings})


def loadable(one: Planner, local: int, held: Sequence[bool]) -> int:
    return one.loadable("r", local, Offer(one.held(local, held)))


def test_a_prompt_is_saved_by_whole_chunks_as_it_is_computed() -> None:
    one, request = planner(), FakeRequest("r", list(range(21)))
    one.begin(request, NOBODY)
    first = one.step([Scheduled("r", [5, 6, 7, 8, 9, 4], True, 0, 10)])
    (save,) = first.saves
    assert (save.chunks.first, save.first_block, save.blocks) == (0, 0, (5, 6))
    assert save.chunks.digests == (request.block_hashes[1],)
    assert first.touched[0].digests == (request.block_hashes[1], request.block_hashes[3])
    (save,) = one.step([Scheduled("r", [], False, 10, 21)]).saves
    assert (save.chunks.first, save.first_block, save.blocks) == (1, 2, (7, 8))
    assert one.step([Scheduled("r", [], False, 21, 22)]) is IDLE


@pytest.mark.parametrize(("local", "held", "tokens"), [
    (0, [True, True], 16), (0, [True, False], 8), (0, [False, True], 0), (4, [True, True], 12), (12, [False, True], 4),
    (16, [True, True], 0), (8, [True, True], 8),
])  # fmt: skip
def test_what_can_be_loaded(local: int, held: list[bool], tokens: int) -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(20))), NOBODY)
    assert loadable(one, local, held) == tokens
    assert loadable(one, local, held) == tokens, "asking changes nothing"


def test_a_token_is_left_to_compute() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(16))), NOBODY)
    assert loadable(one, 0, [True, True]) == 12
    move = one.load("r", [1, 2, 3, 4], 12)
    assert (move.chunks.first, len(move.chunks.digests), move.first_block, move.blocks) == (0, 2, 0, (1, 2, 3, -1))


def test_part_of_a_chunk_is_loaded_behind_what_is_there() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(40))), NOBODY)
    assert loadable(one, 12, [True] * 5) == 24
    move = one.load("r", list(range(10)), 24)
    assert (move.chunks.first, len(move.chunks.digests), move.first_block) == (1, 4, 2)
    assert move.blocks == (-1, 3, 4, 5, 6, 7, 8, -1)


def test_generated_tokens_are_saved_if_asked_for() -> None:
    for save_generated, expected in ((False, 1), (True, 2)):
        one, request = planner(save_generated=save_generated), FakeRequest("r", list(range(10)))
        one.begin(request, NOBODY)
        saves = list(one.step([Scheduled("r", [1, 2, 3], True, 0, 10)]).saves)
        for position in range(10, 17):
            request.append(position)
            blocks = [position // BLOCK + 1] if position % BLOCK == 0 and position >= 12 else []
            saves += one.step([Scheduled("r", blocks, False, position, position + 1)]).saves
        assert len(saves) == expected


@pytest.mark.parametrize(("generated", "digests", "cuts"), [
    (1, 0, []), (2, 0, [(16, 24)]), (3, 0, [(16, 24)]), (6, 0, [(16, 24), (24, 28)]), (9, 1, []), (10, 1, []),
    (14, 1, [(32, 36)]),
])  # fmt: skip
def test_a_request_that_is_over_is_saved_to_its_last_whole_block(
    generated: int, digests: int, cuts: list[tuple[int, int]]
) -> None:
    one, request = planner(chunk_tokens=16, tails=True, save_generated=True), FakeRequest("r", list(range(23)))
    table = list(range(20))
    one.begin(request, NOBODY)
    saved = list(one.step([Scheduled("r", table, True, 0, 23)]).saves)
    for position in range(23, 23 + generated):
        request.append(position)
        saved += one.step([Scheduled("r", [], False, position, position + 1)]).saves
    assert sum(len(save.chunks.digests) for save in saved) == 1 + digests
    one.end("r", table)
    ended = one.step([]).ended
    assert [(piece.start, piece.end) for save in ended for piece in save.chunks.pieces] == cuts
    assert [save.blocks for save in ended] == [
        tuple(range(cuts[0][0] // BLOCK, cuts[-1][1] // BLOCK)) for _ in cuts[:1]
    ]


def test_a_step_that_needs_the_blocks_of_a_request_that_is_over_does_not_wait_for_them() -> None:
    one = planner(chunk_tokens=16, save_generated=True, tails=True)
    for name in "abc":
        one.begin(FakeRequest(name, [ord(name)] * 9), NOBODY)
    first = one.step([Scheduled("a", [1, 2, 3], True, 0, 9), Scheduled("b", [4, 5, 6], True, 0, 9)])
    one.done([save.number for save in first.saves])
    for name, blocks in (("a", [1, 2, 3, 7]), ("b", [4, 5, 6])):
        request = one.request(name)
        request.append(*range(4))
        one.step([Scheduled(name, blocks[3:], False, 9, 13)])
    assert one.end("a", [1, 2, 3, 7]) is not None and one.end("b", [4, 5, 6]) is not None
    step = one.step([Scheduled("c", [2, 3, 8], True, 0, 9)])
    assert [save.request for save in step.ended] == ["b"] and step.fence == ()


@pytest.mark.parametrize(
    "why",
    [
        "",
        "preempted",
        "loading",
        "failed",
        "failed after",
        "another's failed",
        "prompts",
        "loads",
        "reset",
        "reset after",
    ],
)
def test_nothing_is_saved_of_a_request_whose_kv_is_not_there(why: str) -> None:
    one = planner(chunk_tokens=16, tails=True, save_generated=why != "prompts", save=why != "loads")
    request = FakeRequest("r", list(range(14)))
    one.begin(request, NOBODY)
    table = [1, 2, 3, 4, 5, 6]
    one.step([Scheduled("r", table, True, 0, 14)])
    request.append(*range(20, 28))
    one.step([Scheduled("r", [], False, 14, 21)])
    reading = len(one.reading)
    if why == "loading":  # it was preempted
        one.loadable("r", 0, Offer(1))
        one.load("r", table, 16)
        one.step([])
        one.loaded("r")
    if why == "failed":
        one.doubt(["r"])
    if why == "reset":
        one.seal()
    one.end("r", () if why == "preempted" else table)
    if why == "failed after":
        one.doubt(["r"])
    if why == "another's failed":
        one.doubt(["s"], everything=True)
    if why == "reset after":
        one.seal()
    assert len(one.step([]).ended) == (why == "")
    assert len(one.reading) - reading == (why == "")


def test_an_engine_that_only_loads_saves_nothing() -> None:
    one = planner(save=False)
    one.begin(FakeRequest("r", list(range(20))), NOBODY)
    assert one.step([Scheduled("r", [1, 2, 3, 4, 5], True, 0, 20)]).saves == ()


def test_blocks_that_are_being_read_are_fenced_until_they_are_not() -> None:
    one = planner()
    for name, blocks in (("a", [1, 2, 3]), ("b", [4, 1, 5])):
        one.begin(FakeRequest(name, [ord(name)] * 10), NOBODY)
        step = one.step([Scheduled(name, blocks, True, 0, 10)])
        assert step.fence == (() if name == "a" else (1,))
        one.end(name)
    one.done([1, 2])
    one.begin(FakeRequest("c", [9] * 10), NOBODY)
    assert one.step([Scheduled("c", [1, 2, 4], True, 0, 10)]).fence == ()


def test_blocks_that_are_shared_and_only_read_are_not_fenced() -> None:
    one = planner()
    for name in "ab":
        one.begin(FakeRequest(name, list(range(10))), NOBODY)
    one.step([Scheduled("a", [1, 2, 3], True, 0, 10)])
    assert one.step([Scheduled("b", [1, 2, 7], True, 8, 10)]).fence == ()


def test_a_load_into_a_block_that_is_being_read_is_fenced() -> None:
    one = planner()
    for name in "ab":
        one.begin(FakeRequest(name, list(range(20))), NOBODY)
    (save,) = one.step([Scheduled("a", [1, 2, 3, 4, 5], True, 0, 9)]).saves
    one.end("a")
    one.loadable("b", 0, Offer(2))
    one.load("b", [2, 1, 7, 8, 9], 16)
    assert one.step([]).fence == (save.number,)


def test_a_load_of_a_request_that_is_over_is_cancelled_once() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(20))), NOBODY)
    loadable(one, 0, [True, True])
    one.load("r", [1, 2, 3, 4, 5], 16)
    one.end("r")
    step = one.step([])
    assert [load.request for load in step.loads] == ["r"] and step.cancelled == ("r",), "the engine waits for its end"
    assert one.step([]) is IDLE


def test_after_a_failed_load_it_computes_and_saves_again() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(20))), NOBODY)
    loadable(one, 0, [True, True])
    one.load("r", [1, 2, 3, 4, 5], 16)
    one.step([])
    one.loaded("r")
    one.doubt(["r"])
    assert loadable(one, 0, [True, True]) == 0
    (save,) = one.step([Scheduled("r", [1, 2, 3, 4, 5], True, 0, 20)]).saves
    assert save.blocks == (1, 2, 3, 4)


@pytest.mark.parametrize(("tokens", "cuts"), [
    (47, [(32, 40), (40, 44)]), (44, [(32, 40), (40, 44)]), (35, []), (36, [(32, 36)]), (48, []), (16, []),
    (15, [(0, 8), (8, 12)]),
])  # fmt: skip
def test_the_tail_of_a_prompt_is_saved_in_pieces(tokens: int, cuts: list[tuple[int, int]]) -> None:
    one, request = planner(chunk_tokens=16, tails=True), FakeRequest("r", list(range(tokens)))
    one.begin(request, NOBODY)
    table = list(range(12))
    step = one.step([Scheduled("r", table, True, 0, tokens)])
    (save,) = step.saves or ()
    assert [(piece.start, piece.end) for piece in save.chunks.pieces] == cuts
    assert len(save.chunks.digests) == tokens // 16 and save.blocks == tuple(table[: tokens // BLOCK])
    assert step.touched == (save.chunks,)
    request.append(7)
    assert not one.step([Scheduled("r", [], False, tokens, tokens + 1)]).saves or (tokens + 1) % 16 == 0, "once"


def test_a_chunk_that_is_whole_is_not_saved_in_pieces() -> None:
    """All of it is computed again in one step, because it could not be loaded."""
    one, request = planner(chunk_tokens=16, tails=True, save_generated=True), FakeRequest("r", list(range(12)))
    one.begin(request, NOBODY)
    request.append(*range(8))
    one.doubt(["r"])
    (save,) = one.step([Scheduled("r", [1, 2, 3, 4, 5], True, 0, 20)]).saves
    assert (len(save.chunks.digests), save.chunks.pieces, save.blocks) == (1, (), (1, 2, 3, 4))


@pytest.mark.parametrize(("local", "pieces"), [(0, 2), (8, 1)])
def test_a_tail_that_was_loaded_is_not_saved_again(local: int, pieces: int) -> None:
    one = planner(chunk_tokens=16, tails=True)
    one.begin(FakeRequest("r", list(range(15))), NOBODY)
    assert one.loadable("r", local, Offer(0, tuple(leading(one.pieces_of("r", 0).pieces, 0)))) == 12 - local
    move = one.load("r", [1, 2, 3, 4], 12 - local)
    assert (len(move.chunks.pieces), move.first_block, move.blocks) == (
        pieces,
        local // BLOCK,
        (1, 2, 3)[local // BLOCK :],
    )
    assert one.step([Scheduled("r", [1, 2, 3, 4], True, 12, 15)]).saves == ()


def test_a_longer_prompt_finds_the_tail_of_a_shorter_one() -> None:
    for tokens in range(1, 33):
        one, short = planner(chunk_tokens=16, tails=True), FakeRequest("short", list(range(tokens)))
        one.begin(short, NOBODY)
        saves = one.step([Scheduled("short", list(range(10)), True, 0, tokens)]).saves
        stored = {digest for save in saves for digest in save.chunks.digests}
        stored |= {piece.digest for save in saves for piece in save.chunks.pieces}
        for longer in range(tokens + 1, 40):
            one.begin(FakeRequest("r", list(range(longer))), NOBODY)
            count = one.held(0, [digest in stored for digest in one.chunks("r").digests])
            there = [piece for piece in one.pieces_of("r", count).pieces if piece.digest in stored]
            assert one.loadable("r", 0, Offer(count, tuple(leading(there, count * 16)))) == tokens // BLOCK * BLOCK
            one.end("r")


def test_pieces_have_names_of_their_own() -> None:
    """Also beside chunks of another size that end at the same block, and begin elsewhere."""
    hashes = FakeRequest("r", list(range(200))).block_hashes
    found: dict[tuple[int, bytes], tuple[int, int]] = {}
    for blocks in range(1, 12):
        pieces = Pieces(chunk_tokens=blocks * BLOCK, block_tokens=BLOCK, hash_tokens=BLOCK)
        for number in range(8):
            named = [(piece.depth, piece.digest, piece.start, piece.end) for piece in pieces.of(hashes, number)]
            whole = number * blocks * BLOCK, (number + 1) * blocks * BLOCK
            if whole[1] <= 200:
                named.append((number, hashes[whole[1] // BLOCK - 1], *whole))
            for depth, digest, start, end in named:
                assert found.setdefault((depth, digest), (start, end)) == (start, end)


def test_the_tail_is_cut_at_what_blocks_and_hashes_have_in_common() -> None:
    request = FakeRequest("r", list(range(96)))
    pieces = Pieces(chunk_tokens=48, block_tokens=6, hash_tokens=4).of(request.block_hashes, 1)
    assert [(piece.start, piece.end) for piece in pieces] == [(48, 60), (48, 72), (72, 84)]


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
