"""The planner: what is loaded, what is saved, and which blocks are waited for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from vllm_fakes import BLOCK, FakeRequest

from kvloom import leading
from kvloom_connector_vllm.scheduling.plan import IDLE, Boundary, Group, Hit, Offer, Owner, Scheduled
from kvloom_connector_vllm.scheduling.planner import Planner
from kvloom_connector_vllm.scheduling.tail import Piece, Pieces

CHUNK = 2 * BLOCK
NOBODY = Owner()


def planner(*, block_tokens: int = BLOCK, chunk_tokens: int = CHUNK, **settings: Any) -> Planner:
    usual = {"hash_tokens": BLOCK, "save_generated": False, "tails": False}
    return Planner([Group(block_tokens, chunk_tokens)], **{**usual, **settings})


def reached(one: Planner, local: int, held: Sequence[bool], pieces: Collection[bytes] = ()) -> Hit:
    """The loadable tokens of request `r`, with these chunks held and pieces of these digests."""

    def there(group: int, number: int) -> list[Piece]:
        found = [piece for piece in one.pieces_of("r", group, number).pieces if piece.digest in pieces]
        return leading(found, number * one.chunk_tokens)

    return one.reach("r", local, [held], there)[0]


def loadable(one: Planner, local: int, held: Sequence[bool]) -> int:
    return one.loadable("r", local, reached(one, local, held))


def test_a_prompt_is_saved_by_whole_chunks_as_it_is_computed() -> None:
    one, request = planner(), FakeRequest("r", list(range(21)))
    one.begin(request, NOBODY)
    first = one.step([Scheduled("r", [[5, 6, 7, 8, 9, 4]], True, 0, 10)])
    (save,) = first.saves
    assert (save.chunks.first, save.first_block, save.blocks) == (0, 0, (5, 6))
    assert save.chunks.digests == (request.block_hashes[1],)
    assert first.touched[0].digests == (request.block_hashes[1], request.block_hashes[3])
    (save,) = one.step([Scheduled("r", (), False, 10, 21)]).saves
    assert (save.chunks.first, save.first_block, save.blocks) == (1, 2, (7, 8))
    assert one.step([Scheduled("r", (), False, 21, 22)]) is IDLE


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
    (move,) = one.load("r", [[1, 2, 3, 4]], 12)
    assert (move.chunks.first, len(move.chunks.digests), move.first_block, move.blocks) == (0, 2, 0, (1, 2, 3, -1))


def test_part_of_a_chunk_is_loaded_behind_what_is_there() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(40))), NOBODY)
    assert loadable(one, 12, [True] * 5) == 24
    (move,) = one.load("r", [list(range(10))], 24)
    assert (move.chunks.first, len(move.chunks.digests), move.first_block) == (1, 4, 2)
    assert move.blocks == (-1, 3, 4, 5, 6, 7, 8, -1)


def test_generated_tokens_are_saved_if_asked_for() -> None:
    for save_generated, expected in ((False, 1), (True, 2)):
        one, request = planner(save_generated=save_generated), FakeRequest("r", list(range(10)))
        one.begin(request, NOBODY)
        saves = list(one.step([Scheduled("r", [[1, 2, 3]], True, 0, 10)]).saves)
        for position in range(10, 17):
            request.append(position)
            blocks = [position // BLOCK + 1] if position % BLOCK == 0 and position >= 12 else []
            saves += one.step([Scheduled("r", [blocks], False, position, position + 1)]).saves
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
    saved = list(one.step([Scheduled("r", [table], True, 0, 23)]).saves)
    for position in range(23, 23 + generated):
        request.append(position)
        saved += one.step([Scheduled("r", (), False, position, position + 1)]).saves
    assert sum(len(save.chunks.digests) for save in saved) == 1 + digests
    one.end("r", [table])
    ended = one.step([]).ended
    assert [(piece.start, piece.end) for save in ended for piece in save.chunks.pieces] == cuts
    assert [save.blocks for save in ended] == [
        tuple(range(cuts[0][0] // BLOCK, cuts[-1][1] // BLOCK)) for _ in cuts[:1]
    ]


def test_a_step_that_needs_the_blocks_of_a_request_that_is_over_does_not_wait_for_them() -> None:
    one = planner(chunk_tokens=16, save_generated=True, tails=True)
    for name in "abc":
        one.begin(FakeRequest(name, [ord(name)] * 9), NOBODY)
    first = one.step([Scheduled("a", [[1, 2, 3]], True, 0, 9), Scheduled("b", [[4, 5, 6]], True, 0, 9)])
    one.done([save.number for save in first.saves])
    for name, blocks in (("a", [1, 2, 3, 7]), ("b", [4, 5, 6])):
        request = one.request(name)
        request.append(*range(4))
        one.step([Scheduled(name, [blocks[3:]], False, 9, 13)])
    assert one.end("a", [[1, 2, 3, 7]]) and one.end("b", [[4, 5, 6]])
    step = one.step([Scheduled("c", [[2, 3, 8]], True, 0, 9)])
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
    one.step([Scheduled("r", [table], True, 0, 14)])
    request.append(*range(20, 28))
    one.step([Scheduled("r", (), False, 14, 21)])
    reading = len(one.reading)
    if why == "loading":  # it was preempted
        loadable(one, 0, [True])
        one.load("r", [table], 16)
        one.step([])
        one.loaded("r")
    if why == "failed":
        one.doubt(["r"])
    if why == "reset":
        one.seal()
    one.end("r", () if why == "preempted" else [table])
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
    assert one.step([Scheduled("r", [[1, 2, 3, 4, 5]], True, 0, 20)]).saves == ()


def test_blocks_that_are_being_read_are_fenced_until_they_are_not() -> None:
    one = planner()
    for name, blocks in (("a", [1, 2, 3]), ("b", [4, 1, 5])):
        one.begin(FakeRequest(name, [ord(name)] * 10), NOBODY)
        step = one.step([Scheduled(name, [blocks], True, 0, 10)])
        assert step.fence == (() if name == "a" else (1,))
        one.end(name)
    one.done([1, 2])
    one.begin(FakeRequest("c", [9] * 10), NOBODY)
    assert one.step([Scheduled("c", [[1, 2, 4]], True, 0, 10)]).fence == ()


def test_blocks_that_are_shared_and_only_read_are_not_fenced() -> None:
    one = planner()
    for name in "ab":
        one.begin(FakeRequest(name, list(range(10))), NOBODY)
    one.step([Scheduled("a", [[1, 2, 3]], True, 0, 10)])
    assert one.step([Scheduled("b", [[1, 2, 7]], True, 8, 10)]).fence == ()


def test_a_load_into_a_block_that_is_being_read_is_fenced() -> None:
    one = planner()
    for name in "ab":
        one.begin(FakeRequest(name, list(range(20))), NOBODY)
    (save,) = one.step([Scheduled("a", [[1, 2, 3, 4, 5]], True, 0, 9)]).saves
    one.end("a")
    one.loadable("b", 0, Hit(16, (Offer(2),)))
    one.load("b", [[2, 1, 7, 8, 9]], 16)
    assert one.step([]).fence == (save.number,)


def test_a_load_of_a_request_that_is_over_is_cancelled_once() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(20))), NOBODY)
    loadable(one, 0, [True, True])
    one.load("r", [[1, 2, 3, 4, 5]], 16)
    one.end("r")
    step = one.step([])
    assert [load.request for load in step.loads] == ["r"] and step.cancelled == ("r",), "the engine waits for its end"
    assert one.step([]) is IDLE


def test_after_a_failed_load_it_computes_and_saves_again() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(20))), NOBODY)
    loadable(one, 0, [True, True])
    one.load("r", [[1, 2, 3, 4, 5]], 16)
    one.step([])
    one.loaded("r")
    one.doubt(["r"])
    assert loadable(one, 0, [True, True]) == 0
    (save,) = one.step([Scheduled("r", [[1, 2, 3, 4, 5]], True, 0, 20)]).saves
    assert save.blocks == (1, 2, 3, 4)


@pytest.mark.parametrize(("tokens", "cuts"), [
    (47, [(32, 40), (40, 44)]), (44, [(32, 40), (40, 44)]), (35, []), (36, [(32, 36)]), (48, []), (16, []),
    (15, [(0, 8), (8, 12)]),
])  # fmt: skip
def test_the_tail_of_a_prompt_is_saved_in_pieces(tokens: int, cuts: list[tuple[int, int]]) -> None:
    one, request = planner(chunk_tokens=16, tails=True), FakeRequest("r", list(range(tokens)))
    one.begin(request, NOBODY)
    table = list(range(12))
    step = one.step([Scheduled("r", [table], True, 0, tokens)])
    (save,) = step.saves or ()
    assert [(piece.start, piece.end) for piece in save.chunks.pieces] == cuts
    assert len(save.chunks.digests) == tokens // 16 and save.blocks == tuple(table[: tokens // BLOCK])
    assert step.touched == (save.chunks,)
    request.append(7)
    assert not one.step([Scheduled("r", (), False, tokens, tokens + 1)]).saves or (tokens + 1) % 16 == 0, "once"


@pytest.mark.parametrize("tails", [True, False])
def test_each_input_of_a_session_is_saved(tails: bool) -> None:
    """vLLM makes the prompt of its request longer, which it schedules as if it were new."""
    one, request = planner(chunk_tokens=16, tails=tails), FakeRequest("r", list(range(22)))
    one.begin(request, NOBODY)
    one.step([Scheduled("r", [list(range(6))], True, 0, 22)])
    request.append(22, 23)
    assert one.step([Scheduled("r", (), False, 22, 23)]) is IDLE
    request.continued(23, *range(100, 134))
    (save,) = one.step([Scheduled("r", [list(range(15))], True, 23, 57)]).saves
    assert save.chunks.digests == (request.block_hashes[7], request.block_hashes[11])
    assert [(piece.start, piece.end) for piece in save.chunks.pieces] == ([(48, 56)] if tails else [])
    assert save.blocks == tuple(range(4, 14 if tails else 12))
    request.append(134)
    assert one.step([Scheduled("r", (), False, 57, 58)]) is IDLE


def test_a_chunk_that_is_whole_is_not_saved_in_pieces() -> None:
    """All of it is computed again in one step, because it could not be loaded."""
    one, request = planner(chunk_tokens=16, tails=True, save_generated=True), FakeRequest("r", list(range(12)))
    one.begin(request, NOBODY)
    request.append(*range(8))
    one.doubt(["r"])
    (save,) = one.step([Scheduled("r", [[1, 2, 3, 4, 5]], True, 0, 20)]).saves
    assert (len(save.chunks.digests), save.chunks.pieces, save.blocks) == (1, (), (1, 2, 3, 4))


@pytest.mark.parametrize(("local", "pieces"), [(0, 2), (8, 1)])
def test_a_tail_that_was_loaded_is_not_saved_again(local: int, pieces: int) -> None:
    one = planner(chunk_tokens=16, tails=True)
    one.begin(FakeRequest("r", list(range(15))), NOBODY)
    every = {piece.digest for piece in one.pieces_of("r", 0, 0).pieces}
    assert one.loadable("r", local, reached(one, local, [], every)) == 12 - local
    (move,) = one.load("r", [[1, 2, 3, 4]], 12 - local)
    assert (len(move.chunks.pieces), move.first_block, move.blocks) == (
        pieces,
        local // BLOCK,
        (1, 2, 3)[local // BLOCK :],
    )
    assert one.step([Scheduled("r", [[1, 2, 3, 4]], True, 12, 15)]).saves == ()


def test_a_longer_prompt_finds_the_tail_of_a_shorter_one() -> None:
    for tokens in range(1, 33):
        one, short = planner(chunk_tokens=16, tails=True), FakeRequest("short", list(range(tokens)))
        one.begin(short, NOBODY)
        saves = one.step([Scheduled("short", [list(range(10))], True, 0, tokens)]).saves
        stored = {digest for save in saves for digest in save.chunks.digests}
        stored |= {piece.digest for save in saves for piece in save.chunks.pieces}
        for longer in range(tokens + 1, 40):
            one.begin(FakeRequest("r", list(range(longer))), NOBODY)
            held = [digest in stored for digest in one.chunks("r")[0].digests]
            assert one.loadable("r", 0, reached(one, 0, held, stored)) == tokens // BLOCK * BLOCK
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


def test_blocks_that_go_to_a_request_that_is_not_kept_are_fenced() -> None:
    """An adapter's that cannot be identified, for example: the engine computes it, and it is not known here."""
    one = planner()
    one.begin(FakeRequest("r", list(range(20))), NOBODY)
    (save,) = one.step([Scheduled("r", [[1, 2, 3, 4, 5]], True, 0, 20)]).saves
    one.end("r")
    assert one.step([Scheduled("stranger", [[9, 8, 1]], True, 8, 10)]).fence == (save.number,)
    assert one.step([Scheduled("stranger", [[2]], False, 10, 14)]).fence == (save.number,)
    assert one.step([Scheduled("stranger", (), False, 14, 15)]) is IDLE


