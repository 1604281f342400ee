"""The ledger never lets the head of a chain go before its tail, whatever happens."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest
from core_support import PromptLedger as Ledger
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import Clock

from kvloom import ChunkKey, Entry
from kvloom.tiers.index.ledger import Fidelity

TAGS = ("-", "t")

chains = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), min_size=1, max_size=25)
"""Paths in a tree: what two of them have in common at the beginning, they share."""


def chain_of(path: list[str], tag: str) -> list[ChunkKey]:
    return [
        ChunkKey(f"{'f' * 32}/{tag}", depth, sha256((tag + "".join(path[: depth + 1])).encode()).digest())
        for depth in range(len(path))
    ]


class Store:
    """A tier as far as its ledger is concerned, and a store that keeps times."""

    def __init__(self, **limits: object) -> None:
        self.clock = Clock()
        self.blobs: dict[ChunkKey, tuple[float, float]] = {}
        """Times of writing, and of the last use that the store was told of."""
        self.limits = limits
        self.ledger = Ledger(self.clock, **limits)  # type: ignore[arg-type]
        self.parents: dict[ChunkKey, ChunkKey] = {}
        self.being_written: set[ChunkKey] = set()

    def use(self, chain: list[ChunkKey], order: random.Random) -> None:
        """Look a chain up and store what is not there, which is written a little later and in no special order."""
        missing = [key for key in chain if key not in self.blobs]
        for key in missing:
            self.ledger.expect(key)
        self.ledger.touch(chain)
        self.tell()
        order.shuffle(missing)
        for key in missing:
            self.clock.time += order.choice([0.0, 20.0])
            victims = self.ledger.admit(key, 1)
            assert victims is not None
            for victim in victims:
                del self.blobs[victim.key]
                self.check_heads()
            self.blobs[key] = (self.clock.time, 0.0)
            self.ledger.note(key, Fidelity.EXACT)
        self.tell()

    def tell(self) -> None:
        for key in self.ledger.unsaid(600.0, 1000):
            self.blobs[key] = (self.blobs[key][0], self.clock.time)

    def reopen(self, order: random.Random) -> None:
        entries = [Entry(str(key), 1, written, used) for key, (written, used) in self.blobs.items()]
        order.shuffle(entries)
        self.ledger = Ledger(self.clock, **self.limits)  # type: ignore[arg-type]
        assert self.ledger.recover(entries) == []

    def check_heads(self) -> None:
        """Check that no chunk is stored without its head, unless the head is still being written."""
        for key in self.blobs:
            head = self.parents.get(key)
            assert head is None or head in self.blobs or head in self.being_written


@pytest.mark.parametrize("quota", [None, {"*": 8}], ids=["one", "tenants"])
@given(
    paths=chains, order=st.randoms(use_true_random=False), gaps=st.lists(st.sampled_from([1.0, 45.0, 400.0, 4000.0]))
)
def test_no_head_goes_before_its_tail(
    quota: dict[str, int] | None, paths: list[list[str]], order: random.Random, gaps: list[float]
) -> None:
    store = Store(capacity=12, quota=quota)
    for turn, path in enumerate(paths):
        chain = chain_of(path, TAGS[turn % 2])
        store.parents |= dict(zip(chain[1:], chain[:-1], strict=True))
        store.being_written = {key for key in chain if key not in store.blobs}
        store.use(chain, order)
        store.clock.time += gaps[turn] if turn < len(gaps) else 0.0
        store.being_written = set()
        store.check_heads()
        if order.random() < 0.2:
            store.reopen(order)
    store.clock.time += 100.0
    store.reopen(order)
    while victims := store.ledger.release(1):
        del store.blobs[victims[0].key]
        store.check_heads()
    assert store.blobs == {}
