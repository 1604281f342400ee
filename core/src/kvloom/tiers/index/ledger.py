"""The ledger: the blobs that a stored tier is believed to hold, their sizes, and which are evicted when it is full."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from kvloom.runtime import Runtime
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.index import columns as states
from kvloom.tiers.index.access_time_sync import AccessTimeSync
from kvloom.tiers.index.columns import FREE, PENDING, WRITING
from kvloom.tiers.index.entries import Entries, Victim
from kvloom.tiers.index.eviction_history import EvictionHistory
from kvloom.tiers.index.frequency import Sketch
from kvloom.tiers.index.freshness import Freshness
from kvloom.tiers.index.listing import SLICE, Listing, slices
from kvloom.tiers.index.recovery import Recovery
from kvloom.types import ChunkKey, Entry

__all__ = ["POLICIES", "Fidelity", "Ledger", "Victim"]

POLICIES = ("lru", "tiny_lfu")


class Fidelity(enum.Enum):
    """The known fidelity of a stored blob's content."""

    PENDING = "pending"
    """Accepted for writing: it has its place in the order, but is not there yet."""
    UNKNOWN = "unknown"
    EXACT = "exact"
    LOSSY = "lossy"
    UNREADABLE = "unreadable"
    """Nothing that this process could use."""
    LATER = "later"
    """In the words of a later release: not for this process, and not for it to replace."""
    EXPIRED = "expired"
    """There, and past its time."""


_THERE = (Fidelity.UNKNOWN, Fidelity.EXACT, Fidelity.LOSSY, Fidelity.UNREADABLE, Fidelity.LATER)
_FIDELITIES = (None, *_THERE, None, None, *_THERE)
"""By state: a blob that is written over is there until then."""
_STATES = {fidelity: state for state, fidelity in enumerate(_THERE, states.UNKNOWN)}


