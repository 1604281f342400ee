"""Serving is forgiving: whatever a store does, retrieve gives verified KV or says False, and goes on."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xxhash
from core_support import CHUNK, SPEC, Gate, Shelf, kv_of, matches, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import BackendError, Engine, Tier, chain, envelope

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
Open = Callable[..., Engine]
TOKENS, KV = tokens_of(16), kv_of(16)


def filled(open_engine: Open, *tiers: dict[str, object]) -> Shelf:
    with open_engine(*(tiers or (SHELF,))) as engine:
        engine.store(TOKENS, kv=KV)
    return Shelf.shelves["default"]


def chunk_names(engine: Engine) -> list[str]:
    return [str(segment.key) for segment in engine.segments(TOKENS)]


def retrieve(engine: Engine) -> list[bool]:
    """Per chunk, whether it was retrieved; asserts that nothing wrong was."""
    got = torch.zeros_like(KV)
    mask = engine.retrieve(TOKENS, kv=got)
    assert matches(got, KV, mask)
    return mask[::CHUNK].tolist()


def count(engine: Engine, name: str) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == name)


def later_version(blob: bytes) -> bytes:
    data = bytearray(blob)
    struct.pack_into("<H", data, 8, 9)
    size = struct.unpack_from("<I", data, 12)[0]
    data[40:56] = bytes(16)
    data[40:56] = xxhash.xxh3_128_digest(data[:size])
    return bytes(data)


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "truncated": lambda blob, other: blob[:-1],
    "cut in the header": lambda blob, other: blob[:100],
    "extended": lambda blob, other: blob + b"\0",
    "bit flipped in the payload": lambda blob, other: blob[:-1] + bytes([blob[-1] ^ 1]),
    "bit flipped in the header": lambda blob, other: blob[:130] + bytes([blob[130] ^ 1]) + blob[131:],
    "swapped": lambda blob, other: other,
    "empty": lambda blob, other: b"",
    "foreign": lambda blob, other: b"%PDF-1.7 " * 999,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("at", [0, 2])
def test_a_damaged_blob_is_a_counted_miss_and_is_replaced(
    open_engine: Open, damage: Callable[[bytes, bytes], bytes], at: int
) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    names = chunk_names(engine)
    shelf._blobs[names[at]] = damage(shelf._blobs[names[at]], shelf._blobs[names[3 - at]])
    assert retrieve(engine) == [True] * at + [False] * (4 - at)
    assert count(engine, "corrupt") == 1 and count(engine, "missed") == 1
    assert names[at] not in shelf._blobs, "what is corrupt is removed"
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    assert retrieve(open_engine(SHELF)) == [True] * 4


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_storing_over_a_damaged_header_mends_it_without_a_retrieve(
    open_engine: Open, damage: Callable[[bytes, bytes], bytes]
) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    names = chunk_names(engine)
    good = shelf._blobs[names[1]]
    shelf._blobs[names[1]] = damage(good, shelf._blobs[names[2]])
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    header_was_bad = damage(good, shelf._blobs[names[2]])[:4096] != good[:4096]
    mended = len(shelf._blobs[names[1]]) == len(good) and shelf._blobs[names[1]][4096:] == good[4096:]
    assert mended and envelope.unseal(shelf._blobs[names[1]], key=names[1]) if header_was_bad else not mended


def test_a_blob_that_reads_badly_once_is_read_again(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    name = chunk_names(engine)[1]
    good, reads = shelf._blobs[name], []

    def flicker(verb: str, key: str) -> None:
        if verb == "get" and key == name:
            reads.append(key)
            shelf._blobs[name] = good[:-1] + b"\0" if len(reads) == 1 else good

    Shelf.shelves["default"].before = flicker
    assert retrieve(engine) == [True] * 4 and len(reads) == 2 and count(engine, "corrupt") == 0


def test_a_later_version_is_a_miss_and_stays(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    name = chunk_names(engine)[1]
    shelf._blobs[name] = later_version(shelf._blobs[name])
    assert retrieve(engine) == [True, False, False, False]
    assert count(engine, "corrupt") == 0 and count(engine, "missed") == 2
    assert name in shelf._blobs


@pytest.mark.parametrize(
    "change", [{"dtype": "float16"}, {"shape": (2, 2, 2, 16)}, {"format": "kv_pages"}, {"num_tokens": 3}], ids=str
)
def test_a_blob_of_another_shape_under_the_right_key_is_corrupt(open_engine: Open, change: dict[str, object]) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    name = chunk_names(engine)[1]
    header, payload = envelope.unseal(shelf._blobs[name], key=name)
    shelf._blobs[name] = b"".join(envelope.seal(replace(header.description, **change), [payload]))
    assert retrieve(engine) == [True, False, False, False]
    assert count(engine, "corrupt") == 1


def test_a_blob_that_vanishes_between_lookup_and_retrieve(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    assert engine.lookup(TOKENS).tokens == 16
    del shelf._blobs[chunk_names(engine)[2]]
    assert retrieve(engine) == [True, True, False, False]
    assert engine.lookup(TOKENS).tokens == 8, "and the forecast has learnt"


@pytest.mark.parametrize("verb", ["get", "put", "contains", "delete"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd"), MemoryError()])
def test_a_store_that_raises_is_a_miss(open_engine: Open, verb: str, error: Exception) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)

    def fail(called: str, key: str) -> None:
        if called == verb:
            raise error

    shelf = Shelf.shelves["default"]
    shelf.before = fail
    got = retrieve(engine)
    assert got == [verb not in ("get", "contains")] * 4
    more, kv = tokens_of(16, 9), kv_of(16, 9)
    engine.store(more, kv=kv)
    assert engine.flush(20)
    with pytest.raises(BackendError) if verb == "delete" else contextlib.nullcontext():
        engine.remove(TOKENS)
    shelf.before = lambda *_: None
    back = torch.zeros_like(kv)
    assert engine.retrieve(more, kv=back).all() and torch.equal(back, kv), "memory serves on"
    assert count(engine, "tier_error") + count(engine, "dropped") > 0, "nothing fails unseen"


def test_the_kth_call_that_fails_never_gives_wrong_kv(open_engine: Open) -> None:
    """SQLite's way: fail at call 1, 2, 3 ... until a run gets through without a fault."""
    for k in range(1, 200):
        Shelf.shelves.clear()
        engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF)
        calls = 0

        def fail(verb: str, key: str, k: int = k) -> None:
            nonlocal calls
            calls += 1
            if calls == k:
                raise OSError(5, "Input/output error")

        Shelf.shelves["default"].before = fail
        engine.store(TOKENS, kv=KV)
        assert engine.flush(20)
        retrieve(engine)
        engine.store(TOKENS, kv=KV)
        assert engine.flush(20)
        assert retrieve(engine) == [True] * 4
        engine.close()
        if calls < k:
            return
    pytest.fail("never got through without a fault")


