"""Token ids of prompts, the same every time."""

from __future__ import annotations

_LEAST, _COUNT = 3, 500
"""Of the tiny models' 512 tokens; those below are special."""


def tokens(seed: int, count: int) -> list[int]:
    """`count` token ids that follow from `seed`; two seeds have no long beginning in common."""
    state, found = seed * 2_654_435_761 % 2**32, []
    for _ in range(count):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        found.append((state >> 16) % _COUNT + _LEAST)
    return found
