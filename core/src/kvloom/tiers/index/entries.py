"""The blobs of one tier, with their sizes and their places in the orders of eviction.

Not thread-safe: the ledger's lock is held.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvloom.tiers.chain import Chain
from kvloom.tiers.change_log import ChangeLog
from kvloom.tiers.index.columns import PENDING, WRITING, Columns
from kvloom.tiers.index.expiry import Expiry
from kvloom.tiers.index.freshness import Freshness
from kvloom.tiers.index.lru import Links, Ring
from kvloom.tiers.index.quotas import Quotas, Tenant
from kvloom.types import ChunkKey

_KEPT = 4096
"""Number of forgotten and written blobs that are remembered."""


class Victim(NamedTuple):
    """A blob that the index has forgotten and that must be deleted from the store."""

    key: ChunkKey
    bytes: int
    reason: str
    """`"capacity"`, `"quota"`, `"expired"`; or `"removed"`: it should have been gone before."""


class Entries:
    """Rows in a ring by use, in one ring for each tenant with a quota, and in slots by age if there is a ttl."""

    def __init__(
        self, wall: Callable[[], float], *, capacity: int | None, ttl: float | None, quota: Mapping[str, int] | None
    ) -> None:
        self.capacity = capacity
        self.enforced = True
        """Evict blobs over a bound; if False, all stay and are only counted."""
        self.wall = wall
        self.rows = Columns()
        self.freshness: Freshness | None = None
        """For stores that may lose blobs without notice."""
        self.undated = False
        """A listing did not say when blobs were written."""
        self._links = Links(self.rows)
        self.ring = Ring(self.rows, self._links)
        self.tenants = Quotas(self.rows, quota)
        self.ages = None if ttl is None else Expiry(self.rows, ttl)
        self.bytes = 0
        self.count = 0
        """Number of blobs, without those that are only expected."""
        self.listing = 1
        """The number of the last listing, from 1 to 255 and again."""
        self.listing_now = False
        self._log = ChangeLog(_KEPT)
        self.mark = self._log.mark
        """Now, for `may_be_forgotten` and `may_be_written`."""
        self.leaving: set[bytes] = set()
        """Victims that are not deleted yet. Until then they are neither recorded again nor written."""
        self.gone: OrderedDict[bytes, float] = OrderedDict()
        """Times at which blobs were forgotten: a listing under way may have seen them before."""

    def find(self, key: ChunkKey) -> int:
        """The row of a key, 0 if there is none."""
        digest = key.digest
        return self.rows.find[digest[0]](digest, 0)

    def key(self, row: int) -> ChunkKey:
        return ChunkKey(self.tenants.namespaces[self.rows.space[row]].name, self.rows.depth[row], self.rows.digest(row))

    def matching(self, some: Iterable[int], prefix: str) -> Iterator[ChunkKey]:
        """The keys of those rows whose text starts with `prefix`."""
        for row in some:
            name = self.tenants.namespaces[self.rows.space[row]].name + "/"
            if name.startswith(prefix):
                yield self.key(row)
            elif prefix.startswith(name) and str(key := self.key(row)).startswith(prefix):
                yield key

    # -- one row -------------------------------------------------------------------------------------------------------

    def create(self, key: tuple[str, int, bytes], state: int, nbytes: int = 0) -> int:
        """A row for a new ChunkKey, or its fields: the most recent one."""
        row, tenant = self._enter(key, state, nbytes)
        self.ring.add_newest(row)
        if tenant.ring is not None:
            tenant.ring.add_newest(row)
        return row

    def create_oldest(self, keys: Iterable[tuple[tuple[str, int, bytes], int]], state: int) -> list[int]:
        """Rows for new ChunkKeys, or their fields, and bytes: each becomes the least recent of all."""
        made = [self._enter(key, state, nbytes) for key, nbytes in keys]
        self.ring.add_oldest([row for row, _ in made])
        for tenant in {tenant for _, tenant in made if tenant.ring is not None}:
            assert tenant.ring is not None
            tenant.ring.add_oldest([row for row, its in made if its is tenant])
        return [row for row, _ in made]

    def _enter(self, key: tuple[str, int, bytes], state: int, nbytes: int) -> tuple[int, Tenant]:
        namespace, depth, digest = key
        rows = self.rows
        row = rows.add(digest)
        rows.state[row], rows.bytes[row], rows.depth[row] = state, nbytes, depth
        rows.seen[row], rows.shown[row] = self.listing, 0.0
        self.seen(row)
        self.bytes += nbytes
        self.count += state != PENDING
        tenant = self.tenants.enter(row, namespace)
        tenant.bytes += nbytes
        return row, tenant

    def seen(self, row: int) -> None:
        """Note that the blob was just known to be there."""
        if self.freshness is not None:
            self.freshness.note(row)

    def change(self, row: int, state: int) -> None:
        """Give a row another state."""
        old = self.rows.state[row]
        self.rows.state[row] = state
        self.count += (state != PENDING) - (old != PENDING)
        if state < PENDING <= old:
            self.ring.rewind()
            ring = self.tenants.tenant(row).ring
            if ring is not None:
                ring.rewind()

    def resize(self, row: int, nbytes: int) -> None:
        more = nbytes - self.rows.bytes[row]
        self.rows.bytes[row] = nbytes
        self.bytes += more
        self.tenants.tenant(row).bytes += more

    def put_behind(self, row: int, newer: int) -> None:
        """Move a row that must not be evicted yet right before `newer`, a row of the same namespace."""
        tenant = self.tenants.tenant(row)
        for ring in (self.ring,) if tenant.ring is None else (self.ring, tenant.ring):
            ring.put_behind(row, newer)

    def renew(self, rows: Sequence[int]) -> None:
        """Mark rows as used; the last becomes the most recent. Zeros are skipped."""
        self.ring.renew(rows)
        self.tenants.renew(rows)

    def remove(self, row: int) -> ChunkKey:
        """Free a row; the key it had."""
        rows, nbytes = self.rows, self.rows.bytes[row]
        key = self.key(row)
        self.bytes -= nbytes
        self.count -= rows.state[row] != PENDING
        self._links.take_out(row)
        if self.ages is not None:
            self.ages.forget(row)
        self.tenants.leave(row, nbytes)
        rows.remove(row, key.digest)
        return key

    def forget(self, row: int) -> ChunkKey:
        """Free the row of a blob that is gone, or soon will be. A listing from before does not bring it back."""
        key = self.remove(row)
        self.went(key.digest)
        self.gone[key.digest] = self.wall()
        if len(self.gone) > _KEPT and not self.listing_now:
            self.gone.popitem(last=False)
        return key

    def went(self, digest: bytes) -> None:
        """Note that a blob is gone: a lookup or listing that began before may still have seen it."""
        if self.listing_now:
            self.gone[digest] = self.wall()
        self._log.note(("forgotten", digest))

    def came(self, digest: bytes) -> None:
        """Mark that a blob was written: a lookup that began before may have missed it."""
        self._log.note(("written", digest))

    def may_be_forgotten(self, key: ChunkKey, since: int) -> bool:
        """Return whether the blob was, or if that was long ago may have been, forgotten after the moment `since`."""
        return self._log.after(since, ("forgotten", key.digest))

    def may_be_written(self, key: ChunkKey, since: int) -> bool:
        """Return whether the blob was, or if that was long ago may have been, written after the moment `since`."""
        return self._log.after(since, ("written", key.digest))

    def evict(self, row: int, reason: str) -> Victim:
        nbytes = self.rows.bytes[row]
        return self.doomed(self.forget(row), nbytes, reason)

    def doomed(self, key: ChunkKey, nbytes: int, reason: str) -> Victim:
        """The victim for a blob that has no row."""
        self.leaving.add(key.digest)
        return Victim(key, nbytes, reason)

    # -- eviction ------------------------------------------------------------------------------------------------------

    def next_victim(self, more: int = 0, *, anyway: bool = False) -> int:
        """Return the row that is evicted first if `more` bytes come; 0 if there is room for them, or nothing may go.

        anyway: even if another process decides on evictions.
        """
        if not (self.enforced or anyway) or self.capacity is None or self.bytes + more <= self.capacity:
            return 0
        return self.ring.oldest()

    def next_victim_of(self, tenant: Tenant | None, more: int = 0, *, anyway: bool = False) -> int:
        """Return the tenant's row that is evicted first for `more` bytes; 0 if its quota has room or nothing may go."""
        if not (self.enforced or anyway) or tenant is None or tenant.ring is None or tenant.quota is None:
            return 0
        if tenant.bytes + more <= tenant.quota:
            return 0
        return tenant.ring.oldest()

    def has_room_behind(self, chain: Chain, key: ChunkKey, nbytes: int) -> bool:
        """Return whether `key` can have `nbytes` without evicting a chunk of `chain` that comes before it.

        Other threads write at the same time: each chunk before `key` that has no room yet counts as `nbytes` too. If
        there is no room, notes in the chain that it ends here.
        """
        if not self.enforced:
            return True
        if chain.ends_before(key, self):
            return False
        if self._room_behind(chain, key, nbytes, chain.has):
            return True
        # A chain that is being stored is not in order yet: order it, so that its tail is evicted before its head.
        self.renew([self.find(each) for each in chain.backwards()])
        if self._room_behind(chain, key, nbytes, partial(chain.leads_to, key)):
            return True
        chain.end_at(key, self)
        return False

    def _room_behind(self, chain: Chain, key: ChunkKey, nbytes: int, spared: Callable[[bytes], bool]) -> bool:
        own = self.find(key)
        to_come = chain.expected_before(key, self, lambda each: self.rows.state[self.find(each)] == PENDING)
        more = (1 + to_come) * nbytes - self.rows.bytes[own]
        tenant = self.tenants.get(key.namespace)
        bounds = [(self.ring, self.bytes, self.capacity)]
        if tenant is not None and tenant.ring is not None:
            bounds.append((tenant.ring, tenant.bytes, tenant.quota))
        for ring, used, limit in bounds:
            short = 0 if limit is None else used + more - limit
            for row in ring.from_oldest() if short > 0 else ():
                if spared(self.rows.digest(row)):
                    return False
                short -= self.rows.bytes[row] if row != own else 0
                if short <= 0:
                    break
            if short > 0 and (
                to_come or any(self.rows.state[self.find(each)] >= WRITING for each in chain.before(key))
            ):
                return False  # too much is being written already, and would be evicted in the order of writing
        return True

    def is_over(self, tenant: Tenant | None) -> bool:
        """Return whether the tenant is over its quota, or all blobs are over the capacity."""
        if tenant is not None and tenant.quota is not None and tenant.bytes > tenant.quota:
            return True
        return self.capacity is not None and self.bytes > self.capacity

    def is_behind_written(self, chain: Chain, key: ChunkKey) -> bool:
        """Return whether something of `chain` behind `key` is being written; if not, the chain has its places now."""
        rows = [self.find(each) for each in chain.backwards()]
        if any(self.rows.state[row] >= WRITING and self.rows.depth[row] > key.depth for row in rows):
            return True
        self.renew(rows)
        return False

    def cut(self, chain: Chain, victims: list[Victim]) -> list[Victim]:
        """Return the victims. The chain ends at those that are part of it, as later chunks may be on their way."""
        for victim in victims:
            if chain.has(victim.key.digest):
                chain.end_at(victim.key, self)
        return victims

    def shrink(self, tenants: Iterable[Tenant], *, most: float = math.inf) -> list[Victim]:
        """Forget the least recently used of tenants over their quota, then of all, until the rest fits.

        most: how many victims are enough for now.
        """
        victims: list[Victim] = []
        for tenant in tenants:
            while len(victims) < most and (row := self.next_victim_of(tenant)):
                victims.append(self.evict(row, "quota"))
        while len(victims) < most and (row := self.next_victim()):
            victims.append(self.evict(row, "capacity"))
        return victims
