"""What was removed lately, so that a read or write that was under way at the time does not bring it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_KEPT = 256


class Purges:
    """The last removals of a tier, in order. Only the verbs of operators add to it."""

    def __init__(self) -> None:
        self._matches: deque[tuple[int, Callable[[str], bool]]] = deque(maxlen=_KEPT)
        self._count = 0

    def mark(self) -> int:
        """Now: pass it to `hit` later."""
        return self._count

    def add(self, match: Callable[[str], bool]) -> None:
        """Everything whose name matches is being removed."""
        self._count += 1
        self._matches.append((self._count, match))

    def hit(self, name: str, since: int) -> bool:
        """Whether `name` was removed after `since`; if that is too long ago to tell, yes."""
        if since == self._count:
            return False
        if self._count - since > _KEPT:
            return True
        return any(match(name) for number, match in tuple(self._matches) if number > since)
