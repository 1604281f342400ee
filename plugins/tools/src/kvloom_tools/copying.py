"""Copying blobs from slow stores to a faster one as they are: verified, within its capacity, beside its engines."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom import CorruptBlobError, UnreadableBlobError, envelope
from kvloom.inspection import Store
from kvloom_tools.stores import said
from kvloom_tools.verify import VerifyingSink

if TYPE_CHECKING:
    from kvloom import ChunkKey

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Copied:
    """The outcome for one blob."""

    key: ChunkKey
    outcome: str
    """copied, gone, no room, unreadable (in the tier it would go to), corrupt or failed."""
    bytes: int = 0
    reason: str = ""

    @property
    def went_wrong(self) -> bool:
        return self.outcome in ("corrupt", "failed")


class Copier:
    """Copies into one store, from several threads."""

    def __init__(self, target: Store) -> None:
        """Lists the target, if it has a capacity."""
        self._target = target
        assert target.choice.serializer is not None
        self._readable = {target.choice.serializer.type, "raw"}
        self._lock = threading.Lock()
        capacity = target.choice.capacity
        self._room = None if capacity is None else capacity - sum(entry.bytes for _, entry in target.blobs())

    def copy(self, key: ChunkKey, sources: Sequence[Store]) -> Copied:
        """Copy the blob of `key` from the first of `sources` that has a good one."""
        result = Copied(key, "gone")
        for source in sources:
            try:
                blob = _verified(source, str(key))
                if blob is None:
                    continue
                envelope.parse(blob[1], key=str(key), protection=self._target.choice.protection)
                result = self._put(key, *blob)
            except UnreadableBlobError as error:
                result = Copied(key, "unreadable", reason=str(error))
            except CorruptBlobError as error:
                result = Copied(key, "corrupt", reason=f"in {source.name}: {error}")
            except Exception as error:
                result = Copied(key, "failed", reason=said(error))
            if result.outcome in ("copied", "no room"):
                break
        return result

    def _put(self, key: ChunkKey, header: envelope.Header, blob: memoryview) -> Copied:
        about = header.description
        if about.serializer not in self._readable:
            text = f"tier {self._target.name} does not read {about.serializer!r}"
            return Copied(key, "unreadable", reason=text)
        pages = -(-len(blob) // _PAGE_BYTES) * _PAGE_BYTES
        if not self._take(pages):
            return Copied(key, "no room", reason=f"tier {self._target.name} is at its capacity")
        try:
            self._target.backend.put(str(key), [blob])
        except BaseException:
            self._take(-pages)
            raise
        return Copied(key, "copied", len(blob))

    def _take(self, num_bytes: int) -> bool:
        with self._lock:
            if self._room is None:
                return True
            if num_bytes > self._room:
                return False
            self._room -= num_bytes
            return True


def _verified(source: Store, key: str) -> tuple[envelope.Header, memoryview] | None:
    """The blob, or None. Only what is corrupt twice is called so: it may have been replaced while it was read."""
    for attempt in (1, 2):
        sink = VerifyingSink(key, mmap.mmap(-1, mmap.PAGESIZE), source.choice.protection, decrypt=False)
        try:
            if not source.backend.get_into(key, sink):
                return None
            return sink.finish(), sink.content
        except CorruptBlobError:
            if attempt == 2:
                raise
    return None
