"""The names in the ledger, and its accounts, while others use it, write and evict."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from hashlib import sha256

import pytest
from core_support import PromptLedger as Ledger
from ledger_support import EXACT, START, Clock, entry, key, order_of_going, write

from kvloom import ChunkKey
from kvloom.runtime import Lock
from kvloom.tiers.index.columns import FREE, Columns
from kvloom.tiers.index.lru import Links, Ring


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_names_by_prefix(clock: Clock) -> None:
    ledger = Ledger(clock)
    keys = [ChunkKey(f"{finger * 32}/{tag}", depth, sha256(f"{finger}{tag}{depth}".encode()).digest())
            for depth in range(11) for tag in ("t", "tt") for finger in "ab"]  # fmt: skip
    for one in keys:
        write(ledger, one)
    random.Random(5).shuffle(keys)
    ledger.touch(keys[::-1])
    a = "a" * 32
    for prefix in ("", a, a[:5], f"{a}/", f"{a}/t", f"{a}/t/", f"{a}/t/1", f"{a}/t/10-", str(keys[3]), "c", f"{a}/t/x"):
        assert ledger.names(prefix) == [one for one in keys if str(one).startswith(prefix)], prefix


class Interleaved(Clock):
    """Whenever a lock is released, something else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None
        self._busy = False

    def lock(self) -> Lock:
        return self

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        if not self._busy:
            self._busy = True
            self.meanwhile()
            self._busy = False


def test_names_in_the_order_they_have_at_the_end() -> None:
    runtime = Interleaved()
    ledger = Ledger(runtime)
    keys = [key(place) for place in range(3500)]
    for one in keys:
        write(ledger, one)
    uses = iter([keys[1500:1510], keys[100:110], keys[3000:3010], keys[2000:2010]])
    runtime.meanwhile = lambda: ledger.touch(next(uses, []))
    names = ledger.names()
    assert names == ledger.names() and set(names) == set(keys)


def test_the_row_of_a_cursor_is_an_ordinary_row_again() -> None:
    rows = Columns()
    links = Links(rows)
    ring = Ring(rows, links)
    ring.close_cursor(ring.open_cursor())
    assert set(rows.state) == {FREE}
    assert Ring(rows, links).oldest() == 0


def test_names_come_to_an_end_however_much_is_used_meanwhile() -> None:
    runtime = Interleaved()
    ledger = Ledger(runtime)
    keys = [key(place) for place in range(3000)]
    for one in keys:
        write(ledger, one)
    chances = iter(range(100))

    def use() -> None:
        assert next(chances, None) is not None, "as if for ever"
        ledger.touch(keys[:1500])

    runtime.meanwhile = use
    assert set(ledger.names()) == set(keys)


def test_names_while_others_use_and_evict(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=5000)
    keys = [key(place) for place in range(4000)]
    for one in keys:
        write(ledger, one)
    stop = threading.Event()

    def use() -> None:
        rng = random.Random(1)
        while not stop.is_set():
            start = rng.randrange(4000)
            ledger.touch(keys[start : start + 500])
            ledger.admit(key("new"), 1000)
            ledger.forget([key("new")])

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            names = ledger.names()
            assert len(names) == len(set(names)) and set(names) >= set(keys)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    ledger.forget([key("new")])
    assert ledger.names() == order_of_going(ledger)


def test_many_threads_leave_the_accounts_right(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=500, quota={"*": 300}, ttl=1000.0, policy="tiny_lfu")
    keys = [key(name, tag=tag) for name in range(400) for tag in ("a", "b")]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(1500):
                some = rng.sample(keys, 5)
                ledger.touch(some)
                ledger.welcome(some[0], 3)
                if ledger.admit(some[0], rng.randrange(1, 9)) is not None:
                    ledger.note(some[0], EXACT)
                ledger.forget_absent(some[1], since=ledger.mark())
                ledger.expire()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    listing = [entry(one, START - 10, nbytes=2) for one in keys]
    for thread in threads:
        thread.start()
    for _ in range(5):
        ledger.recover(iter(listing))
        ledger.names()
    for thread in threads:
        thread.join()
    assert errors == []
    ledger.admit(key("last", tag="c"), 1)
    rows = ledger._rows
    each = {one: rows.bytes[rows.find[one.digest[0]](one.digest, 0)] for one in ledger.names()}
    assert sum(each.values()) == ledger.bytes <= 500 and len(each) == len(ledger)
    for tag, nbytes in ledger.tenants().items():
        assert nbytes == sum(size for one, size in each.items() if one.namespace.endswith(tag)) <= 300
