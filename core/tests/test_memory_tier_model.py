"""The memory tier beside a model, step by step: accounts agree, and nothing that may not go is gone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from memory_tier_support import PAGE, Queue, Tier, key_of

from kvloom import ChunkKey

KEYS = [key_of(number, tenant) for tenant in "abc" for number in range(8)]
QUOTA = {"a": 3 * PAGE, "b": 5 * PAGE}


class MemoryTierRules(RuleBasedStateMachine):
    """Any order of everything: accounts agree after each step, and nothing that may not go is gone."""

    @st.composite
    @staticmethod
    def _settings(draw: Any) -> dict[str, Any]:
        return {
            "ttl": draw(st.sampled_from([None, 50.0])),
            "quota": draw(st.sampled_from([None, QUOTA, {"*": 4 * PAGE}])),
        }

    def __init__(self) -> None:
        super().__init__()
        self.one: Tier | None = None
        self.queue = Queue()
        self.leases: list[tuple[ChunkKey, Any]] = []
        self.reservations: list[Any] = []
        self.pinned: set[ChunkKey] = set()
        self.mirror: set[ChunkKey] = set()

    @precondition(lambda self: self.one is None)
    @rule(settings=_settings(), writes=st.booleans())
    def open(self, settings: dict[str, Any], writes: bool) -> None:
        self.one = Tier(10, **settings)
        if writes:
            self.one.tier.write_back.write = self.queue

    def teardown(self) -> None:
        if self.one is None:
            return
        for _, loaded in self.leases:
            loaded.release()
        for reservation in self.reservations:
            reservation.abandon()
        self.queue.written()
        self.one.tier.close()
        assert self.one.pool.used_bytes == 0, "every page came back"
        self.one.pool.close()
        assert self.one.pool.leaked == 0

    opened = precondition(lambda self: self.one is not None)

    @opened
    @rule(
        key=st.sampled_from(KEYS),
        exact=st.booleans(),
        keep=st.booleans(),
        dirty=st.booleans(),
        age=st.sampled_from([0, 20, 60]),
        pages=st.integers(1, 3),
    )
    def insert(self, key: ChunkKey, exact: bool, keep: bool, dirty: bool, age: float, pages: int) -> None:
        written = self.one.clock.seconds - age
        fidelity = "exact" if exact else "signs"
        got = self.one.put(key, fidelity=fidelity, keep=keep, dirty=dirty, written=written, pages=pages)
        if got is not None and keep:
            self.leases.append((key, got))
        if got is None:
            self.check_full(pages)

    def check_full(self, pages: int) -> None:
        """A reservation was refused, so nothing that nobody uses and nothing forbids to evict is left."""
        if self.one.tier.write_back.write is None:
            held = self.one.tier._index.entries
            assert [key for key, one in held.items() if not one.pinned and not one.block.leased] == []

    @opened
    @rule(key=st.sampled_from(KEYS))
    def lease(self, key: ChunkKey) -> None:
        (loaded,) = self.one.tier.lease([key])
        assert (loaded is not None) == self.one.tier.contains(key)
        if loaded is not None:
            assert int(loaded.chunk.tensor.flatten()[0]) == key.depth, "its own bytes"
            self.leases.append((key, loaded))

    @opened
    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key, loaded = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert set(loaded.chunk.tensor.flatten().tolist()) == {key.depth}, "what is leased does not change"
        loaded.release()

    @opened
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def touch(self, keys: list[ChunkKey]) -> None:
        self.one.tier.touch(keys)

    @opened
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3), pinned=st.booleans())
    def pin(self, keys: list[ChunkKey], pinned: bool) -> None:
        self.one.tier.pin(keys, pinned)

    @opened
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def remove(self, keys: list[ChunkKey]) -> None:
        self.one.tier.remove(keys)
        assert not any(self.one.tier.contains(key) for key in keys)

    @opened
    @rule(pages=st.integers(1, 4), late=st.booleans())
    def reserve(self, pages: int, late: bool) -> None:
        pinned = {key for key, held in self.one.tier._index.entries.items() if held.pinned}
        expired = {key for key in pinned if not self.one.tier.contains(key)}
        tier = self.one.tier
        reservation = tier.reserve_by(pages * PAGE, self.one.clock.seconds) if late else tier.reserve(pages * PAGE)
        assert all(key in tier._index.entries for key in pinned - expired), "pinned ones stay"
        if reservation is not None:
            reservation.tensor((pages * PAGE,), torch.uint8).fill_(255)  # whoever still looked at it would see
            self.reservations.append(reservation)

    @opened
    @precondition(lambda self: self.reservations)
    @rule()
    def abandon(self) -> None:
        self.reservations.pop().abandon()

    @opened
    @rule(verdict=st.sampled_from([True, None, False]))
    def write_queue(self, verdict: bool | None) -> None:
        self.queue.written()
        self.queue.verdict = verdict

    @opened
    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.one.clock.seconds += seconds

    @opened
    @rule()
    def follow(self) -> None:
        """A mirror that is told of changes holds what the tier does, whenever it asks."""
        changes = self.one.tier.changes()
        if changes.whole:
            self.mirror.clear()
        self.mirror.update(changes.came)
        self.mirror.difference_update(changes.left)
        assert self.mirror == set(self.one.tier._index.entries)

    @invariant()
    def accounts_agree(self) -> None:
        if self.one is None:
            return
        held = self.one.tier._index
        entries = held.entries
        assert held.pinned_bytes == sum(one.block.size for one in entries.values() if one.pinned)
        assert sorted(held.recency.keys()) == sorted(key for key, one in entries.items() if not one.pinned)
        assert sorted(held.keys()) == sorted(entries)
        assert {one.block.start: key for key, one in entries.items()} == held._starts
        assert {one.block.start + one.block.size: key for key, one in entries.items()} == held._ends
        aside = held.recency._aside.values()
        assert held.recency.aside_bytes == sum(one.block.size for one in aside)
        assert not any(one.dirty for one in aside)
        if held._ages is not None:
            assert sum(map(len, held._ages._buckets.values())) == len(entries)
        self.quotas_hold()
        blocks = {id(one.block): one.block.size for one in entries.values()}
        blocks |= {id(loaded.lease.block): loaded.lease.block.size for _, loaded in self.leases}
        blocks |= {id(loaded.lease.block): loaded.lease.block.size for loaded in self.queue.taken.values()}
        assert self.one.pool.used_bytes == sum(blocks.values()) + sum(
            reservation.size for reservation in self.reservations
        )

    def quotas_hold(self) -> None:
        tenants = self.one.tier._index._tenants
        if tenants is None:
            return
        sums: Counter[str] = Counter()
        for key, one in self.one.tier._index.entries.items():
            if not one.leaving:
                sums[key.namespace[2:]] += one.block.size
        counted = {tag: nbytes for tag, nbytes in sums.items() if tenants.quota(tag) is not None}
        assert tenants._bytes == counted and set(tenants._recency) == set(counted)
        assert all(nbytes <= tenants.quota(tag) for tag, nbytes in counted.items())


def test_room_is_made_in_the_quota_for_a_chunk_that_is_pinned_after_it_was_given_up() -> None:
    state = MemoryTierRules()
    state.open(settings={"ttl": None, "quota": {"a": 3 * PAGE}}, writes=True)
    large, small = ChunkKey("f/a", 1, bytes(32)), ChunkKey("f/a", 0, b"1".rjust(32))
    state.insert(key=large, exact=True, keep=False, dirty=True, age=0, pages=3)
    state.insert(key=small, exact=False, keep=False, dirty=False, age=0, pages=1)
    assert state.one.tier.pin([large], True) == 1
    state.accounts_agree()
    assert state.one.has(large, small) == [True, False]
    state.teardown()


TestMemoryTierRules = MemoryTierRules.TestCase
TestMemoryTierRules.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_the_tier_in_many_steps(part: int) -> None:
    """In parts, since hypothesis keeps all that it tried in a run."""
    run_state_machine_as_test(
        MemoryTierRules, settings=settings(max_examples=75, stateful_step_count=50, deadline=None)
    )
