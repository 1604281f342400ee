"""The engine's verbs: what was stored comes back, exactly, only to whom it belongs, and masks say so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_support import CHUNK, CHUNK_BYTES, SPEC, Gate, Shelf, eventually, kv_of, matches, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import DeadlineExceeded, Engine, interrupts
from kvloom.builtin.plain import PlainConnector
from kvloom.device import CurrentStreams
from kvloom.pipeline import transfer

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
Open = Callable[..., Engine]

LAYOUTS = {
    "memory": (MEMORY,),
    "stored only": (SHELF,),
    "memory and stored": (MEMORY, SHELF),
    "memory of two chunks and stored": ({"type": "memory", "capacity": "12KiB"}, SHELF),
    "two stored": (SHELF | {"name": "near", "shelf": "near"}, SHELF | {"name": "far", "shelf": "far"}),
}


@pytest.mark.parametrize("tiers", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_was_stored_comes_back(open_engine: Open, tiers: tuple[dict[str, object], ...]) -> None:
    engine = open_engine(*tiers)
    tokens, kv = tokens_of(22), kv_of(22)
    assert engine.store(tokens, kv=kv) == 20
    assert engine.flush(20)
    got = torch.zeros_like(kv)
    mask = engine.retrieve(tokens, kv=got)
    assert mask.tolist() == [True] * 20 + [False] * 2
    assert matches(got, kv, mask)
    assert engine.lookup(tokens).tokens == 20


def test_a_store_says_how_many_tokens_were_copied(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "12KiB"})  # three chunks
    tokens, kv = tokens_of(16), kv_of(16)
    engine.save(engine.segments(tokens)[:1], kv=kv).result(20)
    assert engine.store(tokens[: 2 * CHUNK], kv=kv) == CHUNK
    assert engine.store(tokens[: 2 * CHUNK], kv=kv) == 0
    assert engine.store(tokens[: 3 * CHUNK], kv=kv) == CHUNK == engine.pin(tokens[: 3 * CHUNK]) - 2 * CHUNK
    assert engine.store(tokens, kv=kv) == 0, "there is no room"


def test_an_engine_shows_its_model_and_what_its_tiers_hold(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    engine.store(tokens_of(8), kv=kv_of(8))
    assert engine.flush(20)
    assert repr(engine) == (
        f"<Engine {SPEC.model!r}, {CHUNK} tokens a chunk; "
        + "; ".join(f"{tier.name} 2 chunks {tier.bytes:,} bytes ok" for tier in engine.health().tiers)
        + ">"
    )
    engine.close()
    assert repr(engine) == f"<Engine {SPEC.model!r}, {CHUNK} tokens a chunk, closed>"


@pytest.mark.parametrize("tiers", [LAYOUTS["memory"], LAYOUTS["memory and stored"]], ids=["memory", "both"])
@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_masks_prefixes_and_partial_stores(open_engine: Open, tiers: tuple[dict[str, object], ...], data) -> None:  # type: ignore[no-untyped-def]
    engine = open_engine(*tiers)
    engine.clear()
    total = data.draw(st.integers(0, 30), label="tokens")
    stored = data.draw(st.integers(0, total), label="stored")
    skip_store = data.draw(st.integers(0, stored // CHUNK), label="chunks masked out of the store") * CHUNK
    skip = data.draw(st.integers(0, total // CHUNK), label="chunks masked out of the retrieve") * CHUNK
    tokens, kv = tokens_of(total), kv_of(total)
    engine.store(tokens[:stored], torch.arange(stored) >= skip_store, kv=kv)
    got = torch.zeros_like(kv)
    mask = engine.retrieve(tokens, torch.arange(total) >= skip, kv=got)
    there = [skip_store <= at < stored // CHUNK * CHUNK for at in range(total)]
    want = [skip <= at and all(there[skip : at // CHUNK * CHUNK + 1]) for at in range(total)]
    assert mask.tolist() == want
    assert mask.dtype == torch.bool and mask.device.type == "cpu"
    assert matches(got, kv, mask)


def test_a_longer_prompt_hits_the_shared_prefix_and_another_does_not(open_engine: Open) -> None:
    engine = open_engine()
    tokens, kv = tokens_of(16), kv_of(16)
    engine.store(tokens, kv=kv)
    assert engine.lookup(torch.cat([tokens, tokens_of(9, seed=1)])).tokens == 16
    changed = tokens.clone()
    changed[5] += 1
    assert engine.lookup(changed).tokens == CHUNK, "a chunk's key covers every token before it"


def test_salts_share_nothing_and_clear_purges_one(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    tokens, kv = tokens_of(8), kv_of(8)
    engine.store(tokens, salt="a", kv=kv)
    engine.store(tokens, salt="b", kv=kv)
    assert engine.flush(20)
    assert engine.lookup(tokens).tokens == 0 == engine.lookup(tokens, salt="c").tokens
    engine.clear(salt="a")
    assert engine.lookup(tokens, salt="a").tokens == 0
    assert engine.lookup(tokens, ["shelf"], salt="b").tokens == 8
    engine.clear()
    assert engine.lookup(tokens, salt="b").tokens == 0 and not Shelf.shelves["default"].blobs


def test_remove_deletes_from_every_tier(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    tokens, kv = tokens_of(8), kv_of(8)
    engine.store(tokens, kv=kv)
    engine.remove(tokens)
    assert engine.lookup(tokens).tokens == 0 and not Shelf.shelves["default"].blobs
    engine.store(tokens, kv=kv)
    assert engine.lookup(tokens).tokens == 8, "and it can be stored again"


def test_storing_again_copies_nothing(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    tokens, kv = tokens_of(16), kv_of(16)
    engine.store(tokens, kv=kv)
    assert engine.flush(20)
    shelf = Shelf.shelves["default"]
    touched = []
    shelf.before = lambda verb, key: None if key.startswith("spec/") else touched.append(verb)
    reads = []
    engine.connector.read = lambda *a, **k: reads.append(a)  # type: ignore[method-assign]
    engine.store(tokens, kv=kv)
    assert engine.flush(20)
    assert not reads and "put" not in touched and "get" not in touched


def test_hits_survive_the_process_and_memory_fills_from_below(open_engine: Open) -> None:
    tokens, kv = tokens_of(16), kv_of(16)
    with open_engine(MEMORY, SHELF) as first:
        first.store(tokens, kv=kv)
    second = open_engine(MEMORY, SHELF)
    assert second.lookup(tokens).by_tier == {"shelf": 16}
    got = torch.zeros_like(kv)
    assert second.retrieve(tokens, kv=got).all() and torch.equal(got, kv)
    assert second.lookup(tokens).by_tier == {"memory": 16}, "promoted"


def test_prefetch_fills_memory(open_engine: Open) -> None:
    tokens, kv = tokens_of(16), kv_of(16)
    with open_engine(MEMORY, SHELF) as first:
        first.store(tokens, kv=kv)
    second = open_engine(MEMORY, SHELF)
    second.prefetch(tokens).result(20)
    assert second.lookup(tokens, ["memory"]).tokens == 16


def test_a_hit_in_a_far_tier_is_written_to_the_near_one(open_engine: Open) -> None:
    near, far = SHELF | {"name": "near", "shelf": "near"}, SHELF | {"name": "far", "shelf": "far"}
    tokens, kv = tokens_of(8), kv_of(8)
    with open_engine(far) as only_far:
        only_far.store(tokens, kv=kv)
    both = open_engine(MEMORY, near, far)
    assert both.retrieve(tokens, kv=torch.zeros_like(kv)).all() and both.flush(20)
    assert set(Shelf.shelves["near"].blobs) == set(Shelf.shelves["far"].blobs)


def test_search_range_asks_only_the_tiers_named(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    tokens = tokens_of(8)
    engine.store(tokens, kv=kv_of(8))
    assert engine.flush(20)
    assert engine.lookup(tokens, ["memory"]).by_tier == {"memory": 8}
    assert engine.lookup(tokens, ["shelf"]).by_tier == {"shelf": 8}
    assert engine.lookup(tokens, []).tokens == 0
    with pytest.raises(ValueError, match="search_range: no tier 'Hot'; this engine has memory, shelf"):
        engine.lookup(tokens, ["Hot"])


def test_pinned_chunks_stay_and_others_go_tail_first(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": f"{4 * 4}KiB"})
    first, second = tokens_of(8, 1), tokens_of(8, 2)
    engine.store(first, kv=kv_of(8, 1))
    assert engine.pin(first) == 8
    engine.store(second, kv=kv_of(8, 2))
    engine.store(tokens_of(4, 3), kv=kv_of(4, 3))
    assert engine.lookup(first).tokens == 8
    assert engine.lookup(second).tokens == 4, "the tail went, the head stayed"
    engine.unpin(first)
    engine.store(tokens_of(16, 4), kv=kv_of(16, 4))
    assert engine.lookup(first).tokens == 0


def test_a_prompt_longer_than_memory_keeps_its_head_there_and_all_of_it_below(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF)
    tokens, kv = tokens_of(80), kv_of(80)
    engine.store(tokens, kv=kv)
    assert engine.flush(20)
    assert engine.lookup(tokens, ["shelf"]).tokens == 80
    got = torch.zeros_like(kv)
    assert engine.retrieve(tokens, kv=got).all() and torch.equal(got, kv)
    alone = open_engine({"type": "memory", "capacity": "16KiB"})
    alone.store(tokens, kv=kv)
    assert alone.lookup(tokens).tokens == 16


def test_find_load_and_save_work_across_gaps(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    tokens, kv = tokens_of(20), kv_of(20)
    segments = engine.segments(tokens)
    assert engine.save([segments[0], segments[2], segments[4]], kv=kv).result(20).all()
    assert engine.find(segments).tolist() == [True, False, True, False, True]
    got = torch.zeros_like(kv)
    assert engine.load(segments, kv=got).result(20).tolist() == [True, False, True, False, True]
    mask = torch.tensor([at // CHUNK % 2 == 0 for at in range(20)])
    assert matches(got, kv, mask)
    assert engine.lookup(tokens).tokens == CHUNK


def test_a_connector_marks_on_the_callers_thread_what_a_move_comes_after(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's current stream is a thread's own: on another one it is not the stream on which the engine computes."""
    engine, seen = open_engine(MEMORY), []

    def ordered(self: PlainConnector, where: dict[str, Any]) -> dict[str, Any]:
        return {**where, "kv": (threading.get_ident(), where["kv"])}

    def unmarked(move: Any) -> Any:
        def run(self: PlainConnector, *given: Any, kv: Any) -> Any:
            marked = isinstance(kv, tuple)
            seen.append(kv[0] if marked else None)
            return move(self, *given, kv=kv[1] if marked else kv)

        return run

    check = PlainConnector.check
    monkeypatch.setattr(PlainConnector, "ordered", ordered)
    monkeypatch.setattr(PlainConnector, "check", lambda self, where, n: check(self, unmark(where), n))
    for verb in ("read", "write", "read_layer", "write_layer"):
        monkeypatch.setattr(PlainConnector, verb, unmarked(getattr(PlainConnector, verb)))
    tokens, kv = tokens_of(8), kv_of(8)
    segments = engine.segments(tokens)
    servers = engine._runtime.uninterrupted(threading.get_ident)
    assert engine.save(segments, kv=kv).result(20).all()
    assert engine.load(segments, kv=kv.clone()).result(20).all()
    assert engine.load_layers(segments, kv=kv.clone()).result().all()
    assert set(seen) == {servers} and len(seen) >= 2 + SPEC.num_layers