@pytest.mark.parametrize(("late", "saved"), [(1, True), (2, True), (3, False)])
def test_a_chunk_that_gets_its_name_after_blocks_were_given_up_is_not_saved(late: int, saved: bool) -> None:
    """The engine frees a block as soon as the first token of a step does not attend to it."""
    one = Planner([Group(BLOCK, 16, window=16)], hash_tokens=BLOCK, save_generated=True)
    request = FakeRequest("r", list(range(13)))
    one.begin(request, NOBODY)
    saves = list(one.step([Scheduled("r", [[1, 2, 3, 4]], True, 0, 13)]).saves)
    for position in range(13, 17 + late):
        request.tokens.append(position)
        if position == 16 + late:
            request.rehash()
        saves += one.step([Scheduled("r", [[5] if position == 16 else []], False, position, position + 1)]).saves
    assert [save.blocks for save in saves if save.chunks.digests] == ([(1, 2, 3, 4)] if saved else [])


def with_states(*, prompt: int = 22, **settings: Any) -> tuple[Planner, FakeRequest]:
    """Full attention and states; a request with blocks 1 to 6 for the first."""
    usual: dict[str, Any] = {"hash_tokens": BLOCK, "save_generated": False}
    one = Planner([Group(BLOCK, CHUNK), Group(BLOCK, BLOCK, state=True)], **{**usual, **settings})
    request = FakeRequest("r", list(range(prompt)))
    one.begin(request, NOBODY)
    return one, request


