"""Chunks in the memory of a store: mapped and verified once, then leased without a copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from kvloom.contracts.observer import Event
from kvloom.contracts.storage import MappedBlob, StorageBackend
from kvloom.format import envelope
from kvloom.memory import MappedMemory, Mappings, lease_mapped
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.stored.inflight import Wanted
from kvloom.tiers.stored.read import Viewed
from kvloom.tiers.tier import Loaded
from kvloom.types import Chunk, ChunkKey

_MOST_MAPPED = 8192
"""Mapped blobs of a tier. The native library has a bound for all tiers of a process."""


class _Mapped(NamedTuple):
    memory: MappedMemory
    chunk: Chunk
    header: envelope.Header
    wanted: Wanted
    """The request that it was mapped for."""


class MappedChunks:
    """The chunks of one tier that this process has mapped.

    A blob that the store has no more is given up as soon as that is noticed, at its next use or in `sweep`: until then
    its memory is still in use.
    """

    def __init__(
        self, backend: StorageBackend, view: Callable[[Sequence[tuple[MappedBlob, Wanted]]], Sequence[Viewed | None]],
        longest: Callable[[Wanted], int], outlived: Callable[[float], bool], events: EventBus,
        runtime: Runtime, *, name: str,
    ) -> None:  # fmt: skip
        """view: `BlobReader.mapped`. longest: returns the size of the longest blob that a chunk can have. outlived:
        returns whether KV first stored at a time has expired for the tier. name: the tier's."""
        self._backend = backend
        self._view = view
        self._longest = longest
        self._outlived = outlived
        self._events = events
        self._mappings = Mappings(name, backend.current_many, runtime)
        self._name = name
        self._lock = runtime.lock()
        self._held: OrderedDict[ChunkKey, _Mapped] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    def maps(self, keys: Iterable[ChunkKey]) -> bool:
        """Return whether all keys are mapped, as far as is known without a lock or the store."""
        return bool(self._held) and all(map(self._held.__contains__, keys))

    def lease(
        self, wanted: Sequence[Wanted], *, doomed: Callable[[], Collection[ChunkKey]], all_or_none: bool = False
    ) -> list[Loaded | None]:
        """Those that are mapped and still there, each leased. doomed: returns the keys that are being removed.

        all_or_none: unless all of them are, none is leased.
        """
        found = self._lease(wanted, doomed())
        leased = [one[1] for one in found if one is not None]
        if all_or_none and len(leased) < len(wanted):
            for loaded in leased:
                loaded.release()
            return [None] * len(wanted)
        if leased:
            tokens, nbytes = sum(one.chunk.num_tokens for one in leased), sum(one.chunk.nbytes for one in leased)
            self._events.emit(Event("retrieved", self._name, tokens, len(leased), nbytes))
        return [None if one is None else one[1] for one in found]

    def _lease(
        self, wanted: Sequence[Wanted], absent: Collection[ChunkKey] = ()
    ) -> list[tuple[envelope.Header, Loaded] | None]:
        with self._lock:
            there = [
                (number, one, mapped)
                for number, one in enumerate(wanted)
                if one.key not in absent and (mapped := self._held.get(one.key)) is not None
            ]
            for _, one, _ in there:
                self._held.move_to_end(one.key)
            # Leased under the lock: what is held here is not given up before it was taken out.
            leases = lease_mapped([mapped.memory for _, _, mapped in there])
        found: list[tuple[envelope.Header, Loaded] | None] = [None] * len(wanted)
        try:
            current = self._mappings.current([mapped.memory for _, _, mapped in there])
            for (number, one, mapped), lease, here in zip(there, leases, current, strict=True):
                written = mapped.header.description.written
                if here and mapped.wanted == one and not self._outlived(written):
                    found[number] = mapped.header, Loaded(mapped.chunk, lease, float(written))
                else:
                    self._forget(one.key, mapped)
                    lease.release()
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return found

    def open(self, wanted: Sequence[Wanted]) -> list[tuple[envelope.Header, Loaded] | None]:
        """Map and verify blobs that are not mapped yet, on the tier's thread; None for one that has to be read, which
        then says why."""
        found = self._lease(wanted)
        lacking = [number for number, one in enumerate(found) if one is None]
        if not lacking:
            return found
        try:
            blobs = self._backend.map_many([(str(wanted[n].key), self._longest(wanted[n])) for n in lacking])
        except Exception:
            return found
        opened: list[tuple[int, _Mapped]] = []
        try:
            mapped = [(number, blob) for number, blob in zip(lacking, blobs, strict=True) if blob is not None]
            viewed = self._view([(blob, wanted[number]) for number, blob in mapped])
            for (number, blob), view in zip(mapped, viewed, strict=True):
                if view is not None:
                    memory = MappedMemory(blob, self._mappings, verified=partial(self._right, blob, wanted[number]))
                    opened.append((number, _Mapped(memory, view[1], view[0], wanted[number])))
        except BaseException:
            opened = []
            for present in found:
                if present is not None:
                    present[1].release()
            raise
        finally:
            kept = {id(one.memory.blob) for _, one in opened}
            for each in blobs:
                if each is not None and id(each) not in kept:
                    each.close()
        leases = lease_mapped([one.memory for _, one in opened])
        self._keep([one for _, one in opened])
        for (number, one), lease in zip(opened, leases, strict=True):
            found[number] = one.header, Loaded(one.chunk, lease, float(one.header.description.written))
        return found

    def _right(self, blob: MappedBlob, wanted: Wanted) -> bool:
        return self._view([(blob, wanted)])[0] is not None

    def _keep(self, some: Sequence[_Mapped]) -> None:
        surplus: list[_Mapped | None] = []
        with self._lock:
            for mapped in some:
                surplus.append(self._held.pop(mapped.wanted.key, None))
                if self._closed:
                    surplus.append(mapped)
                else:
                    self._held[mapped.wanted.key] = mapped
            while len(self._held) > _MOST_MAPPED:
                surplus.append(self._held.popitem(last=False)[1])
        for one in surplus:
            if one is not None:
                one.memory.drop()

    def _forget(self, key: ChunkKey, mapped: _Mapped) -> None:
        with self._lock:
            if self._held.get(key) is not mapped:
                return
            del self._held[key]
        mapped.memory.drop()

    def sweep(self) -> None:
        """Give up what the store has no more."""
        with self._lock:
            wanted = [mapped.wanted for mapped in self._held.values()]
        while wanted:  # a few at a time: others wait for the lock
            some, wanted = wanted[:256], wanted[256:]
            for found in self._lease(some):
                if found is not None:
                    found[1].release()

    def close(self) -> None:
        """Give up everything; what is being read goes on until it is released."""
        with self._lock:
            self._closed = True
            held, self._held = list(self._held.values()), OrderedDict()
        for mapped in held:
            mapped.memory.drop()