@given(data=st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_whatever_gives_wrong_kv(open_engine: Open, data: st.DataObject) -> None:
    Shelf.shelves.clear()
    shelf = filled(open_engine)
    with open_engine(SHELF) as engine:
        names = chunk_names(engine)
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
            blob = bytearray(shelf._blobs[name])
            for at in data.draw(st.lists(st.integers(0, len(blob) - 1), max_size=3)):
                blob[at] ^= data.draw(st.integers(1, 255))
            shelf._blobs[name] = bytes(blob[: data.draw(st.integers(0, len(blob)))])
        retrieve(engine)


def test_hanging_reads_end_at_the_deadline_and_are_bounded(open_engine: Open, gate: Gate) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF | {"deadline": "100ms"})
    shelf = Shelf.shelves["default"]
    shelf.before = lambda verb, key: gate(verb, key) if verb == "get" else None
    for _ in range(6):
        assert retrieve(engine) == [False] * 4
    tier = engine.tiers["shelf"]
    assert gate.waiting == tier.abandoned_calls <= shelf.threads, "no more threads than the tier has"
    assert count(engine, "tier_paused") >= 1
    other, kv = tokens_of(8, 5), kv_of(8, 5)
    engine.store(other, kv=kv)
    assert engine.lookup(other, ["memory"]).tokens == 8, "serving goes on"
    gate.open()
    while tier.abandoned_calls:
        pass
    shelf.before = lambda *_: None
    until = time.monotonic() + 20
    while not engine.health().ok and time.monotonic() < until:
        engine.lookup(TOKENS)
    assert retrieve(engine) == [True] * 4, "the tier is back"


