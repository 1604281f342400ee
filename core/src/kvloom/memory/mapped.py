"""Memory of a store that this process has mapped: leased like the pool's, and closed once nobody reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvloom.contracts.storage import MappedBlob
from kvloom.memory.device_pages import Done
from kvloom.memory.pool import Lease
from kvloom.runtime import Runtime


class Mappings:
    """The mapped blobs of one store."""

    def __init__(self, store: str, current: Callable[[Sequence[MappedBlob]], Sequence[bool]], runtime: Runtime) -> None:
        """store: the name of the tier that has them. current: `StorageBackend.current_many`."""
        self.store = store
        self.lock = runtime.lock()
        """Held while leases are counted."""
        self._current = current

    def current(self, memories: Sequence[MappedMemory]) -> list[bool]:
        """Return for each whether the store still has the blob, and nothing else was read; False if it cannot say."""
        if not memories:
            return []
        try:
            answers = [*self._current([memory.blob for memory in memories])]
        except Exception:
            answers = []
        if len(answers) == len(memories):
            return answers
        return [False] if len(memories) == 1 else [self.current([memory])[0] for memory in memories]


class MappedMemory:
    """A mapped blob: owned by the holder of this object, read through leases."""

    __slots__ = ("_leases", "_owned", "blob", "home", "verified")

    def __init__(self, blob: MappedBlob, home: Mappings, *, verified: Callable[[], bool]) -> None:
        """verified: reads all of it and returns whether its checksums are right."""
        self.blob = blob
        self.home = home
        self.verified = verified
        self._leases = 0
        self._owned = True

    def lease(self) -> MappedLease | None:
        """The right to read it; None if its owner has given it up and it may be closed."""
        with self.home.lock:
            if not self._owned and not self._leases:
                return None
            self._leases += 1
        return MappedLease(self)

    def drop(self) -> None:
        """Give it up: it is closed with its last lease."""
        with self.home.lock:
            owned, self._owned = self._owned, False
            idle = owned and not self._leases
        if idle:
            self.blob.close()

    def _release(self) -> None:
        with self.home.lock:
            self._leases -= 1
            idle = not self._leases and not self._owned
        if idle:
            self.blob.close()

    def _only_gone(self) -> bool:
        """Return whether the store has it no more, and everything read so far was the verified blob: looks again."""
        try:
            return self.blob.gone() and self.verified()
        except Exception:
            return False


class MappedLease:
    """The right to read a mapped blob. Release it; it does not expire."""

    __slots__ = ("memory", "store")

    def __init__(self, memory: MappedMemory) -> None:
        self.memory: MappedMemory | None = memory
        """None once it is released."""
        self.store = memory.home.store
        """The tier in whose memory it is."""

    @property
    def intact(self) -> bool:
        """Everything read so far was the verified blob. One that has left the store is verified again."""
        return intact([self])[0]

    def again(self) -> MappedLease:
        """Another lease on the same memory."""
        lease = None if self.memory is None else self.memory.lease()
        assert lease is not None, "leased again after its release"
        return lease

    def release(self, after: Done | None = None) -> None:
        """Give it back. Twice is fine. after: None, as no device reads such memory later than its caller."""
        assert after is None
        memory, self.memory = self.memory, None
        if memory is not None:
            memory._release()


def lease_mapped(memories: Sequence[MappedMemory]) -> list[MappedLease]:
    """Lease blobs of one store that have not been given up: `MappedMemory.lease` of each, for less."""
    if not memories:
        return []
    with memories[0].home.lock:
        for memory in memories:
            assert memory._owned or memory._leases, "leased after it was given up"
            memory._leases += 1
    return [MappedLease(memory) for memory in memories]


def intact(leases: Sequence[Lease | MappedLease]) -> list[bool]:
    """`intact` of each, for less."""
    found = [True] * len(leases)
    mapped: dict[Mappings, dict[int, MappedMemory]] = {}
    for number, lease in enumerate(leases):
        if isinstance(lease, MappedLease):
            if lease.memory is None:
                found[number] = False
            else:
                mapped.setdefault(lease.memory.home, {})[number] = lease.memory
    for home, memories in mapped.items():
        for (number, memory), current in zip(memories.items(), home.current([*memories.values()]), strict=True):
            found[number] = current or memory._only_gone()
    return found