def test_a_state_is_saved_from_the_block_that_the_engine_names() -> None:
    one, request = with_states()
    step = one.step([Scheduled("r", [[1, 2, 3, 4], [0, 0, 0, 9]], True, 0, 16)], [Boundary("r", 1, 9, 16)])
    (state,) = [save for save in step.saves if save.chunks.group == 1]
    assert (state.chunks.first, state.chunks.digests) == (3, (request.block_hashes[3],))
    assert (state.first_block, state.blocks) == (3, (9,))
    fence = one.step([Scheduled("stranger", [[7], [9]], True, 0, 2)]).fence
    assert fence == (state.number,), "it is held until it is saved"
    one.done([state.number])
    assert not one.step([], [Boundary("r", 1, 9, 16)]).saves, "once"
    (last,) = one.step([Scheduled("r", [[5, 6], [8, 10]], False, 16, 22)], [Boundary("r", 1, 8, 20)]).saves[-1:]
    assert (last.chunks.first, last.blocks) == (4, (8,))


@pytest.mark.parametrize("why", ["no boundary", "null", "unknown", "generated", "no name", "sealed", "loads", "loaded"])
def test_a_state_that_is_of_no_use_is_not_saved(why: str) -> None:
    one, request = with_states(save=why != "loads", save_generated=why == "no name")
    boundary = Boundary("r", 1, 9, 16)
    if why == "no boundary":
        boundary = boundary._replace(tokens=18)
    if why == "null":
        boundary = boundary._replace(block=0)
    if why == "unknown":
        boundary = boundary._replace(request="s")
    if why in ("generated", "no name"):
        request.tokens.extend(range(4))
        boundary = boundary._replace(tokens=24)
    if why == "generated":
        request.rehash()
    if why == "sealed":
        one.seal()
    if why == "loaded":
        one.loadable("r", 0, Hit(16, (Offer(2), Offer(4))))
        loads = one.load("r", [[1, 2, 3, 4], [0, 0, 0, 9]], 16)
        assert [(load.first_block, load.blocks) for load in loads] == [(0, (1, 2, 3, 4)), (3, (9,))]
    step = one.step([], [boundary])
    assert not step.saves and not one.reading


