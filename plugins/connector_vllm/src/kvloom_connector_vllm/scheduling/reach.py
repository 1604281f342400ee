"""The longest prefix at whose end every group of layers has what the next token attends to. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .plan import Group

Ends = Callable[[int], int]
"""The end of the pieces that are held of a chunk, from its beginning on; the chunk's first token if there are none."""


def reach(group: Group, local: int, most: int, held: Sequence[object], ends: Ends, *, unit: int) -> int:
    """The longest prefix of `local` to `most` tokens behind which this group can go on.

    local: tokens that the engine has itself. held: by chunk, what is true if it is held whole. unit: tokens that
    prefixes are multiples of, as `local` and `most` are.
    """
    return _all(group, local, most, held, ends) if group.full else _last(group, local, most, held, ends, unit)


def _all(group: Group, local: int, most: int, held: Sequence[object], ends: Ends) -> int:
    chunk = local // group.chunk_tokens
    while chunk < len(held) and held[chunk]:
        chunk += 1
    end = chunk * group.chunk_tokens
    return max(local, min(most, end if end >= most else ends(chunk)))


def _last(group: Group, local: int, most: int, held: Sequence[object], ends: Ends, unit: int) -> int:
    """From the longest down; no chunk is looked at twice."""
    size, tokens = group.chunk_tokens, most

    def whole(chunk: int) -> bool:
        return chunk < len(held) and bool(held[chunk])

    while tokens > local:
        needed = max(local, group.first(tokens))
        chunk, part = divmod(tokens, size)
        behind = chunk * size
        if part and behind + part > needed and not whole(chunk):
            end = ends(chunk) if behind <= needed or whole(chunk - 1) else behind
            if end < tokens:
                tokens = max(end, behind) // unit * unit
                continue
        while behind > needed and whole(behind // size - 1):
            behind -= size
        if behind <= needed:
            return tokens
        tokens = (behind - 1) // unit * unit  # where this chunk is attended to, only its pieces may help
    return local
