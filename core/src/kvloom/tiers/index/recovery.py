"""Taking a listing of the store into the ledger, at start and again later: step by step, the lock held in each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvloom.tiers.index.access_time_sync import MINUTE
from kvloom.tiers.index.columns import FREE, PENDING, UNKNOWN
from kvloom.tiers.index.entries import Entries, Victim
from kvloom.tiers.index.listing import Listed
from kvloom.tiers.index.quotas import Tenant
from kvloom.types import ChunkKey


class Recovery:
    """One listing. first: what it shows is older than what is held already; later ones show what others did."""

    def __init__(self, holdings: Entries, *, first: bool) -> None:
        self._holdings = holdings
        self._first = first
        holdings.listing = holdings.listing % 255 + 1
        holdings.listing_now = True

    def news(self, some: Sequence[Listed]) -> list[Listed]:
        """Return the listed blobs that need a row; the rest is updated."""
        find = self._holdings.rows.find
        rows = [find[listed[2][0]](listed[2], 0) for listed in some]
        return [listed for row, listed in zip(rows, some, strict=True) if not row or self._is_news(row, listed)]

    def _is_news(self, row: int, listed: Listed) -> bool:
        holdings, rows = self._holdings, self._holdings.rows
        _, _, _, nbytes, written, used = listed
        noted, rows.seen[row] = rows.seen[row] == holdings.listing, holdings.listing
        if noted or rows.state[row] >= PENDING:
            return False  # we know better than a listing that began before
        holdings.seen(row)
        holdings.resize(row, nbytes)
        shown = rows.shown[row]
        if shown and written > shown + MINUTE:
            rows.state[row] = UNKNOWN  # somebody else has written it
            if holdings.ages is not None:
                holdings.ages.put(row, written, holdings.wall())
        if shown and used > shown + MINUTE:
            return True
        rows.shown[row] = max(shown, used)
        return False

    def sweep(self, start: int, stop: int) -> None:
        """Forget those of the rows `start` to `stop` that the listing should have shown and did not."""
        state, seen = self._holdings.rows.state, self._holdings.rows.seen
        for row in range(start, min(stop, self._holdings.rows.end)):
            if seen[row] != self._holdings.listing and FREE < state[row] < PENDING:
                self._holdings.remove(row)

    def place(self, some: Sequence[Listed]) -> list[Victim]:
        """Give blobs their places in the order: from the newest at first, later from the oldest.

        Returns what is too old, and what then is too much.
        """
        holdings, ages, find = self._holdings, self._holdings.ages, self._holdings.rows.find
        gone, shown, newest, now = holdings.gone, holdings.rows.shown, not self._first, holdings.wall()
        victims: list[Victim] = []
        new: dict[bytes, Listed] = {}
        for listed in some:
            namespace, depth, digest, nbytes, written, _ = listed
            if find[digest[0]](digest, 0) or (digest in gone and gone[digest] >= written):
                continue  # known, or forgotten since it was listed
            if holdings.enforced and ages is not None and written and written + ages.ttl <= now:
                victims.append(holdings.doomed(ChunkKey(namespace, depth, digest), nbytes, "expired"))
            else:
                new[digest] = listed
        tenants = self._create(new.values(), newest=newest)
        placed: list[int] = []
        for _, _, digest, _, written, used in some:
            row = find[digest[0]](digest, 0)
            if not row:
                continue
            holdings.undated = holdings.undated or not written
            if ages is not None and digest in new:
                ages.put(row, written or now, now)
            if used > shown[row]:
                shown[row] = used
            placed.append(row)
        if newest:
            holdings.renew(placed)
        return victims + holdings.shrink(tenants)

    def _create(self, new: Iterable[Listed], *, newest: bool) -> Iterable[Tenant]:
        """Rows for what was not known; the tenants to which that is more."""
        holdings = self._holdings
        named = (((namespace, depth, digest), nbytes) for namespace, depth, digest, nbytes, _, _ in new)
        if newest:
            rows = [holdings.create(key, UNKNOWN, nbytes) for key, nbytes in named]
        else:
            rows = holdings.create_oldest(named, UNKNOWN)
        return dict.fromkeys(map(holdings.tenants.tenant, rows)) if holdings.tenants.limits else ()

    def close(self) -> object:
        """Return the objects to free, outside the lock."""
        gone, self._holdings.gone = self._holdings.gone, OrderedDict()
        self._holdings.listing_now = False
        return gone
