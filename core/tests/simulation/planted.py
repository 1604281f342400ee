"""Bugs put into the core on purpose. The simulation is worth what it finds of them.

Each is a context manager that breaks one line of the core, as if it had been written so; `PLANTS` says as what
the oracle may report it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from kvloom import Engine, Segment
from kvloom.builtin import chunked
from kvloom.format import envelope
from kvloom.memory import MappedMemory, mapped, pool
from kvloom.pipeline import readahead, transfer
from kvloom.runtime import Batch, Call, Workers
from kvloom.tiers import invalidation, request_context
from kvloom.tiers.index import entries, ledger
from kvloom.tiers.memory import tier
from kvloom.tiers.stored import inflight, write, write_queue
from kvloom.tiers.stored import read as reader
from kvloom.tiers.tier import Loaded
from simulation import plugin
from simulation.store import Pane

Plant = Callable[[], AbstractContextManager[Any]]


class _NoDigest:
    """Equal to every other digest."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def checksum_not_checked() -> AbstractContextManager[Any]:
    """The payload of a blob is read and never compared with its digest."""
    real = envelope.parse

    def parse(data: memoryview, **options: Any) -> Any:
        header = real(data, **options)
        return header and header._replace(digests=tuple(_NoDigest() for _ in header.digests))

    return patch.object(envelope, "parse", parse)


@contextmanager
def eviction_of_a_leased_buffer() -> Iterator[None]:
    """Memory is given back when its owner drops it, whoever still reads it."""

    def drop(self: pool.Block) -> None:
        owned, self._owned = self._owned, False
        if owned:
            self._pool.free(self.start, self.size)

    def release(self: pool.Block, after: Any) -> None:
        self._leases -= 1

    with (
        patch.object(pool.Block, "leased", property(lambda self: False)),
        patch.object(pool.Block, "drop", drop),
        patch.object(pool.Block, "_release", release),
    ):
        yield


def lost_wake_up() -> AbstractContextManager[Any]:
    """A call that has ended does not say so."""

    real = Workers._settle

    def settle(self: Workers, call: Call[Any], value: Any, error: BaseException | None = None) -> None:
        call._awaited = False
        real(self, call, value, error)

    return patch.object(Workers, "_settle", settle)


def double_free() -> AbstractContextManager[Any]:
    """Two threads that evict may choose one chunk, and both give its memory back."""
    real = tier.MemoryTier._evict

    def evict(self: tier.MemoryTier, pick: Callable[[], Any], *, reason: str = "", dirty: bool = False) -> bool:
        key = pick()
        held = self._index.entries.get(key)
        if held is None or (held.dirty and not dirty):
            return real(self, pick, reason=reason, dirty=dirty)
        with self._lock:
            self._index.forget(key)
        held.block._owned = False
        self.pool.free(held.block.start, held.block.size)
        return True

    return patch.object(tier.MemoryTier, "_evict", evict)


@contextmanager
def abandoned_memory_reused_at_once() -> Iterator[None]:
    """Whoever gives up waiting for a read gives its memory back, though the read may still arrive."""
    reserved: dict[str, Any] = {}
    reserve, leave = reader._BlobBuffer.reserve, inflight.InflightReads.leave

    def remember(self: Any, num_bytes: int) -> memoryview:
        view = reserve(self, num_bytes)
        reserved[self._key] = self._reservation
        return view

    def give_back(self: inflight.InflightReads, read: inflight.InflightRead) -> None:
        leave(self, read)
        reservation = reserved.pop(str(read.key), None)
        if reservation is not None and reservation._pool is not None and not read.shares:
            reservation._pool.free(reservation.start, reservation.size)

    with (
        patch.object(inflight.InflightReads, "leave", give_back),
        patch.object(reader._BlobBuffer, "reserve", remember),
    ):
        yield


def late_write_resurrects() -> AbstractContextManager[Any]:
    """A write under way when its key was removed arrives and stays."""
    return patch.object(invalidation.Invalidations, "hit", lambda self, name, since: False)