def test_a_state_is_touched_where_a_hit_of_the_prompt_would_need_it() -> None:
    for prompt, first in ((22, 4), (20, 4), (3, 0)):
        one, request = with_states(prompt=prompt)
        step = one.step([Scheduled("r", [[1] * 6, [0] * 5 + [9]], True, 0, prompt)])
        touched = [chunks for chunks in step.touched if chunks.group == 1]
        expected = [(first, (request.block_hashes[first],))] if prompt >= BLOCK else []
        assert [(chunks.first, chunks.digests) for chunks in touched] == expected


def test_a_hit_ends_at_a_state_that_every_group_reaches() -> None:
    one, _ = with_states(prompt=40, tails=False)
    states = [number in (1, 3, 6) for number in range(10)]
    for whole, tokens in ((5, 28), (3, 16), (1, 8), (0, 0)):
        hit, _ = one.reach("r", 0, [[True] * whole + [False] * (5 - whole), states], lambda group, number: ())
        assert (hit.tokens, hit.offers[1].chunks) == (tokens, tokens // BLOCK)
    assert one.reach("r", 16, [[True] * 3, [False] * 10], lambda group, number: ())[0].tokens == 16


def test_a_hit_ends_where_a_block_of_every_group_does() -> None:
    """Full attention ends in the middle of a block of the windows, which have all of it: from a longer prompt."""
    groups = [Group(BLOCK, 4 * BLOCK), Group(2 * BLOCK, 2 * BLOCK, window=7)]
    one = Planner(groups, hash_tokens=BLOCK, save_generated=False)
    one.begin(FakeRequest("r", list(range(40))), NOBODY)
    pieces = one.pieces_of("r", 0, 0).pieces[1:3]
    hit, _ = one.reach("r", 0, [[False] * 2, [True] * 5], lambda group, chunk: () if group or chunk else pieces)
    assert hit.tokens == 2 * BLOCK
