"""Taking a listing of the store into the ledger, at start and again later: step by step, the lock held in each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvloom.tiers.holdings import Holdings, Victim
from kvloom.tiers.listing import Listed
from kvloom.tiers.rows import FREE, PENDING, UNKNOWN
from kvloom.tiers.tenants import Tenant
from kvloom.tiers.unsaid import MINUTE


class Recovery:
    """One listing. first: what it shows is older than what is held already; later ones show what others did."""

    def __init__(self, holdings: Holdings, *, first: bool) -> None:
        self._holdings = holdings
        self._first = first
        holdings.listing = holdings.listing % 255 + 1
        holdings.listing_now = True

    def news(self, some: Iterable[Listed]) -> list[Listed]:
        """What of it is to be given a place; what is said of the rest is noted."""
        return [listed for listed in some if self._is_news(listed)]

    def _is_news(self, listed: Listed) -> bool:
        holdings, rows = self._holdings, self._holdings.rows
        row = holdings.find(listed.key)
        if not row:
            return True
        noted, rows.seen[row] = rows.seen[row] == holdings.listing, holdings.listing
        if noted or rows.state[row] >= PENDING:
            return False  # we know better than a listing that began before
        holdings.resize(row, listed.bytes)
        shown = rows.shown[row]
        if shown and listed.written > shown + MINUTE:
            rows.state[row] = UNKNOWN  # somebody else has written it
            if holdings.ages is not None:
                holdings.ages.put(row, listed.written, holdings.wall())
        if shown and not self._first and listed.used > shown + MINUTE:
            return True
        rows.shown[row] = max(shown, listed.used)
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
        holdings, rows = self._holdings, self._holdings.rows
        now, ages = holdings.wall(), holdings.ages
        victims, placed = [], []
        tenants: dict[Tenant, None] = {}
        for key, nbytes, written, used in some:
            row = holdings.find(key)
            if not row:
                if holdings.gone.get(key.digest, -1.0) >= written:
                    continue  # forgotten since it was listed
                if holdings.enforced and ages is not None and written and written + ages.ttl <= now:
                    victims.append(Victim(key, nbytes, "expired"))
                    continue
                row = holdings.create(key, UNKNOWN, newest=not self._first)
                holdings.resize(row, nbytes)
                tenants[holdings.tenants.namespace(row).tenant] = None
                if ages is not None:
                    ages.put(row, written or now, now)
            rows.shown[row] = max(rows.shown[row], used)
            placed.append(row)
        if not self._first:
            holdings.renew(placed)
        return victims + holdings.shrink(tenants)

    def close(self) -> object:
        """What is to be freed, without the lock."""
        gone, self._holdings.gone = self._holdings.gone, OrderedDict()
        self._holdings.listing_now = False
        return gone