def deadline_not_enforced() -> AbstractContextManager[Any]:
    """Whoever waits for a call waits until it is done."""

    def wait(self: Call[Any], until: float | None = None, *, stopped: Callable[[], bool] = lambda: False) -> bool:
        with self._workers._changed:
            while not self.done and not stopped():
                self._workers._changed.wait()
        return self.done

    return patch.object(Call, "wait", wait)


def deadline_for_each_call() -> AbstractContextManager[Any]:
    """Every call may take a deadline, however long the operation has waited already."""
    return patch.object(request_context.RequestContext, "patience", lambda self, seconds: self._now() + seconds)


def expired_is_served() -> AbstractContextManager[Any]:
    """Memory looks how old a chunk is when it makes room, and not when it is asked."""

    def lease(self: tier.MemoryTier, keys: Any) -> list[Loaded | None]:
        with self._lock:
            found = [self._index.entries.get(key) for key in keys]
            return [None if held is None else Loaded(held.chunk, held.block.lease(), held.written) for held in found]

    return patch.object(tier.MemoryTier, "lease", lease)


def removal_not_counted() -> AbstractContextManager[Any]:
    """A blob evicted for its salt's quota is deleted, and one of the two deleting paths does not report it."""
    return patch.object(ledger.Ledger, "forget", lambda self, keys: None)


def capacity_ignored_by_writes() -> AbstractContextManager[Any]:
    """Room is made at a restart and for nothing else."""
    return patch.object(entries.Entries, "shrink", lambda self, tenants, **limits: [])


def everybody_evicts() -> AbstractContextManager[Any]:
    """A process takes itself for the one that keeps a shared store within its bounds."""
    return patch.object(plugin.SimBackend, "hold", lambda self, name: True)


def pinned_is_evicted() -> AbstractContextManager[Any]:
    """A pin is noted, and the chunk stays among those that may go."""

    def pin(self: tier.MemoryTier, keys: Any, pinned: bool) -> int:
        return sum(self.find(list(keys)))

    return patch.object(tier.MemoryTier, "pin", pin)


def lease_forgotten() -> AbstractContextManager[Any]:
    """The first of two readers that wait for one read gives no lease back."""
    real = inflight.InflightReads._take

    def take(
        self: inflight.InflightReads, read: inflight.InflightRead, context: request_context.RequestContext
    ) -> Loaded | None:
        loaded = real(self, read, context)
        if loaded is not None and read.shares:
            loaded.again().lease.block = None
        return loaded

    return patch.object(inflight.InflightReads, "_take", take)


def restart_forgets() -> AbstractContextManager[Any]:
    """A tier lists its store at start, takes nothing in, and believes that there is nothing else."""

    def recover(self: ledger.Ledger, entries: Any) -> list[Any]:
        for _ in entries:
            pass
        self.complete = True
        return []

    return patch.object(ledger.Ledger, "recover", recover)


def layer_not_checked() -> AbstractContextManager[Any]:
    """A layer that is read by itself is never compared with its digest."""
    return patch.object(envelope.Header, "right", lambda self, number, buffer: True)


def batch_in_another_order() -> AbstractContextManager[Any]:
    """The chunks of a batch are given to those who wait in the order in which they arrive."""
    real = Batch.give

    def give(self: Batch[Any], number: int, value: Any) -> None:
        real(self, next(at for at, call in enumerate(self.calls) if not call.done), value)

    return patch.object(Batch, "give", give)


def batch_of_writes_is_one_write() -> AbstractContextManager[Any]:
    """All chunks of a batch have the outcome of the first that has one, and their memory is given back then."""
    real = write.BlobWriter.write

    def write_all(
        self: write.BlobWriter, writes: Any, told: write_queue.WriteTold, failed: list[tuple[int, str]]
    ) -> Exception | None:
        unsaid = set(range(len(writes)))

        def all_told(number: int, lost: str) -> None:
            while unsaid:
                told(unsaid.pop(), lost)

        return real(self, writes, all_told, failed)

    return patch.object(write.BlobWriter, "write", write_all)