def test_a_late_read_never_lands_in_memory_that_has_a_new_owner(open_engine: Open, gate: Gate) -> None:
    filled(open_engine)
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF | {"deadline": "100ms"})
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    assert retrieve(engine) == [False] * 4
    mine = [tokens_of(16, seed) for seed in range(20, 24)]
    for seed, tokens in zip(range(20, 24), mine, strict=True):
        engine.store(tokens, kv=kv_of(16, seed))
    gate.open()
    while engine.tiers["shelf"].abandoned_calls:
        pass
    for seed, tokens in zip(range(20, 24), mine, strict=True):
        got = torch.zeros_like(KV)
        mask = engine.retrieve(tokens, kv=got)
        assert matches(got, kv_of(16, seed), mask)


def test_hanging_writes_never_hold_the_caller_past_its_deadline(open_engine: Open, gate: Gate) -> None:
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, SHELF | {"deadline": "100ms"})
    shelf = Shelf.shelves["default"]
    shelf.before = lambda verb, key: gate(verb, key) if verb == "put" and not key.startswith("spec") else None
    for seed in range(30, 36):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
    engine.flush(5)
    assert gate.waiting <= 2
    assert count(engine, "dropped") > 0
    gate.open()
    while engine.tiers["shelf"].abandoned_calls:
        pass
    for seed in range(30, 36):
        got = torch.zeros_like(KV)
        mask = engine.retrieve(tokens_of(16, seed), kv=got)
        assert matches(got, kv_of(16, seed), mask)
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20) and engine.lookup(TOKENS, ["shelf"]).tokens == 16, "writing goes on"


def test_capacity_holds_and_tails_go_before_heads(open_engine: Open) -> None:
    engine = open_engine(SHELF | {"capacity": f"{8 * 6}KiB"})
    shelf = Shelf.shelves["default"]
    for seed in range(40, 45):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
        assert engine.flush(20)
        assert len(shelf.blobs) <= 6
    assert engine.lookup(tokens_of(16, 44)).tokens == 16
    assert engine.lookup(tokens_of(16, 43)).tokens == 8, "half of the older prompt: its head"
    assert count(engine, "evicted") > 0
    open_engine(SHELF | {"capacity": 5 * max(map(len, shelf.blobs.values()))})
    until = time.monotonic() + 20
    while len(shelf.blobs) > 5 and time.monotonic() < until:
        pass
    assert len(shelf.blobs) == 5, "the bound holds after a restart with less room"


def test_two_engines_on_one_store_share_their_hits(open_engine: Open) -> None:
    one, two = open_engine(MEMORY, SHELF), open_engine(MEMORY, SHELF)
    one.store(TOKENS, kv=KV)
    assert one.flush(20)
    assert retrieve(two) == [True] * 4


# -- one request's trouble is not another's ----------------------------------------------------------------------------


def slow_gets(shelf: Shelf, seconds: float) -> None:
    shelf.before = lambda verb, key: time.sleep(seconds) if verb == "get" else None


def test_a_miss_or_a_cancel_in_one_request_costs_the_next_nothing(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    other, other_kv = tokens_of(32, 8), kv_of(32, 8)
    with open_engine(SHELF) as first:
        first.store(TOKENS, kv=KV)
        first.store(other, kv=other_kv)
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]
    del shelf._blobs[chunk_names(engine)[0]]
    engine.lookup(TOKENS)
    slow_gets(shelf, 0.1)
    assert retrieve(engine) == [False] * 4
    task = engine.load(engine.segments(other), kv=torch.zeros_like(other_kv))
    task.cancel()
    got = torch.zeros_like(other_kv)
    assert engine.retrieve(other, kv=got).all() and torch.equal(got, other_kv)
    assert count(engine, "tier_paused") == 0 == count(engine, "tier_error")
    assert "never released" not in caplog.text


