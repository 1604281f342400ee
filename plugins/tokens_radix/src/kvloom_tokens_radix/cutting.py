"""Cuts the part of a sequence that is not known yet."""

from __future__ import annotations

from typing import NamedTuple


class Rules(NamedTuple):
    """Rules for the ends of segments."""

    chunk_tokens: int
    """Every multiple of this is the end of a segment, so no segment is longer."""
    min_tokens: int = 16
    """No segment is shorter, unless chunks are."""
    align_tokens: int = 1
    """Every end within a chunk is a multiple of this."""

    def allow(self, start: int, end: int) -> bool:
        """Return whether a segment may reach from `start` to `end`."""
        in_one_chunk = start // self.chunk_tokens == (end - 1) // self.chunk_tokens
        return in_one_chunk and (end % self.align_tokens == 0 or end % self.chunk_tokens == 0)


def planned(rules: Rules, *, reach: int, shared: int, total: int) -> list[int]:
    """The ends of the segments of a sequence behind token `reach`, ascending.

    reach: number of tokens that are cut already. shared: leading tokens in common with a known sequence. total: tokens
    of the sequence. Segments end at every chunk's end, where the sequence leaves the known ones, and where it ends
    itself. An end within a chunk moves to the left until `min_tokens` are left behind it, and is no end if that makes a
    short one.
    """
    step, least, align = rules
    ends: list[int] = []
    at = reach
    for stop in (shared, total):
        if stop <= at:
            continue
        whole = range((at // step + 1) * step, stop + 1, step)
        if whole:
            ends.extend(whole)
            at = whole[-1]
        inner = min(stop, (stop // step + 1) * step - least) // align * align
        if inner - at >= least:
            ends.append(inner)
            at = inner
    return ends