def layers_go_on_growing() -> AbstractContextManager[Any]:
    """A mask tells what has come in each layer, not in every layer up to it."""
    return patch.object(readahead.Prefix, "cut", lambda self, chunk, layer: None)


def pieces_of_any_prompt() -> AbstractContextManager[Any]:
    """A piece's key covers the tokens of its own chunk, and not those before."""
    real = chunked.pieces

    def pieces(tokens: Any, before: Segment | None, **about: Any) -> list[Segment]:
        return real(tokens, before and before._replace(key=before.key._replace(digest=bytes(32))), **about)

    return patch.object(chunked, "pieces", pieces)


def removal_leaves_pieces() -> AbstractContextManager[Any]:
    """The pieces that a shorter prompt left of a chunk stay when the longer one is removed."""

    def remove(self: Engine, tokens: Any, *, salt: str | None = None) -> None:
        self._stack.remove([segment.key for segment in self.segments(tokens, salt=salt)])

    return patch.object(Engine, "remove", remove)


@contextmanager
def mapped_memory_not_asked_about() -> Iterator[None]:
    """All that is read from a store's memory counts as what was verified there, and much of it decays meanwhile."""
    real = Pane.current

    def current(self: Pane) -> bool:
        self._store.faults = replace(self._store.faults, decay=0.9)
        return real(self)

    def intact(leases: Sequence[object]) -> list[bool]:
        return [True] * len(leases)

    with (
        patch.object(mapped, "intact", intact),
        patch.object(transfer, "intact", intact),
        patch.object(Pane, "current", current),
    ):
        yield


def mapped_memory_closed_with_its_first_lease() -> AbstractContextManager[Any]:
    """Whoever is done reading a mapped blob closes it, whoever else reads it or will."""

    def release(self: MappedMemory) -> None:
        self._leases -= 1
        if self._owned:
            self.blob.view[:] = bytes(len(self.blob.view))

    return patch.object(MappedMemory, "_release", release)


class Planted(NamedTuple):
    """A planted bug."""

    kinds: tuple[str, ...]
    """The kinds of violation that say what it is."""
    seed: int
    """The seed to start from: a few seeds from there find it."""


PLANTS: dict[Plant, Planted] = {
    checksum_not_checked: Planted(("wrong bytes",), 5068),
    eviction_of_a_leased_buffer: Planted(("wrong bytes", "memory reused"), 2000),
    lost_wake_up: Planted(("past deadline", "deadlock", "no progress"), 5000),
    double_free: Planted(("double free", "memory reused"), 10174),
    abandoned_memory_reused_at_once: Planted(("late write",), 5061),
    late_write_resurrects: Planted(("resurrected", "served after removal"), 30024),
    deadline_not_enforced: Planted(("past deadline", "deadlock"), 2000),
    deadline_for_each_call: Planted(("past deadline",), 10060),
    expired_is_served: Planted(("served expired",), 5042),
    removal_not_counted: Planted(("accounts",), 2006),
    capacity_ignored_by_writes: Planted(("over a bound",), 5034),
    everybody_evicts: Planted(("evictors",), 5003),
    pinned_is_evicted: Planted(("lost pin",), 5046),
    restart_forgets: Planted(("lost", "accounts"), 5035),
    lease_forgotten: Planted(("leaked lease", "accounts"), 5035),
    batch_in_another_order: Planted(("wrong bytes",), 5033),
    batch_of_writes_is_one_write: Planted(("memory reused",), 2001),
    layer_not_checked: Planted(("wrong bytes",), 21004),
    layers_go_on_growing: Planted(("wrong bytes", "wrong mask"), 2000),
    pieces_of_any_prompt: Planted(("wrong bytes",), 2115),
    mapped_memory_not_asked_about: Planted(("wrong bytes",), 20066),
    mapped_memory_closed_with_its_first_lease: Planted(("wrong bytes", "memory reused"), 2018),
    removal_leaves_pieces: Planted(("served after removal", "resurrected"), 2005),
}