def test_a_lookup_does_not_wait_behind_reads(open_engine: Open, gate: Gate) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    loads = [engine.prefetch(TOKENS) for _ in range(3)]
    while gate.waiting < 4:
        pass
    assert engine.lookup(TOKENS, ["shelf"]).tokens == 16
    assert not any(load.done for load in loads)


def test_a_store_that_cannot_say_what_one_blob_is_still_gets_the_others(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    names = chunk_names(engine)
    for name in names[1:]:
        del shelf._blobs[name]

    def odd(verb: str, key: str) -> None:
        if verb == "get" and key == names[0]:
            raise IsADirectoryError(21, "Is a directory")

    Shelf.shelves["default"].before = odd
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20) and set(names) <= set(shelf._blobs)


def test_with_everything_pinned_nobody_waits_for_room(open_engine: Open) -> None:
    filled(open_engine)
    engine = open_engine({"type": "memory", "capacity": "8KiB"}, SHELF | {"deadline": "1h"})
    mine = tokens_of(8, 3)
    engine.store(mine, kv=kv_of(8, 3))
    assert engine.flush(20) and engine.pin(mine) == 8
    assert retrieve(engine) == [False] * 4
    engine.store(tokens_of(4, 4), kv=kv_of(4, 4))
    assert engine.lookup(mine, ["memory"]).tokens == 8


def test_a_file_of_absurd_size_is_corrupt_and_evicts_nothing(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine({"type": "memory", "capacity": "4MiB"}, SHELF)
    mine = tokens_of(16, 3)
    engine.store(mine, kv=kv_of(16, 3))
    name = chunk_names(engine)[0]
    shelf._blobs[name] += bytes(3 << 20)
    assert retrieve(engine) == [False] * 4
    assert name not in shelf._blobs and count(engine, "evicted") == 0
    assert engine.lookup(mine, ["memory"]).tokens == 16


# -- operators' verbs and the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["remove", "clear"])
def test_a_purge_that_failed_says_so_and_forgets_nothing(open_engine: Open, verb: str) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)

    def fail(called: str, key: str) -> None:
        if called == "delete":
            raise OSError(30, "Read-only file system")

    purge = {"remove": lambda: engine.remove(TOKENS), "clear": lambda: engine.clear("")}[verb]
    Shelf.shelves["default"].before = fail
    with pytest.raises(BackendError, match=f"shelf: {verb} failed, blobs may be left"):
        purge()
    assert engine.lookup(TOKENS).tokens == 16, "still there, and not said to be gone"
    Shelf.shelves["default"].before = lambda *_: None
    purge()
    assert engine.lookup(TOKENS).tokens == 0 and not Shelf.shelves["default"].blobs


def test_a_late_write_does_not_bring_back_what_was_cleared(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "100ms"})
    shelf = Shelf.shelves["default"]
    shelf.before = lambda verb, key: gate(verb, key) if verb == "put" and not key.startswith("spec") else None
    engine.store(TOKENS[:4], kv=KV)
    while not gate.waiting:
        pass
    engine.clear()
    gate.open()
    while engine.tiers["shelf"].abandoned_calls:
        pass
    assert engine.flush(20) and not shelf.blobs and engine.lookup(TOKENS).tokens == 0


