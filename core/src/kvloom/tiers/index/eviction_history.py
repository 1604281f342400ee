"""Recent evictions of a tier and their reasons, so that `kvloom why` can tell evicted from never stored.

The process that evicts keeps a ring of the last evictions, and now and then writes it into the store as one small
record. Each takes 13 bytes: the first eight of the digest, the time in seconds since the epoch, and the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from kvloom.runtime import Runtime

RECORD = "spec/evicted"
"""Name of the record, beside the blobs."""
MOST = 1 << 15
"""Number of evictions that are kept."""
REASONS = ("capacity", "quota", "expired", "removed", "corrupt")

_MAGIC = b"KVGONE01"
_HEADER = struct.Struct("<8sQdd")
"""Magic, checksum of all behind it, and from when until when this is complete, in seconds since the epoch."""
_ROW = struct.Struct("<8sIB")
_MOST_SECONDS = 1 << 37
MAX_RECORD_BYTES = _HEADER.size + MOST * _ROW.size


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction of one chunk."""

    when: float
    """Seconds since the epoch, whole ones."""
    reason: str


@dataclass(frozen=True, slots=True)
class Evictions:
    """A record that was read."""

    since: float
    until: float
    """Every eviction between these times is in it; seconds since the epoch."""
    rows: dict[bytes, Eviction]
    """The last eviction of each chunk, by the first eight bytes of its digest."""

    def of(self, digest: bytes) -> Eviction | None:
        return self.rows.get(digest[:8])


def parse(record: bytes) -> Evictions | None:
    """None if it is damaged, or of another version."""
    if len(record) < _HEADER.size or (len(record) - _HEADER.size) % _ROW.size or len(record) > MAX_RECORD_BYTES:
        return None
    magic, checksum, since, until = _HEADER.unpack_from(record)
    if not (0 <= since < _MOST_SECONDS and 0 <= until < _MOST_SECONDS):  # nor NaN
        return None
    if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(record[16:]):
        return None
    rows = {
        digest: Eviction(float(when), REASONS[reason])
        for digest, when, reason in _ROW.iter_unpack(record[_HEADER.size :])
        if reason < len(REASONS)
    }
    return Evictions(since, until, rows)


class EvictionHistory:
    """The ring of the last evictions of one tier. Any thread may note one: a few hundred nanoseconds, no I/O."""

    def __init__(self, runtime: Runtime) -> None:
        self._wall = runtime.wall
        self._lock = runtime.lock()
        self._ring = bytearray()
        self._at = 0
        """Index of the oldest, once the ring is full."""
        self._since = runtime.wall()
        self._noted, self._told = 0, -1

    @property
    def news(self) -> bool:
        """There were evictions since the last `record`, or there was no record yet."""
        return self._noted != self._told

    def note(self, digests: Iterable[bytes], reason: str) -> None:
        """Note that these chunks have left the store."""
        when, code = int(self._wall()), REASONS.index(reason)
        with self._lock:
            for digest in digests:
                self._noted += 1
                row = _ROW.pack(digest[:8], when, code)
                if len(self._ring) < MOST * _ROW.size:
                    self._ring += row
                    continue
                _, self._since, _ = _ROW.unpack_from(self._ring, self._at)
                self._ring[self._at : self._at + _ROW.size] = row
                self._at = (self._at + _ROW.size) % len(self._ring)

    def record(self) -> bytes:
        """The record to put into the store."""
        with self._lock:
            self._told = self._noted
            rows = bytes(self._ring[self._at :] + self._ring[: self._at])
            times = self._since, self._wall()
        behind = struct.pack("<dd", *times) + rows
        return _HEADER.pack(_MAGIC, xxhash.xxh3_64_intdigest(behind), *times) + rows

    def restore(self, record: bytes) -> None:
        """Continue the record of an earlier process. A damaged record is ignored."""
        found = parse(record)
        if found is None:
            return
        with self._lock:
            rows = record[_HEADER.size :] + bytes(self._ring[self._at :] + self._ring[: self._at])
            self._since = found.since
            surplus = len(rows) - MOST * _ROW.size
            if surplus > 0:
                _, self._since, _ = _ROW.unpack_from(rows, surplus - _ROW.size)
                rows = rows[surplus:]
            self._ring, self._at = bytearray(rows), 0
