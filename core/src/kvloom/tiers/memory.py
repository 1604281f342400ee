"""The memory tier: sealed raw chunks in the pool, handed out by lease, least recently used out first."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvloom.contracts.observer import Event
from kvloom.events import EventBus
from kvloom.memory import Block, Pool, Reservation
from kvloom.runtime import Runtime
from kvloom.tiers.base import Layout, Loaded, Tier
from kvloom.types import Chunk, ChunkKey


@dataclass(slots=True)
class _Held:
    chunk: Chunk
    block: Block
    pinned: bool = False


class MemoryTier(Tier):
    """Chunks in the process's own memory.

    Memory is made by evicting whole chunks, the least recently used first; pinned and leased ones stay. A chain is
    touched from its tail to its head, so that no head goes before its tail.
    """

    def __init__(
        self, layout: Layout, pool: Pool, events: EventBus, runtime: Runtime, *, dst_device: str = "cpu",
        keep: bool = True, name: str = "memory", deadline: float = 10.0,
    ) -> None:  # fmt: skip
        super().__init__(name, layout, dst_device=dst_device)
        self.pool = pool
        self.keep = keep
        """False: memory is only passed through on the way to and from stored tiers."""
        self.deadline = deadline
        self._events = events
        self._runtime = runtime
        self._lock = runtime.lock()
        self._held: OrderedDict[ChunkKey, _Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool in use, reservations and chunks on their way included."""
        return self.pool.used_bytes

    def find(self, keys: Sequence[ChunkKey], *, exact: bool = False) -> list[bool]:
        """Which keys are held (with `exact`: exactly)."""
        held = self._held
        with self._lock:
            if not exact:
                return [key in held for key in keys]
            return [(entry := held.get(key)) is not None and entry.chunk.exact for key in keys]

    def contains(self, key: ChunkKey) -> bool:
        return key in self._held

    def lease(self, keys: Sequence[ChunkKey]) -> list[Loaded | None]:
        """The chunks of `keys`, each leased, or None where there is none."""
        held = self._held
        with self._lock:
            entries = [held.get(key) for key in keys]
            # Leased under the lock: between the look and the lease nobody may evict.
            return [None if entry is None else Loaded(entry.chunk, entry.block.lease()) for entry in entries]

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        """Note that a chain was used: its head becomes the most recent, its tail the least."""
        move, held = self._held.move_to_end, self._held
        with self._lock:
            for key in reversed(chain):
                if key in held:
                    move(key)

    def insert(self, key: ChunkKey, chunk: Chunk, block: Block) -> Loaded:
        """Keep a sealed chunk and lease it. An exact one replaces a lossy one, never the other way round."""
        with self._lock:
            surplus: Block | None
            present = self._held.get(key)
            if present is not None and (present.chunk.exact or not chunk.exact):
                loaded, surplus = Loaded(present.chunk, present.block.lease()), block
            else:
                loaded, surplus = Loaded(chunk, block.lease()), block
                if self.keep:
                    self._held[key] = _Held(chunk, block, pinned=present is not None and present.pinned)
                    surplus = None if present is None else present.block
        if surplus is not None:
            surplus.drop()
        return loaded

    def reserve(self, nbytes: int, *, deadline: float = math.inf) -> Reservation | None:
        """Memory for `nbytes` bytes, evicting what it takes; None if everything is in use.

        The reservation must be sealed by `deadline`.
        """
        while (reservation := self.pool.reserve(nbytes, deadline=deadline)) is None:
            if nbytes > self.pool.capacity or not self._evict_one():
                return None
        return reservation

    def reserve_by(self, nbytes: int, until: float, *, deadline: float = math.inf) -> Reservation | None:
        """`reserve`, waiting until `until` for what is in use to be given back."""
        while (reservation := self.reserve(nbytes, deadline=deadline)) is None:
            if self._runtime.now() >= until or not self._may_get(nbytes):
                return None
            self.pool.wait_for_room(until)
        return reservation

    def _may_get(self, nbytes: int) -> bool:
        """Whether waiting can help: something in use, other than what is pinned, is still to be given back."""
        with self._lock:
            pinned = sum(held.block.size for held in self._held.values() if held.pinned)
        return nbytes <= self.pool.capacity - pinned and self.pool.used_bytes > pinned

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> int:
        """Keep chunks from being evicted, or allow it again; how many are held."""
        count = 0
        with self._lock:
            for key in keys:
                entry = self._held.get(key)
                if entry is not None:
                    entry.pinned = pinned
                    count += 1
        return count

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        """Forget chunks, pinned ones too; how many there were."""
        with self._lock:
            entries = [entry for key in keys if (entry := self._held.pop(key, None)) is not None]
        for entry in entries:
            entry.block.drop()
        return len(entries)

    def chunks(self) -> list[ChunkKey]:
        """The keys held, least recently used first."""
        with self._lock:
            return list(self._held)

    def _evict_one(self) -> bool:
        with self._lock:
            for key, entry in self._held.items():
                if not entry.pinned and not entry.block.leased:
                    del self._held[key]
                    break
            else:
                return False
        entry.block.drop()
        self._events.emit(Event("evicted", self.name, tokens=entry.chunk.num_tokens, chunks=1, bytes=entry.block.size))
        return True

    def _close(self) -> None:
        self.remove(self.chunks())

    def _take(self, key: ChunkKey) -> Loaded | None:
        loaded = self.lease([key])[0]
        self.touch([key])
        return loaded

    def _accept(self, key: ChunkKey, tensor: torch.Tensor) -> ChunkKey | None:
        self._check(tensor)
        if self.find([key], exact=True)[0]:
            return key
        reservation = self.reserve(self.layout.nbytes(tensor.shape))
        if reservation is None:
            return None
        chunk = self._blob_chunk(tensor, reservation.tensor(tensor.shape, self.layout.dtype))
        block = reservation.seal()
        assert block is not None
        self.insert(key, chunk, block).release()
        return key

    def _settled(self, token: ChunkKey) -> bool:
        return self.contains(token)
