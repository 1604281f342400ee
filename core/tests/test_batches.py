"""Chunks that are read many at once: each has the outcome that it would have had alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clock_support import Hang
from core_support import CHUNK, Crate, Gate, Shelf, eventually, kv_of, tokens_of
from faults_support import DAMAGE, MEMORY, TOKENS, Open, chunk_names, count, misses, retrieve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import StorageBackend

CRATE = {"type": "crate", "deadline": "20s"}


def filled(open_engine: Open, count: int = 16) -> None:
    with open_engine(CRATE) as engine:
        engine.store(tokens_of(count), kv=kv_of(count))


def crate() -> Crate:
    found = Shelf.shelves["default"]
    assert isinstance(found, Crate)
    return found


def failing(key: str, verb: str = "get") -> Callable[[str, str], None]:
    def before(at: str, name: str) -> None:
        if (at, name) == (verb, key):
            raise OSError(5, "input/output error")

    return before


def test_the_chunks_of_a_request_are_read_by_as_few_calls_as_keep_all_threads_busy(open_engine: Open) -> None:
    filled(open_engine)
    engine = open_engine(CRATE)
    assert retrieve(engine) == [True] * 4
    assert crate().batches == [chunk_names(engine)], "they are small: one call has too little to do already"
    assert count(engine, "retrieved") == 4 + 1, "each chunk is counted, and the request"


def test_small_chunks_that_are_loaded_layer_by_layer_come_by_the_same_calls(open_engine: Open) -> None:
    filled(open_engine)
    engine, got = open_engine(CRATE), torch.zeros_like(kv_of(16))
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        assert loading.result().all()
    assert torch.equal(got, kv_of(16)) and crate().batches == [chunk_names(engine)]


def test_no_batch_is_longer_than_it_may_be(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tiers.stored.load._LEAST_BATCH_BYTES", 1)
    monkeypatch.setattr("kvloom.tiers.stored.load._MOST_BATCH_BYTES", 3 * 2 * 2 * CHUNK * 8 * 2)
    filled(open_engine, 80)
    with open_engine(CRATE) as engine:
        got = torch.zeros_like(kv_of(80))
        assert engine.retrieve(tokens_of(80), kv=got).all()
    assert sorted(map(len, crate().batches)) == [2, 3, 3, 3, 3, 3, 3]


def test_a_store_without_batches_is_read_by_all_of_its_threads(open_engine: Open) -> None:
    """The default of `get_many_into` would read one blob after the other on one thread."""
    shelf = {"type": "shelf", "deadline": "20s"}
    with open_engine(shelf) as engine:
        engine.store(TOKENS, kv=kv_of(16))
    gate = Gate()
    engine = open_engine(shelf)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    task = engine.prefetch(TOKENS)
    gate.reached(4)
    gate.open()
    task.result(20)


@given(
    damage=st.lists(st.sampled_from([None, "gone", "fails", *DAMAGE]), min_size=4, max_size=4),
    memory=st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_chunk_of_a_batch_is_given_or_missed_alone(
    open_engine: Open, damage: list[str | None], memory: bool
) -> None:
    Shelf.shelves.clear()
    filled(open_engine)
    with open_engine(*[MEMORY][: int(memory)], CRATE) as engine:
        names = chunk_names(engine)
        good = [kind is None for kind in damage]
        crate().before = failing(names[damage.index("fails")]) if "fails" in damage else crate().before
        damage = [None if kind == "fails" and at != damage.index("fails") else kind for at, kind in enumerate(damage)]
        good = [kind is None for kind in damage]
        for name, kind in zip(names, damage, strict=True):
            if kind == "gone":
                del crate()._blobs[name]
            elif kind not in (None, "fails"):
                crate()._blobs[name] = DAMAGE[kind](crate()._blobs[name], b"x" * 5000)
        given = engine.load(engine.segments(TOKENS), kv=torch.zeros_like(kv_of(16))).result(20).tolist()
        assert given == good
        assert sum(misses(engine).values()) == 4 - sum(good)
        assert count(engine, "tier_error") == damage.count("fails")


def test_a_batch_that_breaks_off_loses_what_has_not_come(open_engine: Open) -> None:
    filled(open_engine)
    engine = open_engine(CRATE)
    names = chunk_names(engine)
    crate().before = failing(names[1], "batch")  # it comes from the last to the first
    assert engine.load(engine.segments(TOKENS), kv=torch.zeros_like(kv_of(16))).result(20).tolist() == [
        False, False, True, True,
    ]  # fmt: skip
    assert count(engine, "tier_error") == 1, "one call failed, whatever it was to bring"


def test_what_came_before_a_batch_began_to_hang_is_given_within_the_deadline(open_engine: Open, hang: Hang) -> None:
    filled(open_engine)
    engine = open_engine(CRATE)
    names = chunk_names(engine)
    crate().before = lambda verb, key: hang(verb, key) if (verb, key) == ("batch", names[1]) else None
    got = torch.zeros_like(kv_of(16))
    mask = engine.load(engine.segments(TOKENS), kv=got).result(60)
    assert mask.tolist() == [False, False, True, True]
    assert eventually(lambda: engine.health().tiers[-1].abandoned_calls == 1), "one thread hangs, not one a chunk"


def test_a_corrupt_blob_of_a_batch_is_read_once_more(open_engine: Open) -> None:
    filled(open_engine)
    engine = open_engine(CRATE)
    name, shelf = chunk_names(engine)[2], crate()
    right = shelf._blobs[name]
    shelf._blobs[name] = right[:-1] + bytes([right[-1] ^ 1])

    def mend(verb: str, key: str) -> None:
        if len(shelf.batches) == 2:
            shelf._blobs[name] = right

    shelf.before = mend
    assert retrieve(engine) == [True] * 4
    assert [len(batch) for batch in shelf.batches] == [4, 1]


def test_what_has_no_room_beside_the_rest_of_its_batch_is_read_after_it(open_engine: Open) -> None:
    """To wait for room while it holds some could last for ever."""
    filled(open_engine)
    engine = open_engine(MEMORY, CRATE)
    crate().all_at_once = True
    pool, names = engine._stack.memory.pool, chunk_names(engine)
    others = [pool.reserve(pool.capacity - 12 * 4096), pool.reserve(9 * 4096)]
    assert None not in others
    # There is room again when the third is asked for, but the second was before it.
    crate().before = lambda verb, key: (
        others.pop().abandon() if (verb, key) == ("batch", names[2]) and others[1:] else None
    )
    assert retrieve(engine) == [True] * 4
    assert [batch[0] for batch in crate().batches] == [names[0], *names[1:]]
    others.pop().abandon()


def test_who_gives_a_batch_up_leaves_it_to_those_who_share_it(open_engine: Open) -> None:
    filled(open_engine)
    gate = Gate()
    engine = open_engine(MEMORY, CRATE)
    crate().before = lambda verb, key: gate(verb, key) if verb == "batch" else None
    one, other = (engine.load(engine.segments(TOKENS), kv=torch.zeros_like(kv_of(16))) for _ in range(2))
    gate.reached()
    under_way = engine._stack.stored[0].loads.inflight._open
    assert eventually(lambda: [read.shares for read in tuple(under_way.values())] == [2] * 4)
    one.cancel()
    gate.open()
    assert other.result(20).all()
    assert len(crate().batches) == 1
    assert count(engine, "corrupt") == 0


def test_the_default_tells_of_each_request(open_engine: Open) -> None:
    class Bin:
        view = memoryview(b"")

        def reserve(self, num_bytes: int) -> memoryview:
            if num_bytes > 2:
                raise ValueError("too long")
            self.view = memoryview(bytearray(num_bytes))
            return self.view

        def filled(self, num_bytes: int) -> None:
            pass

    shelf = Shelf(Shelf.Config())
    for key, blob in {"a": b"1", "b": b"123", "d": b"12"}.items():
        shelf.put(key, [blob])
    bins = [Bin() for _ in range(4)]
    told: list[tuple[int, object]] = []
    StorageBackend.get_many_into(
        shelf, list(zip("abcd", bins, strict=True)), lambda number, outcome: told.append((number, type(outcome)))
    )
    assert told == [(0, bool), (1, ValueError), (2, bool), (3, bool)]
    assert [bytes(one.view) for one in bins] == [b"1", b"", b"", b"12"]
