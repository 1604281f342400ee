"""The state of one operation across the tiers: its deadline, and the tiers that it has given up on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvloom.runtime import Runtime
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.types import ChunkKey

HURRIED_SHARE = 0.1
"""The part of its deadline that a tier gets for an answer, or a write, that keeps others waiting."""


class RequestContext:
    """The state of one `retrieve`, `store` or other operation.

    An operation that gets nothing from any tier for `seconds` gives up. A tier that failed it once, or was late, is
    not asked again in the same operation, so that a tier costs it one deadline at most.
    """

    def __init__(
        self, runtime: Runtime, seconds: float, *, since: int, chain: Chain = NO_CHAIN, record: RequestTrace = NO_TRACE
    ) -> None:
        """since: a mark of the invalidations, taken now. chain: the chunks of the operation. record: its trace."""
        self.record = record
        self.since = since
        self.chain = chain
        self._now = runtime.now
        self._seconds = seconds
        self.until = self._now() + seconds
        """Time to stop waiting, unless something arrives before."""
        self._kept_back = 0.0
        self.lost: set[str] = set()
        """Names of the tiers not to be asked again."""
        self.misses: dict[ChunkKey, str] = {}
        """Miss reason per key. May be absent for a read shared with another request."""
        self.given_up = False
        self.into_memory = False
        """Chunks must end up in the memory tier, so a mapped chunk of a store will not do."""
        self.device: torch.device | None = None
        """Chunks may be decoded in its memory, and are not wanted anywhere else."""
        self.copied: Callable[[], None] = lambda: None
        """Called by a store that has copied all that it has to."""
        self.stalled: Callable[[bool], None] = lambda waits: None
        """Called by a store that begins to wait for room with something left to copy, and once it does no longer."""
        self._wake: Callable[[], None] | None = None

    def progress(self) -> None:
        """Something arrived."""
        self.until = self._now() + self._seconds

    def keep_back(self, shares: int) -> None:
        """From now on no question takes the last part of the deadline, so many times `HURRIED_SHARE` of it: what
        follows has that, however silent a tier is."""
        self._kept_back = shares * HURRIED_SHARE * self._seconds

    @property
    def ask_until(self) -> float:
        """Time to stop waiting for the answer to a question."""
        return self.until - self._kept_back

    def patience(self, seconds: float) -> float:
        """The time until which to wait for a call that may take `seconds`."""
        return min(self.until, self._now() + seconds)

    def waits_for(self, wake: Callable[[], None] | None) -> None:
        """Function that `give_up` calls to have a waiting thread look at `given_up` again; None: no thread waits."""
        self._wake = wake

    @contextmanager
    def waiting_for_room(self) -> Iterator[None]:
        """A context in which a store waits, with something left to copy."""
        self.stalled(True)
        try:
            yield
        finally:
            self.stalled(False)

    def give_up(self) -> None:
        """Have the operation stop waiting. From any thread."""
        self.given_up = True
        wake = self._wake
        if wake is not None:
            wake()
