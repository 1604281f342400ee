"""The ledger: what a stored tier is believed to hold, its size, and who goes first when it is full."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvloom.runtime import Runtime
from kvloom.types import Entry


class Fidelity(enum.Enum):
    """What is known of a stored blob's content."""

    PENDING = "pending"
    """Accepted for writing: it has its place in the order, but is not there yet."""
    UNKNOWN = "unknown"
    EXACT = "exact"
    LOSSY = "lossy"
    UNREADABLE = "unreadable"
    """Intact, but not for this process."""


@dataclass(slots=True)
class _Row:
    nbytes: int
    fidelity: Fidelity


class Ledger:
    """Bytes and recency of the blobs of one tier. O(1) for each blob; no I/O."""

    def __init__(self, capacity: int | None, runtime: Runtime) -> None:
        self.capacity = capacity
        self.complete = False
        """The store was listed to its end: what is not here was not there."""
        self._lock = runtime.lock()
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._rows)

    def known(self, keys: Sequence[str]) -> list[Fidelity | None]:
        """What is known of each key; None if it is not believed to be there."""
        rows = self._rows
        with self._lock:
            found = [rows.get(key) for key in keys]
            return [None if row is None or row.fidelity is Fidelity.PENDING else row.fidelity for row in found]

    def touch(self, chain: Sequence[str]) -> None:
        """Note that a chain was used: its head becomes the most recent, its tail the least."""
        rows, move = self._rows, self._rows.move_to_end
        with self._lock:
            for key in reversed(chain):
                if key in rows:
                    move(key)

    def expect(self, key: str) -> None:
        """A blob was accepted for writing: from now on `touch` gives it its place among the others."""
        with self._lock:
            if key not in self._rows:
                self._rows[key] = _Row(0, Fidelity.PENDING)

    def forget_pending(self, name: str) -> None:
        """A write that was expected will not come."""
        with self._lock:
            row = self._rows.get(name)
            if row is not None and row.fidelity is Fidelity.PENDING and not row.nbytes:
                del self._rows[name]

    def forget_absent(self, name: str) -> None:
        """A blob was looked for and is not there, unless it is being written."""
        with self._lock:
            row = self._rows.get(name)
            if row is not None and row.fidelity is not Fidelity.PENDING:
                del self._rows[name]
                self._bytes -= row.nbytes

    def admit(self, key: str, nbytes: int) -> list[tuple[str, int]] | None:
        """Count a blob that is about to be written; the (key, bytes) that must be deleted first to make room.

        None if it can never fit. The blob counts from now on; `forget` it if writing fails.
        """
        with self._lock:
            if self.capacity is not None and nbytes > self.capacity:
                return None
            row = self._rows.setdefault(key, _Row(0, Fidelity.PENDING))
            self._bytes += nbytes - row.nbytes
            row.nbytes = nbytes
            return self._shrink(spare=key)

    def note(self, key: str, fidelity: Fidelity, *, nbytes: int | None = None) -> None:
        """Record what was found out about a blob that is there."""
        with self._lock:
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = _Row(0, fidelity)
            row.fidelity = fidelity
            if nbytes is not None:
                self._bytes += nbytes - row.nbytes
                row.nbytes = nbytes

    def forget(self, keys: Iterable[str]) -> None:
        """The blobs are gone."""
        with self._lock:
            for key in keys:
                row = self._rows.pop(key, None)
                if row is not None:
                    self._bytes -= row.nbytes

    def names(self) -> list[str]:
        """The keys, least recently used first."""
        with self._lock:
            return list(self._rows)

    def recover(self, entries: Iterable[Entry]) -> list[tuple[str, int]]:
        """Take in a listing of the store, older than everything used since; what is over capacity, to be deleted.

        Of blobs written at about the same time, deeper ones count as older, so that no head goes before its tail.
        """
        listed = sorted(entries, key=lambda entry: (int(entry.modified) // 60, -_depth(entry.key)), reverse=True)
        with self._lock:
            for entry in listed:
                if entry.key not in self._rows:
                    self._rows[entry.key] = _Row(entry.bytes, Fidelity.UNKNOWN)
                    self._rows.move_to_end(entry.key, last=False)
                    self._bytes += entry.bytes
            victims = self._shrink()
            self.complete = True
        return victims

    def _shrink(self, *, spare: str = "") -> list[tuple[str, int]]:
        """Forget the least recently used until the rest fits; what was forgotten."""
        victims: list[tuple[str, int]] = []
        while self.capacity is not None and self._bytes > self.capacity:
            key, row = self._rows.popitem(last=False)
            if key == spare:
                self._rows[key] = row  # it is what room is made for
                continue
            self._bytes -= row.nbytes
            if row.fidelity is not Fidelity.PENDING:
                victims.append((key, row.nbytes))
        return victims


def _depth(key: str) -> int:
    depth = key.rpartition("/")[2].partition("-")[0]
    return int(depth) if depth.isdigit() else 0
