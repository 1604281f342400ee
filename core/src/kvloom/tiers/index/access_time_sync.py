"""Access times that are still to be written to the store, which gives the order of use after a restart.

A store that was told of every use would do little else, so the time of a blob is written again only after a while. But
a chain's head must never look older than the chunks behind it, or heads would be evicted first after a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvloom.tiers.index.columns import PENDING, Columns
from kvloom.types import ChunkKey

MINUTE = 60.0
"""Times of one minute count as the same: within it, order is by depth."""

_MOST_KEYS = 32768


class AccessTimeSync:
    """The most recently used chains, a bounded number. One that falls out is written after its next use."""

    def __init__(self) -> None:
        self._chains: OrderedDict[bytes, tuple[float, tuple[ChunkKey, ...]]] = OrderedDict()
        """By the last digest, with the time of use."""
        self._keys = 0

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, chain: Sequence[ChunkKey], now: float) -> None:
        """Note that a chain was used."""
        if chain:
            self._drop(chain[-1].digest)
            self._chains[chain[-1].digest] = (now, tuple(chain))
            self._keys += len(chain)
            while self._keys > _MOST_KEYS and len(self._chains) > 1:
                self._keys -= len(self._chains.popitem(last=False)[1][1])

    def tell(self, rows: Columns, now: float, *, since_seconds: float, limit: int) -> list[ChunkKey]:
        """The keys of one chain whose times are to be written now, heads first; they count as written."""
        if not self._chains:
            return []
        last, (used, chain) = self._chains.popitem(last=False)
        self._keys -= len(chain)
        due: list[tuple[int, ChunkKey]] = []
        later, newest = False, 0.0
        for key in reversed(chain):
            row = rows.find[key.digest[0]](key.digest, 0)
            if rows.state[row] >= PENDING:
                later = True  # once it is written, its head may have to be told of again
            elif row:
                shown = rows.shown[row]
                if shown // MINUTE < newest or (shown < used and shown + since_seconds <= now):
                    due.append((row, key))
                    shown = now
                later = later or shown < used
                newest = max(newest, shown // MINUTE)
        due.reverse()
        for row, _ in due[:limit]:
            rows.shown[row] = now
        if later or len(due) > limit:
            self._chains[last] = (used, chain)
            self._keys += len(chain)
        return [key for _, key in due[:limit]]

    def _drop(self, last: bytes) -> None:
        _, chain = self._chains.pop(last, (0.0, ()))
        self._keys -= len(chain)
