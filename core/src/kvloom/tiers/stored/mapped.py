"""Chunks in the memory of a store: mapped and verified once, then leased without a copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from kvloom.contracts.observer import Event
from kvloom.contracts.storage import MappedBlob, StorageBackend
from kvloom.errors import KVLoomError
from kvloom.format import envelope
from kvloom.memory import MappedMemory
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.stored.inflight import Wanted
from kvloom.tiers.tier import Loaded
from kvloom.types import Chunk, ChunkKey

_MOST_MAPPED = 8192
"""Mapped blobs of a tier. The native library has a bound for all tiers of a process."""


class _Mapped(NamedTuple):
    memory: MappedMemory
    chunk: Chunk
    header: envelope.Header


class MappedChunks:
    """The chunks of one tier that this process has mapped.

    A blob that the store has no more is given up as soon as that is noticed, at its next use or in `sweep`: until then
    its memory is still in use.
    """

    def __init__(
        self, backend: StorageBackend, view: Callable[[MappedBlob, Wanted], tuple[envelope.Header, Chunk] | None],
        longest: Callable[[Wanted], int], expired: Callable[[envelope.Header], bool], events: EventBus,
        runtime: Runtime, *, name: str,
    ) -> None:  # fmt: skip
        """view: verifies a blob and returns the chunk in it, or None if it has to be decoded. longest: returns the size
        of the longest blob that a chunk can have. expired: whether it has outlived the tier's ttl. name: the
        tier's."""
        self._backend = backend
        self._view = view
        self._longest = longest
        self._expired = expired
        self._events = events
        self._runtime = runtime
        self._name = name
        self._lock = runtime.lock()
        self._held: OrderedDict[ChunkKey, _Mapped] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    def lease(self, wanted: Sequence[Wanted], *, doomed: Callable[[], Collection[ChunkKey]]) -> list[Loaded | None]:
        """Those that are mapped and still there, each leased. doomed: returns the keys that are being removed."""
        absent = doomed()
        found: list[Loaded | None] = []
        try:
            for one in wanted:
                mapped = None if one.key in absent else self._lease(one)
                found.append(None if mapped is None else mapped[1])
        except BaseException:
            for loaded in found:
                if loaded is not None:
                    loaded.release()
            raise
        for loaded in found:
            if loaded is not None:
                chunk = loaded.chunk
                self._events.emit(Event("retrieved", self._name, chunk.num_tokens, 1, chunk.nbytes))
        return found

    def _lease(self, wanted: Wanted) -> tuple[envelope.Header, Loaded] | None:
        key = wanted.key
        with self._lock:
            mapped = self._held.get(key)
            lease = None if mapped is None else mapped.memory.lease()
            if mapped is None or lease is None:
                return None
            self._held.move_to_end(key)
        chunk, header = mapped.chunk, mapped.header
        alike = (tuple(chunk.tensor.shape), chunk.num_tokens) == (wanted.shape, wanted.num_tokens)
        if not alike or not lease.current or self._expired(header):
            self._forget(key, mapped)
            lease.release()
            return None
        return header, Loaded(chunk, lease, float(header.description.written))

    def open(self, wanted: Wanted) -> tuple[envelope.Header, Loaded] | None:
        """Map and verify a blob that is not mapped yet, on the tier's thread; None if it has to be read, which then
        says why."""
        present = self._lease(wanted)
        if present is not None:
            return present
        try:
            blob = self._backend.map(str(wanted.key), self._longest(wanted))
        except Exception:
            return None
        if blob is None:
            return None
        view = partial(self._viewed, blob, wanted)
        memory = MappedMemory(blob, self._runtime, store=self._name, verified=lambda: view() is not None)
        viewed = None
        try:
            viewed = view()
        finally:
            if viewed is None:
                memory.drop()
        lease = memory.lease()
        if viewed is None or lease is None:
            return None
        header, chunk = viewed
        self._keep(wanted.key, _Mapped(memory, chunk, header))
        return header, Loaded(chunk, lease, float(header.description.written))

    def _viewed(self, blob: MappedBlob, wanted: Wanted) -> tuple[envelope.Header, Chunk] | None:
        try:
            return self._view(blob, wanted)
        except KVLoomError:
            return None

    def _keep(self, key: ChunkKey, mapped: _Mapped) -> None:
        with self._lock:
            surplus = [self._held.pop(key, None)]
            if self._closed:
                surplus.append(mapped)
            else:
                self._held[key] = mapped
            if len(self._held) > _MOST_MAPPED:
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
            held = list(self._held.items())
        for key, mapped in held:
            lease = mapped.memory.lease()  # so that nobody closes it meanwhile
            if lease is None:
                continue
            if not lease.current:
                self._forget(key, mapped)
            lease.release()

    def close(self) -> None:
        """Give up everything; what is being read goes on until it is released."""
        with self._lock:
            self._closed = True
            held, self._held = list(self._held.values()), OrderedDict()
        for mapped in held:
            mapped.memory.drop()
