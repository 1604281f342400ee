"""Memory of a store that this process has mapped: leased like the pool's, and closed once nobody reads it."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.contracts.storage import MappedBlob
from kvloom.memory.device_pages import Done
from kvloom.runtime import Runtime


class MappedMemory:
    """A mapped blob: owned by the holder of this object, read through leases."""

    __slots__ = ("_leases", "_lock", "_owned", "blob", "store", "verified")

    def __init__(self, blob: MappedBlob, runtime: Runtime, *, store: str, verified: Callable[[], bool]) -> None:
        """store: the name of its tier. verified: reads all of it and returns whether its checksums are right."""
        self.blob = blob
        self.verified = verified
        self.store = store
        self._lock = runtime.lock()
        self._leases = 0
        self._owned = True

    @property
    def current(self) -> bool:
        """The store still has the blob, and nothing else was read. False too if it cannot say."""
        try:
            return self.blob.current()
        except Exception:
            return False

    @property
    def intact(self) -> bool:
        """Everything read so far was the verified blob. One that has left the store is verified again."""
        try:
            return self.current or (self.blob.gone() and self.verified())
        except Exception:
            return False

    def lease(self) -> MappedLease | None:
        """The right to read it; None if its owner has given it up and it may be closed."""
        with self._lock:
            if not self._owned and not self._leases:
                return None
            self._leases += 1
        return MappedLease(self)

    def drop(self) -> None:
        """Give it up: it is closed with its last lease."""
        with self._lock:
            owned, self._owned = self._owned, False
            idle = owned and not self._leases
        if idle:
            self.blob.close()

    def _release(self) -> None:
        with self._lock:
            self._leases -= 1
            idle = not self._leases and not self._owned
        if idle:
            self.blob.close()


class MappedLease:
    """The right to read a mapped blob. Release it; it does not expire."""

    __slots__ = ("_memory", "store")

    def __init__(self, memory: MappedMemory) -> None:
        self._memory: MappedMemory | None = memory
        self.store = memory.store
        """The tier in whose memory it is."""

    @property
    def current(self) -> bool:
        """The store still has the blob."""
        return self._memory is not None and self._memory.current

    @property
    def intact(self) -> bool:
        """Everything read so far was the verified blob."""
        return self._memory is not None and self._memory.intact

    def again(self) -> MappedLease:
        """Another lease on the same memory."""
        lease = None if self._memory is None else self._memory.lease()
        assert lease is not None, "leased again after its release"
        return lease

    def release(self, after: Done | None = None) -> None:
        """Give it back. Twice is fine. after: None, as no device reads such memory later than its caller."""
        assert after is None
        memory, self._memory = self._memory, None
        if memory is not None:
            memory._release()