class Ledger:
    """Bytes, age and recency of the blobs of one tier. No I/O; O(1) for each blob, however many there are.

    A blob that is being written, from `expect` or `admit` until `note` or `forget`, is not evicted. Its bytes count
    from `admit` on: if most blobs are being written, `bytes` may be above the capacity.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        capacity: int | None = None,
        policy: str = "lru",
        ttl: float | None = None,
        quota: Mapping[str, int] | None = None,
        believed: float | None = None,
    ) -> None:
        """capacity: bytes. ttl: seconds from writing. quota: bytes by salt tag, `"*"` for those that are not named.

        believed: seconds for which a blob counts as stored after it was last seen; default: until it is forgotten.
        """
        assert policy in POLICIES, policy
        self.complete = False
        """The store was listed to its end: a blob that is not here was not there."""
        self.evictions = EvictionHistory(runtime)
        """Blobs that were evicted from the store, with the reason."""
        self._lock = runtime.lock()
        self._wall = runtime.wall
        self._held = Entries(runtime.wall, capacity=capacity, ttl=ttl, quota=quota)
        self.mark = self._held.mark
        """Now, for `note` and `forget_absent`."""
        self._rows = self._held.rows
        self._sketch = Sketch() if policy == "tiny_lfu" else None
        self._access_times = AccessTimeSync()
        self._listed = False
        self.freshness: Freshness | None = None
        """The time to ask the store about blobs again."""
        if believed is not None:
            self.freshness = self._held.freshness = Freshness(self._rows, self._lock, runtime.now, seconds=believed)

    @property
    def enforced(self) -> bool:
        """This ledger chooses victims when the tier is full; if False, it only records what is there."""
        return self._held.enforced

    @enforced.setter
    def enforced(self, enforced: bool) -> None:
        with self._lock:
            self._held.enforced = enforced

    @property
    def undated(self) -> bool:
        """The store does not say when blobs were written."""
        return self._held.undated

    @property
    def capacity(self) -> int | None:
        return self._held.capacity

    @property
    def bytes(self) -> int:
        return self._held.bytes

    def __len__(self) -> int:
        """Return the number of blobs, without those that are only expected."""
        return self._held.count

    def tenants(self) -> dict[str, int]:
        """Bytes by salt tag."""
        with self._lock:
            return self._held.tenants.bytes()

    # -- use -----------------------------------------------------------------------------------------------------------

    def known(self, keys: Iterable[ChunkKey]) -> list[Fidelity | None]:
        """Return the known fidelity of each key; None if it is not believed to be there."""
        find, state, ages = self._rows.find, self._rows.state, self._held.ages
        with self._lock:
            found = [find[digest[0]](digest, 0) for _, _, digest in keys]
            if ages is None:
                return [_FIDELITIES[state[row]] for row in found]
            written, expired = ages.written, self._wall() - ages.ttl
            there = [_FIDELITIES[state[row]] for row in found]
            return [
                Fidelity.EXPIRED if fidelity is not None and written[row] <= expired else fidelity
                for fidelity, row in zip(there, found, strict=True)
            ]

    def touch(self, chain: Sequence[ChunkKey], *, count: bool = True) -> None:
        """Note that a chain was used: its head becomes the most recent, its tail the least.

        count: it is one use of each of its keys, held or not, for a policy that counts.
        """
        find = self._rows.find
        with self._lock:
            self._held.renew([find[digest[0]](digest, 0) for _, _, digest in reversed(chain)])
            self._access_times.add(chain, self._wall())
            if count and self._sketch is not None:
                self._sketch.add([digest for _, _, digest in chain], rows=len(self))

    def unsaid(self, since_seconds: float, limit: int) -> list[ChunkKey]:
        """At most `limit` keys whose access times are to be written to the store; they count as written now.

        Those that were used, and last written at least `since_seconds` ago; and heads that would look older in the
        store than the chunks behind them.
        """
        said: list[ChunkKey] = []
        for _ in range(len(self._access_times)):
            if len(said) >= limit:
                break
            with self._lock:
                left = limit - len(said)
                said += self._access_times.tell(self._rows, self._wall(), since_seconds=since_seconds, limit=left)
        return said

    # -- writing -------------------------------------------------------------------------------------------------------

    def expect(self, key: ChunkKey, chain: Chain = NO_CHAIN) -> None:
        """Record a blob that was accepted for writing; from now on `touch` moves it.

        Its first place is next to the chunk before it in `chain`, if that is held: the tail is evicted before the head.
        """
        held = self._held
        with self._lock:
            row = held.find(key)
            if not row:
                row = held.create(key, PENDING)
                before = chain.previous(key)
                if before is not None and (there := held.find(before)):
                    held.put_behind(row, there)
            self._rows.seen[row] = held.listing

    def forget_pending(self, key: ChunkKey) -> None:
        """Forget a blob that was expected and will not be written."""
        with self._lock:
            row = self._held.find(key)
            if self._rows.state[row] == PENDING:
                self._held.remove(row)

    def welcome(self, key: ChunkKey, nbytes: int) -> bool:
        """Return whether the policy admits a blob of about this size: only if it is used more than its victims."""
        sketch, held = self._sketch, self._held
        if sketch is None:
            return True
        with self._lock:
            if self._rows.state[held.find(key)] not in (FREE, PENDING):
                return True
            uses = sketch.uses(key.digest)
            tenant = held.tenants.get(key.namespace)
            victims = (held.next_victim(nbytes, anyway=True), held.next_victim_of(tenant, nbytes, anyway=True))
            return all(uses > sketch.uses(self._rows.digest(row)) for row in victims if row)

    def admit(self, key: ChunkKey, nbytes: int, chain: Chain = NO_CHAIN) -> list[Victim] | None:
        """Count a blob that is about to be written; return the victims that must be deleted first to make room.

        None if it can never fit, would evict a chunk before it in `chain`, or is being deleted. The blob counts from
        now on; `forget` it if writing fails. Pass victims, from this and other methods, to `deleted` or `kept`.
        """
        held = self._held
        quota = held.tenants.quota_of(key.namespace)
        if (self.capacity is not None and nbytes > self.capacity) or (quota is not None and nbytes > quota):
            return None
        with self._lock:
            if key.digest in held.leaving or (chain and not held.has_room_behind(chain, key, nbytes)):
                return None
            row = held.find(key)
            if row:
                state = self._rows.state[row]
                if state <= PENDING:
                    held.change(row, WRITING if state == PENDING else WRITING + state)
                held.resize(row, nbytes)
            else:
                row = held.create(key, WRITING, nbytes)
            victims = held.shrink((held.tenants.tenant(row),) if quota is not None else ())
            return held.cut(chain, victims) if chain else victims

    def deleted(self, victims: Iterable[Victim]) -> None:
        """Victims are gone from the store: a read that began before may still say that they are there."""
        with self._lock:
            for victim in victims:
                self._held.leaving.discard(victim.key.digest)
                self._held.went(victim.key.digest)

    def kept(self, victims: Iterable[Victim]) -> None:
        """Victims could not be deleted: they count again. What was removed is still not to be read."""
        for victim in victims:
            self.deleted([victim])
            fidelity = Fidelity.UNREADABLE if victim.reason == "removed" else Fidelity.UNKNOWN
            self.note(victim.key, fidelity, nbytes=victim.bytes)

    def excess(self, key: ChunkKey, chain: Chain = NO_CHAIN) -> list[Victim]:
        """Return the victims to delete now that `key` is written: until then it could not be one itself.

        It is one if meanwhile there was no room for a chunk before it in `chain`.
        """
        held = self._held
        with self._lock:
            victims: list[Victim] = []
            if chain.ends_before(key, held) and FREE < self._rows.state[row := held.find(key)] < PENDING:
                victims.append(held.evict(row, "capacity"))
            tenant = held.tenants.get(key.namespace)
            if chain and held.is_over(tenant) and held.is_behind_written(chain, key):
                return victims  # once that is over, it goes first
            return victims + held.cut(chain, held.shrink(() if tenant is None else (tenant,)))

    def note(
        self, key: ChunkKey, fidelity: Fidelity, *, nbytes: int | None = None, written: float | None = None,
        since: int | None = None,
    ) -> None:  # fmt: skip
        """Record the fidelity, size and age of a blob that is there.

        written: seconds since the epoch; default: what is known already, or now. since: a `mark` from before it was
        looked at; a blob that was forgotten meanwhile stays forgotten.
        """
        held, rows = self._held, self._rows
        with self._lock:
            gone = key.digest in held.leaving or (since is not None and held.may_be_forgotten(key, since))
            if since is not None and gone and not held.find(key):
                return
            now = self._wall()
            row = held.find(key) or held.create(key, PENDING)
            ours = rows.state[row] >= WRITING
            held.change(row, _STATES[fidelity])
            rows.seen[row] = held.listing
            held.seen(row)
            if ours:
                rows.shown[row] = now
                held.came(key.digest)
            if held.ages is not None and (written is not None or ours or not held.ages.written[row]):
                held.ages.put(row, now if written is None else written, now)
            if nbytes is not None:
                held.resize(row, nbytes)

    # -- forgetting ----------------------------------------------------------------------------------------------------

    def forget_absent(self, key: ChunkKey, *, since: int) -> None:
        """A blob was looked for and was not there.

        since: a `mark` from before; a blob that is being written, or was meanwhile, is there.
        """
        with self._lock:
            if self._held.may_be_written(key, since):
                return
            row = self._held.find(key)
            if FREE < self._rows.state[row] < PENDING:
                self._held.forget(row)
            elif not row:
                self._held.went(key.digest)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """The blobs are gone."""
        for key in keys:
            with self._lock:
                row = self._held.find(key)
                if row:
                    self._held.forget(row)
                else:
                    self._held.went(key.digest)

    def release(self, nbytes: int) -> list[Victim]:
        """Forget least recently used blobs worth `nbytes`: the store itself is full."""
        held = self._held
        victims: list[Victim] = []
        with self._lock:
            goal = held.bytes - nbytes
            while held.bytes > goal and (row := held.ring.oldest()):
                victims.append(held.evict(row, "capacity"))
        return victims

    def withdraw(self, keys: Iterable[ChunkKey]) -> list[Victim]:
        """Forget these blobs, those that are there and not being written, to be deleted."""
        held = self._held
        with self._lock:
            rows = [row for key in keys if FREE < self._rows.state[row := held.find(key)] < PENDING]
            return [held.evict(row, "removed") for row in rows]

    def expire(self, limit: int = 256) -> list[Victim]:
        """Forget up to `limit` blobs that are past their time, those written first.

        `known` counts a blob as gone at once; it is returned here up to a thousandth of the ttl later.
        """
        held = self._held
        victims: list[Victim] = []
        if held.ages is not None:
            with self._lock:
                now = self._wall()
                while len(victims) < limit and (row := held.ages.oldest(now)):
                    if self._rows.state[row] < PENDING:
                        victims.append(held.evict(row, "expired"))
                    else:
                        held.ages.remove(row)  # it is being written anew, and then is young
        return victims

    # -- all of it -----------------------------------------------------------------------------------------------------

    def names(self, prefix: str = "") -> list[ChunkKey]:
        """The keys that begin with `prefix`, least recently used first."""
        held = self._held
        found: dict[ChunkKey, None] = {}
        with self._lock:
            cursor = held.ring.open_cursor()
        step, passed = SLICE, 0
        try:
            while step:
                with self._lock:
                    some = held.ring.advance(cursor, step)
                    for key in held.matching(some, prefix):
                        found.pop(key, None)  # used since it was met: this is its place now
                        found[key] = None
                passed += len(some)
                # Who uses blobs meanwhile puts them ahead of the cursor, again and again: be quicker than that.
                step = 0 if len(some) < step else step if passed <= len(self) else 2 * step
        finally:
            with self._lock:
                held.ring.close_cursor(cursor)
        return list(found)

    def recover(self, entries: Iterable[Entry]) -> list[Victim]:
        """Take in a listing of the whole store, part by part; return the victims.

        At first, listed blobs count as older than blobs that were used since. Of blobs used in the same minute, deeper
        ones count as older, so that no head is evicted before its tail. Later, when others may have written to the
        store: blobs that are new or were used since become recent, and those that are not listed are forgotten. A time
        of 0.0 counts as unknown. Raises what `entries` raises; then no blob was moved or forgotten.
        """
        with self._lock:
            recovery = Recovery(self._held, first=not self._listed)
        listing, victims = Listing(), []
        try:
            for some in slices(entries, self._wall()):
                with self._lock:
                    news = recovery.news(some)
                listing.add(news)
            # First of all, so that nothing goes for what is gone. At the first listing too: who did not evict until now
            # may remember much that its predecessor has deleted.
            for start in range(1, self._rows.end, SLICE):
                with self._lock:
                    recovery.sweep(start, start + SLICE)
            for some in listing.in_order(newest_first=not self._listed):
                with self._lock:
                    victims += recovery.place(some)
            step = SLICE
            while step == SLICE:  # what was held already may have turned out larger
                with self._lock:
                    more = self._held.shrink(self._held.tenants.limited(), most=SLICE)
                victims += more
                step = len(more)
            self._listed = self.complete = True
        finally:
            with self._lock:
                gone = recovery.close()
            del gone
        return victims
