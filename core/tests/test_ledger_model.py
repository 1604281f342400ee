"""The ledger beside a slow and obvious model of lists, step by step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import pytest
from core_support import PromptLedger as Ledger
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ledger_support import Clock

from kvloom import ChunkKey, Entry
from kvloom.tiers.index.ledger import Fidelity, Victim

TAGS = ("-", "t", "u")
KEYS = [
    ChunkKey(f"{finger * 32}/{tag}", depth, sha256(f"{finger}{tag}{depth}".encode()).digest())
    for finger in "ab"
    for tag in TAGS
    for depth in range(4)
]
VERBS = ("expect", "note", "admit", "forget", "touch")
TTL = 1000.0
FOUND = (Fidelity.UNKNOWN, Fidelity.EXACT, Fidelity.LOSSY, Fidelity.UNREADABLE)


@dataclass
class Row:
    key: ChunkKey
    nbytes: int = 0
    fidelity: Fidelity = Fidelity.PENDING
    writing: bool = False
    """Admitted, and neither noted nor forgotten since."""
    written: float = 0.0
    shown: float = 0.0
    """Time of the last use that the store can show."""

    @property
    def counts(self) -> bool:
        return self.writing or self.fidelity is not Fidelity.PENDING

    @property
    def may_go(self) -> bool:
        return not self.writing and self.fidelity is not Fidelity.PENDING

    @property
    def tag(self) -> str:
        return self.key.namespace.rpartition("/")[2]


class Model:
    """Rows in a list, from the least to the most recently used."""

    def __init__(self, capacity: int | None, quota: dict[str, int] | None, ttl: float | None) -> None:
        self.capacity, self.quota, self.ttl = capacity, quota or {}, ttl
        self.rows: list[Row] = []
        self.gone: dict[ChunkKey, float] = {}

    def get(self, key: ChunkKey) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    def get_or_add(self, key: ChunkKey) -> Row:
        row = self.get(key)
        if row is None:
            row = Row(key)
            self.rows.append(row)
        return row

    def quota_of(self, tag: str) -> int | None:
        return self.quota.get(tag, self.quota.get("*"))

    def bytes(self, tag: str | None = None) -> int:
        return sum(row.nbytes for row in self.rows if tag is None or row.tag == tag)

    def known(self, key: ChunkKey, now: float) -> Fidelity | None:
        row = self.get(key)
        if row is None or row.fidelity is Fidelity.PENDING:
            return None
        return Fidelity.EXPIRED if self.ttl is not None and row.written + self.ttl <= now else row.fidelity

    def touch(self, chain: list[ChunkKey]) -> None:
        for key in reversed(chain):
            row = self.get(key)
            if row is not None:
                self.rows.remove(row)
                self.rows.append(row)

    def forget(self, row: Row, now: float) -> None:
        self.rows.remove(row)
        self.gone[row.key] = now

    def shrink(self, tags: list[str], now: float) -> list[Victim]:
        victims = []
        for tag in tags:
            quota = self.quota_of(tag)
            for row in [row for row in self.rows if row.tag == tag and row.may_go]:
                if quota is not None and self.bytes(tag) > quota:
                    self.forget(row, now)
                    victims.append(Victim(row.key, row.nbytes, "quota"))
        for row in [row for row in self.rows if row.may_go]:
            if self.capacity is not None and self.bytes() > self.capacity:
                self.forget(row, now)
                victims.append(Victim(row.key, row.nbytes, "capacity"))
        return victims

    def admit(self, key: ChunkKey, nbytes: int, now: float) -> list[Victim] | None:
        row = Row(key)
        for limit in (self.capacity, self.quota_of(row.tag)):
            if limit is not None and nbytes > limit:
                return None
        row = self.get_or_add(key)
        row.nbytes, row.writing = nbytes, True
        return self.shrink([row.tag], now)

    def note(self, key: ChunkKey, fidelity: Fidelity, nbytes: int | None, written: float | None, now: float) -> None:
        row = self.get_or_add(key)
        if row.writing:
            row.shown = now
        if written is not None:
            row.written = min(written, now)
        elif row.writing or not row.written:
            row.written = now
        row.fidelity, row.writing = fidelity, False
        row.nbytes = row.nbytes if nbytes is None else nbytes

    def recover(self, entries: list[Entry], *, first: bool, fresh: set[ChunkKey], now: float) -> list[Victim]:
        """fresh: keys that were expected, admitted or noted since the listing began."""
        victims: list[Victim] = []
        news = []
        for entry in entries:
            key, used = ChunkKey.parse(entry.key), max(entry.modified, entry.used)
            row = self.get(key)
            if row is None:
                news.append((used, key, entry))
            elif row.may_go and key not in fresh:
                row.nbytes = entry.bytes
                if row.shown and entry.modified > row.shown + 60:
                    row.fidelity, row.written = Fidelity.UNKNOWN, entry.modified
                if row.shown and not first and used > row.shown + 60:
                    news.append((used, key, entry))
                row.shown = max(row.shown, used)
        listed = {ChunkKey.parse(entry.key) for entry in entries}
        self.rows = [row for row in self.rows if not row.may_go or row.key in listed | fresh]
        news.sort(key=lambda some: (some[0] // 60, -some[1].depth))
        tags = []
        for used, key, entry in reversed(news) if first else news:
            row = self.get(key)
            if row is None:
                if self.gone.get(key, -1.0) >= entry.modified:
                    continue
                if self.ttl is not None and entry.modified + self.ttl <= now:
                    victims.append(Victim(key, entry.bytes, "expired"))
                    continue
                row = Row(key, entry.bytes, Fidelity.UNKNOWN, False, entry.modified, used)
                self.rows.insert(0 if first else len(self.rows), row)
                if row.tag not in tags:
                    tags.append(row.tag)
            elif not first:
                self.rows.remove(row)
                self.rows.append(row)
        victims += self.shrink(tags, now) if news else []
        victims += self.shrink(list(TAGS), now)
        self.gone.clear()
        return victims


keys = st.sampled_from(KEYS)
sizes = st.integers(0, 12)
limits = st.none() | st.integers(5, 40)
quotas = st.none() | st.dictionaries(st.sampled_from(["*", *TAGS]), st.integers(3, 25), min_size=1)


class LedgerMachine(RuleBasedStateMachine):
    """One step on the ledger and the same on the model; then they must agree on everything that can be asked."""

    @initialize(
        capacity=limits, quota=quotas, ttl=st.sampled_from([None, TTL]), policy=st.sampled_from(["lru", "tiny_lfu"])
    )
    def start(self, capacity: int | None, quota: dict[str, int] | None, ttl: float | None, policy: str) -> None:
        self.clock = Clock()
        self.policy = policy
        self.ledger = Ledger(self.clock, capacity=capacity, quota=quota, ttl=ttl, policy=policy)
        self.model = Model(capacity, quota, ttl)
        self.listed = False

    @rule(key=keys)
    def expect(self, key: ChunkKey) -> None:
        self.ledger.expect(key)
        self.model.get_or_add(key)

    @rule(key=keys, nbytes=sizes)
    def admit(self, key: ChunkKey, nbytes: int) -> None:
        assert self.ledger.admit(key, nbytes) == self.model.admit(key, nbytes, self.clock.time)

    @rule(
        key=keys,
        fidelity=st.sampled_from(FOUND),
        nbytes=st.none() | sizes,
        age=st.none() | st.floats(-50, 2 * TTL),
    )
    def note(self, key: ChunkKey, fidelity: Fidelity, nbytes: int | None, age: float | None) -> None:
        written = None if age is None else self.clock.time - age
        self.ledger.note(key, fidelity, nbytes=nbytes, written=written)
        self.model.note(key, fidelity, nbytes, written, self.clock.time)

    @rule(chain=st.lists(keys, max_size=6) | st.sampled_from([KEYS[at : at + 4] for at in range(0, len(KEYS), 4)]))
    def touch(self, chain: list[ChunkKey]) -> None:
        self.ledger.touch(chain)
        self.model.touch(chain)

    @rule(key=keys)
    def forget_pending(self, key: ChunkKey) -> None:
        self.ledger.forget_pending(key)
        row = self.model.get(key)
        if row is not None and not row.counts:
            self.model.rows.remove(row)

    @rule(key=keys)
    def forget_absent(self, key: ChunkKey) -> None:
        self.ledger.forget_absent(key, since=self.ledger.mark())
        row = self.model.get(key)
        if row is not None and row.may_go:
            self.model.forget(row, self.clock.time)

    @rule(some=st.lists(keys, max_size=3))
    def forget(self, some: list[ChunkKey]) -> None:
        self.ledger.forget(some)
        for key in some:
            row = self.model.get(key)
            if row is not None:
                self.model.forget(row, self.clock.time)

    @rule(nbytes=sizes)
    def release(self, nbytes: int) -> None:
        goal, victims = self.model.bytes() - nbytes, []
        for row in [row for row in self.model.rows if row.may_go]:
            if self.model.bytes() > goal:
                self.model.forget(row, self.clock.time)
                victims.append(Victim(row.key, row.nbytes, "capacity"))
        assert self.ledger.release(nbytes) == victims

    @rule(seconds=st.floats(0.0, 700.0))
    def pass_time(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule(limit=st.integers(1, 4))
    def expire(self, limit: int) -> None:
        now, slot = self.clock.time, TTL / 1024
        victims = [victim.key for victim in self.ledger.expire(limit)]
        rows = [row for key in victims if (row := self.model.get(key)) is not None]
        assert len(rows) == len(victims) <= limit and all(row.may_go for row in rows)
        for row in rows:
            self.model.forget(row, now)
        left = [row.written for row in self.model.rows if row.may_go] if self.model.ttl is not None else []
        assert all(row.written + TTL <= now for row in rows)
        if rows:
            assert all(max(row.written for row in rows) < max(other, now - TTL) + slot for other in left)
        if len(rows) < limit:
            assert all(other + TTL + 2 * slot > now for other in left)

    @rule(
        times=st.dictionaries(keys, st.tuples(sizes, st.floats(1, 3000), st.none() | st.floats(0, 3000))),
        order=st.randoms(use_true_random=False),
        meanwhile=st.lists(
            st.tuples(st.sampled_from(["expect", "note", "admit", "forget", "touch"]), keys), max_size=4
        ),
    )
    def recover(
        self,
        times: dict[ChunkKey, tuple[int, float, float | None]],
        order: random.Random,
        meanwhile: list[tuple[str, ChunkKey]],
    ) -> None:
        now = self.clock.time
        entries = [
            Entry(str(key), nbytes, now - modified, 0.0 if used is None else now - used)
            for key, (nbytes, modified, used) in times.items()
        ]
        order.shuffle(entries)
        fresh: set[ChunkKey] = set()

        def listing() -> Iterator[Entry]:
            yield from entries
            yield Entry("spec/f.json", 5, now)
            for verb, key in meanwhile:
                if verb in ("expect", "note"):
                    fresh.add(key)
                match verb:
                    case "expect":
                        self.expect(key)
                    case "note":
                        self.note(key, Fidelity.EXACT, 2, None)
                    case "admit":
                        victims = self.model.admit(key, 3, now)
                        assert self.ledger.admit(key, 3) == victims
                        if victims is not None:
                            fresh.add(key)
                    case "forget":
                        self.forget([key])
                        self.model.gone[key] = now  # known or not: the listing may have shown it
                    case _:
                        self.touch([key])

        got = self.ledger.recover(listing())
        want = self.model.recover(entries, first=not self.listed, fresh=fresh, now=now)
        assert sorted(got) == sorted(want) and self.ledger.complete
        self.listed = True

    @rule(
        order=st.randoms(use_true_random=False),
        ages=st.lists(st.floats(0.0, 900.0), min_size=len(KEYS), max_size=len(KEYS)),
    )
    def restart(self, order: random.Random, ages: list[float]) -> None:
        """The process is another one: it finds what was there, in any order."""
        now = self.clock.time
        old = self.model
        entries = [Entry(str(row.key), row.nbytes, now - age) for row, age in zip(old.rows, ages, strict=False)]
        order.shuffle(entries)
        self.model = Model(old.capacity, old.quota, old.ttl)
        self.ledger = Ledger(self.clock, capacity=old.capacity, quota=old.quota, ttl=old.ttl, policy=self.policy)
        want = self.model.recover(entries, first=True, fresh=set(), now=now)
        assert sorted(self.ledger.recover(entries)) == sorted(want)
        self.listed = True

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def they_agree(self) -> None:
        ledger, model, now = self.ledger, self.model, self.clock.time
        assert ledger.bytes == model.bytes() and len(ledger) == sum(row.counts for row in model.rows)
        assert ledger.names() == [row.key for row in model.rows]
        assert ledger.known(KEYS) == [model.known(key, now) for key in KEYS]
        tags = dict.fromkeys(row.tag for row in model.rows)
        assert ledger.tenants() == {tag: model.bytes(tag) for tag in tags}


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_the_ledger_in_many_steps(part: int) -> None:
    """In parts, since hypothesis keeps all that it tried in a run."""
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=125, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