def test_a_load_is_checked_once(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(MEMORY)
    tokens, kv = tokens_of(8), kv_of(8)
    engine.store(tokens, kv=kv)
    checked = []
    monkeypatch.setattr(engine.connector, "check", lambda where, num_tokens: checked.append(num_tokens))
    assert engine.load(engine.segments(tokens), kv=kv).result(20).all() and checked == [8]


def test_a_device_that_refuses_its_streams_is_an_error_of_the_task(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a task that never ends."""
    engine = open_engine(MEMORY)
    tokens, kv = tokens_of(8), kv_of(8)
    segments = engine.segments(tokens)
    assert engine.save(segments, kv=kv).result(20).all()

    def refuse(self: CurrentStreams) -> Any:
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patch:
        patch.setattr(CurrentStreams, "current", refuse)
        patch.setattr(interrupts, "CurrentStreams", tuple)  # of the verbs themselves
        for task in (engine.save(segments, kv=kv), engine.load(segments, kv=kv)):
            with pytest.raises(RuntimeError, match="CUDA error"):
                task.result(20)
        with pytest.raises(RuntimeError, match="CUDA error"):
            engine.load_layers(segments, kv=kv).result()
    assert not engine._background._tasks
    assert engine.load(segments, kv=kv).result(20).all()


def unmark(where: dict[str, Any]) -> dict[str, Any]:
    return {**where, "kv": where["kv"][1]} if isinstance(where["kv"], tuple) else where


@pytest.mark.parametrize(
    ("verb", "more", "moved"), [("load", {}, 2), ("save", {}, 2), ("load", {"at_once": True}, 8)], ids=str
)
def test_who_cancels_waits_for_a_piece_and_not_for_all(
    open_engine: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch, verb: str, more: dict[str, bool], moved: int
) -> None:
    """But for what has to be moved at once."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 2 * CHUNK_BYTES)
    tokens, kv, engine, pieces = tokens_of(8 * CHUNK), kv_of(8 * CHUNK), open_engine(MEMORY), []
    if verb == "load":
        engine.store(tokens, kv=kv)
    method = {"load": "write", "save": "read"}[verb]
    real = getattr(PlainConnector, method)

    def slow(self: PlainConnector, segments: Any, chunks: Any, **where: Any) -> Any:
        gate("copy", "")
        pieces.append(len(segments))
        return real(self, segments, chunks, **where)

    monkeypatch.setattr(PlainConnector, method, slow)
    task = getattr(engine, verb)(engine.segments(tokens), kv=kv, **more)
    gate.reached()
    canceller = threading.Thread(target=task.cancel)
    canceller.start()
    assert eventually(lambda: task.cancelled)
    gate.open()
    canceller.join(20)
    assert eventually(lambda: task.done) and pieces == [moved]
    assert task.result().tolist() == [verb == "load"] * moved + [False] * (8 - moved)


def test_a_cancelled_or_late_load_never_writes_afterwards(open_engine: Open, gate: Gate) -> None:
    tokens, kv = tokens_of(16), kv_of(16)
    with open_engine(SHELF) as first:
        first.store(tokens, kv=kv)
    engine = open_engine(MEMORY, SHELF)
    segments = engine.segments(tokens)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    got = torch.zeros_like(kv)
    cancelled, late = engine.load(segments, kv=got), engine.load(segments, kv=got)
    cancelled.cancel()
    assert not late.wait(0.01) and not late.cancelled, "waiting cancels nothing"
    with pytest.raises(DeadlineExceeded):
        late.result(0.05)
    gate.open()
    for task in (cancelled, late):
        assert eventually(lambda task=task: task.done)
    assert not got.any()


def test_who_asked_is_told_once_that_a_task_is_over(open_engine: Open, gate: Gate) -> None:
    tokens, kv = tokens_of(16), kv_of(16)
    with open_engine(SHELF) as first:
        first.store(tokens, kv=kv)
    engine = open_engine(SHELF)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    said: list[str] = []
    task = engine.load(engine.segments(tokens), kv=torch.zeros_like(kv))
    task.when_done(lambda: said.append("then"))
    assert not said
    gate.open()
    assert task.result(20).all() and eventually(lambda: said == ["then"])
    task.when_done(lambda: said.append("at once"))
    assert said == ["then", "at once"]
