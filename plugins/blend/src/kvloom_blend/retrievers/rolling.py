"""Finds blocks of known texts anywhere in a prompt, by a rolling hash at every offset.

A block's hash is `sum(token[j] * base**j)` modulo two primes below 2**31, the bases secret and drawn for each process:
colliding texts cannot be prepared. The hash only finds candidates: a block is confirmed by its key, a SHA-256 of its
tokens.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

PRIMES = (2_147_483_647, 2_147_483_629)
Hashes = npt.NDArray[np.int64]


class RollingHash:
    """Hashes of all windows of `width` tokens, in a few passes over the tokens."""

    def __init__(self, width: int, bases: tuple[int, int] | None = None) -> None:
        """bases: for tests; secret ones by default."""
        self.width = width
        self._bases = bases or (_secret(PRIMES[0]), _secret(PRIMES[1]))
        self._powers = [np.ones(1, dtype=np.int64) for _ in PRIMES]
        self._inverses = [np.ones(1, dtype=np.int64) for _ in PRIMES]

    def windows(self, tokens: npt.NDArray[np.int32]) -> Hashes:
        """The hash of each window, by its first token: `[max(tokens - width + 1, 0)]`."""
        count = len(tokens) - self.width + 1
        if count <= 0:
            return np.zeros(0, dtype=np.int64)
        low, high = (self._windows(tokens, which, count) for which in (0, 1))
        return low | high << 31

    def _windows(self, tokens: npt.NDArray[np.int32], which: int, count: int) -> Hashes:
        prime = PRIMES[which]
        powers = _grown(self._powers, which, len(tokens), self._bases[which])
        inverses = _grown(self._inverses, which, count, pow(self._bases[which], -1, prime))
        terms = tokens.astype(np.int64) % prime * powers[: len(tokens)] % prime
        # A sum of 2**32 terms below 2**31 fits; and so many tokens no prompt has.
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(terms)])
        return (sums[self.width :] - sums[:count]) % prime * inverses[:count] % prime


def _grown(tables: list[Hashes], which: int, size: int, base: int) -> Hashes:
    """`base**0, base**1, ...` modulo the prime, at least `size` of them: doubled, so that it is a few products."""
    table, prime = tables[which], PRIMES[which]
    while len(table) < size:
        step = pow(base, len(table), prime)
        table = np.concatenate([table, table * step % prime])
    tables[which] = table
    return table


def _secret(prime: int) -> int:
    return secrets.randbelow(prime - 2_000_000) + 1_000_000
