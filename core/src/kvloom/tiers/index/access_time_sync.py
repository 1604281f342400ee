"""Uses that the store has not been told of yet, so that it shows the right order after a restart.

Told of every use, a store would do little else. So a blob is told of again only after some time; but never may the
store show a chain's head as older than what comes behind it, or after a restart heads would go before their tails.
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
    """The chains that were used last, each once: a bounded number. What falls out is told when it is used again."""

    def __init__(self) -> None:
        self._chains: OrderedDict[bytes, tuple[float, tuple[ChunkKey, ...]]] = OrderedDict()
        """By the last digest, with the time of use."""
        self._keys = 0

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, chain: Sequence[ChunkKey], now: float) -> None:
        """A chain was used."""
        if chain:
            self._drop(chain[-1].digest)
            self._chains[chain[-1].digest] = (now, tuple(chain))
            self._keys += len(chain)
            while self._keys > _MOST_KEYS and len(self._chains) > 1:
                self._keys -= len(self._chains.popitem(last=False)[1][1])

    def tell(self, rows: Columns, now: float, *, since_seconds: float, limit: int) -> list[ChunkKey]:
        """Return the uses of one chain to tell the store now, heads first; they count as told."""
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
