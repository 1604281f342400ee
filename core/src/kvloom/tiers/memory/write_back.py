"""Writing back: a chunk that no stored tier has yet is written to one before memory evicts it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from kvloom.contracts.observer import Event
from kvloom.runtime import Lock, Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.index import MemoryEntry, MemoryIndex
from kvloom.tiers.tier import Loaded
from kvloom.types import ChunkKey

log = logging.getLogger(__name__)


class WriteBack:
    """Offers dirty chunks of the memory tier to `write`, and notes in the index what came of it."""

    write: Callable[[ChunkKey, Loaded], bool | None] | None = None
    """Writes an exact chunk to the stored tiers that lack it; None if no tier takes chunks from memory.

    Called without a lock held; must not wait, nor call the memory tier. Returns True if the chunk is being written: the
    lease is then the callee's. None: the queue is full; offer it again later. False: it will never be written. Set it
    before the first insert.
    """

    def __init__(self, tier: str, index: MemoryIndex, lock: Lock, events: EventBus, runtime: Runtime) -> None:
        """tier: the name of the memory tier. lock: the lock of the index."""
        self._tier = tier
        self._index = index
        self._lock = lock
        self._events = events
        self._now = runtime.now
        # Keys that `write` is being asked about: whoever removes one waits for the answer.
        self._offered: list[ChunkKey] = []
        self._answered = runtime.condition()

    def begin(self, key: ChunkKey, held: MemoryEntry) -> Loaded:
        """Count a chunk as clean while it is offered; `offer` what this returns. The caller holds the lock."""
        held.dirty = False
        self._offered.append(key)
        return Loaded(held.chunk, held.block.lease(), held.written, held.chain)

    def offer(self, key: ChunkKey, held: MemoryEntry, loaded: Loaded, *, leave: str) -> bool:
        """Offer a chunk; False if it has to be offered again. leave: why it is to leave memory once it is written."""
        answer = self._ask(key, loaded)
        with self._lock:
            self._offered.remove(key)
            if answer is None:
                self._index.still_dirty(key, held)
            elif answer and leave:
                self._index.leave(key, held, leave)
        with self._answered:
            self._answered.notify_all()
        return answer is not None

    def offer_once(self, key: ChunkKey, loaded: Loaded) -> None:
        """Offer a chunk that memory does not keep. It is dropped if the queue is full."""
        if self._ask(key, loaded.again()) is None:
            chunk, reason = loaded.chunk, "not kept in memory, and no room to write it"
            self._events.emit(Event("dropped", self._tier, chunk.num_tokens, 1, chunk.nbytes, reason=reason))

    def _ask(self, key: ChunkKey, loaded: Loaded) -> bool | None:
        """Return the answer of `write`; release the lease unless `write` took it."""
        assert self.write is not None
        answer = None
        try:
            answer = self.write(key, loaded)
        except Exception:  # the caller stores or retrieves something else, which must not fail for this
            log.exception("tier=%s a chunk could not be written back", self._tier)
        finally:
            if answer is not True:
                loaded.release()
        return answer

    def await_answers(self, keys: Collection[ChunkKey], seconds: float) -> None:
        """Wait, at most `seconds`, until none of `keys` is being offered."""
        if not self._offered:
            return
        until = self._now() + seconds
        with self._answered:
            while any(key in keys for key in tuple(self._offered)):
                left = until - self._now()
                if left <= 0:
                    return
                self._answered.wait(left)

    def coldest(self, cold_bytes: int) -> Callable[[], ChunkKey | None]:
        """A function that names dirty chunks, coldest first, until `cold_bytes` are clean or being written.

        It names each once: a full stored tier evicts one chunk for another, and that one is then dirty again.
        """
        seen: set[ChunkKey] = set()

        def unseen() -> ChunkKey | None:
            key = self._index.recency.coldest_dirty(cold_bytes)
            if key is None or key in seen:
                return None
            seen.add(key)
            return key

        return unseen

    def lost_below(self, keys: Iterable[ChunkKey]) -> None:
        """Mark chunks that the tier below has evicted as dirty: memory writes them again before it evicts them."""
        with self._lock:
            for key in keys:
                held = self._index.entries.get(key)
                if held is not None and held.chunk.exact and not held.dirty and not held.leaving:
                    self._index.still_dirty(key, held)