def test_a_late_write_that_cannot_be_taken_back_counts_and_is_not_served(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "100ms"})
    shelf, tier = Shelf.shelves["default"], engine.tiers["shelf"]
    blobs = [segment.key for segment in engine.segments(TOKENS[:4])]

    def trouble(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec"):
            gate(verb, key)
            shelf.before = fail

    def fail(verb: str, key: str) -> None:
        if verb == "delete":
            raise OSError(30, "Read-only file system")

    shelf.before = trouble
    engine.store(TOKENS[:4], kv=KV)
    while not gate.waiting:
        pass
    engine.remove(TOKENS[:4])
    gate.open()
    until = time.monotonic() + 20
    while (not shelf.blobs or tier.abandoned_calls or tier.ledger.known(blobs) == [None]) and time.monotonic() < until:
        pass
    assert engine.flush(20) and list(shelf.blobs) == [str(key) for key in blobs]
    assert engine.lookup(TOKENS[:4]).tokens == 0 and not engine.retrieve(TOKENS[:4], kv=torch.zeros_like(KV)).any()
    assert tier.ledger.bytes == 8192 and [victim.key for victim in tier.ledger.release(1)] == blobs


def test_what_a_late_write_left_is_not_served_while_it_is_taken_back(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "100ms"})
    shelf = Shelf.shelves["default"]
    taking_back = Gate()

    def hold(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec"):
            gate(verb, key)
            shelf.before = lambda verb, key: taking_back(verb, key) if verb == "delete" else None

    shelf.before = hold
    engine.store(TOKENS[:4], kv=KV)
    while not gate.waiting:
        pass
    engine.remove(TOKENS[:4])
    gate.open()
    while not taking_back.waiting:
        pass
    assert shelf.blobs and not engine.retrieve(TOKENS[:4], kv=torch.zeros_like(KV)).any()
    assert (
        engine.lookup(TOKENS[:4]).tokens == 0 and engine.tiers["shelf"].get(engine.segments(TOKENS[:4])[0].key) is None
    )
    engine.store(TOKENS[:4], kv=KV)  # it was removed, not forbidden
    assert engine.lookup(TOKENS[:4]).tokens == 4
    taking_back.open()


def test_a_late_read_does_not_bring_back_what_was_removed(open_engine: Open, gate: Gate) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]
    real = shelf.get_into

    def held(key: str, sink: object) -> bool:
        found = real(key, sink)  # type: ignore[arg-type]
        gate("get", key)
        return found

    shelf.get_into = held  # type: ignore[method-assign]
    task = engine.prefetch(TOKENS)
    while gate.waiting < 4:
        pass
    engine.remove(TOKENS)
    gate.open()
    assert not task.result(20).any()
    assert engine.lookup(TOKENS).tokens == 0 and engine._stack.memory.used_bytes == 0


def test_closing_ends_every_task_and_the_verbs_say_so(open_engine: Open, gate: Gate) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF | {"deadline": "100ms"})
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    tasks = [engine.prefetch(TOKENS) for _ in range(12)]
    engine.close()
    for task in tasks:
        with contextlib.suppress(BackendError):
            task.result(20)
        assert task.done
    for verb in (engine.store, engine.retrieve):
        with pytest.raises(BackendError, match="closed"):
            verb(TOKENS, kv=KV)
    with pytest.raises(BackendError, match="closed"):
        engine.lookup(TOKENS)


def test_a_backend_that_hangs_in_close_is_left_behind(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "100ms"})
    Shelf.shelves["default"].close = lambda: gate("close", "")  # type: ignore[method-assign]
    engine.close()
    assert count(engine, "tier_error") == 1


def test_a_listing_that_fails_is_reported(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(self: Shelf, prefix: str = "") -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Shelf, "scan", scan)
    engine = open_engine(MEMORY, SHELF | {"capacity": "1MiB"})
    until = time.monotonic() + 20
    while not count(engine, "tier_error") and time.monotonic() < until:
        pass
    assert any(key.reason.startswith("upkeep") for key in engine.counters())


def test_an_engine_that_cannot_open_leaves_no_thread(open_engine: Open) -> None:
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(ValueError, match="less than one chunk"):
            open_engine({"type": "memory", "capacity": "16B"}, observers=["log"])
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        pass
    assert threading.active_count() <= before


def test_put_respects_write_never_and_a_device_that_is_not_here_is_refused() -> None:
    tier = Tier.open({"type": "dict", "write": "never"}, SPEC)
    key = "f" * 32
    segment = chain(TOKENS, chunk_tokens=CHUNK, fingerprint=key)[0]
    assert tier.batched_put([(segment.key, KV[:, :, :4])]) == 0 and not tier.contains(segment.key)
    tier.close()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="dst_device: 'cuda:99' cannot be used here, use 'cpu'"):
            Tier.open("memory", SPEC, dst_device="cuda:99")
