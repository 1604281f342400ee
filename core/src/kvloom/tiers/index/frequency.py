"""Recent frequency of use of keys, in a few bytes a row: a count-min sketch, as in TinyLFU (arXiv:1512.00727).

It is made of pages, each a small sketch for some of the keys, so that growing and ageing never take long: it grows by a
page at a time, as linear hashing does, and its counters are halved a page at a time. A key is a digest of SHA-256, so
its bytes are its hashes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_WIDTH = 4096
"""Counters in each of a page's four rows, and for how many keys a page is."""
_MOST = 255
_USES_PER_ROW = 10
_HALF = bytes(count // 2 for count in range(256))
_HASHES = struct.Struct("<I4H")


class Sketch:
    """Counters of uses, halved again and again so that what was used long ago counts little."""

    def __init__(self) -> None:
        self._pages = [bytearray(4 * _WIDTH)]
        self._mask = 0
        """Bits of a hash that choose a page, as far as there are so many pages: else one bit less."""
        self._uses = 0
        self._aged = 1
        """Number of pages halved in this round; if it is all of them, there is nothing to do."""

    def add(self, digests: Iterable[bytes], *, rows: int) -> None:
        """Count a use of each digest. rows: how many keys are kept; after ten times as many uses, counts are halved."""
        pages, mask, hashes = self._pages, self._mask, _HASHES.unpack_from
        count = len(pages)
        uses = 0
        for digest in digests:
            uses += 1
            page, a, b, c, d = hashes(digest)
            page &= mask
            counters = pages[page if page < count else page & mask >> 1]
            a, b, c, d = a & 4095, b & 4095 | 4096, c & 4095 | 8192, d & 4095 | 12288
            least = min(counters[a], counters[b], counters[c], counters[d])
            if least < _MOST:  # only the smallest are raised: the others count other keys too
                for place in (a, b, c, d):
                    if counters[place] == least:
                        counters[place] = least + 1
        self._uses += uses
        self._tend(rows)

    def uses(self, digest: bytes) -> int:
        """About how often it was used, rather too often than too seldom."""
        page, a, b, c, d = _HASHES.unpack_from(digest)
        page &= self._mask
        counters = self._pages[page if page < len(self._pages) else page & self._mask >> 1]
        least: int = min(
            counters[a & 4095], counters[b & 4095 | 4096], counters[c & 4095 | 8192], counters[d & 4095 | 12288]
        )
        return least

    def _tend(self, rows: int) -> None:
        """Do one step of maintenance: halve a page, or add one."""
        if self._aged < len(self._pages):
            self._pages[self._aged] = self._pages[self._aged].translate(_HALF)
            self._aged += 1
        elif self._uses >= _USES_PER_ROW * max(rows, _WIDTH // 4):
            self._uses = 0
            self._pages[0] = self._pages[0].translate(_HALF)
            self._aged = 1
        elif rows > _WIDTH * len(self._pages):
            self._grow()

    def _grow(self) -> None:
        """Split the keys of one page over two, which both begin with its counters."""
        if len(self._pages) > self._mask:
            self._mask = 2 * self._mask + 1
        self._pages.append(bytearray(self._pages[len(self._pages) & self._mask >> 1]))
        self._aged = len(self._pages)
