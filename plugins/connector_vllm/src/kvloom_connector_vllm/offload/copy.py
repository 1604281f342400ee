"""A worker's job for the scheduler: copies between its pages and its slots, without asking a tier."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvloom import one_line
from kvloom.device import StreamEvent, device_of

from .. import native
from ..paged.bounce import BounceBuffers
from ..staging import Staging

log = logging.getLogger(__name__)

_BUFFER_BYTES = 64 << 20
"""On a device, of each direction."""


@dataclass(frozen=True, slots=True)
class Order:
    """Slots for the keys of a job, from the scheduler to every worker."""

    ticket: int
    slots: tuple[int, ...]
    groups: tuple[int, ...]
    """The group of each slot's key; a group's keys are in the order of the sequence."""
    nonces: tuple[str, ...]
    """The nonce of each rank's file, so that no other file is read."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The engine's blocks of a job: those of the first group, then of the next."""

    ids: Sequence[int]
    group_sizes: Sequence[int]
    first: Sequence[int]
    """First block of each group, counted in the sequence, in blocks."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of a group that follow each other, with pages of one size."""

    rows: np.ndarray[Any, Any]
    """int64 `[layers, 4]`: address, stride of a block in bytes, 0, 0."""
    at: int
    """The place of their pages in a slot's part for a block."""
    width: int
    blocks: int
    """Number of blocks."""

    @classmethod
    def of(cls, pages: Sequence[torch.Tensor]) -> list[_Layers]:
        found, at = [], 0
        for width, some in itertools.groupby(pages, lambda page: int(page.shape[1])):
            layers = list(some)
            rows = np.array([(page.data_ptr(), page.stride(0), 0, 0) for page in layers], dtype=np.int64)
            found.append(cls(rows, at, width, min(page.shape[0] for page in layers)))
            at += width * len(layers)
        return found


class Copier:
    """One rank's copies, in the order in which the scheduler asked for them. Loads of other blocks and slots than those
    of all copies under way may run beside them.

    groups: for each group of layers its pages, uint8 `[num_blocks, page_bytes]`, all on one device. A key stands for
    `chunk_blocks` blocks; in its slot a block's pages follow each other, then those of the next block, then zeros.
    """

    def __init__(
        self, staging: Staging, groups: Sequence[Sequence[torch.Tensor]], *, chunk_blocks: int, rank: int
    ) -> None:
        self._staging, self._groups = staging, groups
        self._chunk_blocks, self._rank = chunk_blocks, rank
        self._lock = threading.Lock()
        self._expected: dict[int, tuple[int, int]] = {}
        """By slot: how many copies are to come, and the ticket of the last."""
        self._block_bytes = [sum(page.shape[1] for page in pages) for pages in groups]
        self._layers = [_Layers.of(pages) for pages in groups]
        device = next((page.device for pages in groups for page in pages), torch.device("cpu"))
        self._run = native.runner(device) if all(p.stride(1) == 1 for pages in groups for p in pages) else None
        self._device = device_of(device)
        self._buffers = None if self._device is None else BounceBuffers(self._device, _BUFFER_BYTES)
        self._unpin: weakref.finalize[Any, Any] | None = None
        if self._device is not None:
            code = self._device.pin(staging.data)
            if code:
                log.warning("the staging could not be pinned (error %d): copies are slower", code)
            else:  # before the memory goes, with whoever forgets to close this
                self._unpin = weakref.finalize(self, self._device.unpin, staging.data)
                self._unpin.atexit = False

    def close(self) -> None:
        if self._buffers is not None:
            self._buffers.close()
        if self._unpin is not None:
            self._unpin()

    def expect(self, order: Order) -> None:
        """Note a copy that is to come, in the order of the scheduler. A slot is stamped once all its copies are over,
        whichever ends last; one that was not noted stamps for itself."""
        with self._lock:
            for slot in order.slots:
                self._expected[slot] = (self._expected.get(slot, (0, 0))[0] + 1, order.ticket)

    @torch.inference_mode()
    def store(self, order: Order, blocks: Blocks, ready: StreamEvent | None = None) -> int:
        """Copy pages to slots; return the number of bytes. Never raises: slots that fail are stamped so.

        ready: the copies wait for this event, if the pages are on a device.
        """
        copied = 0
        for group, slots, ids in self._parts(order, blocks):
            try:
                if len(ids) != len(slots) * self._chunk_blocks or blocks.first[group] % self._chunk_blocks:
                    raise ValueError("the engine has only a part of these chunks")
                self._move(group, slots, 0, ids, ready, into_slots=True)
                self._staging.data[slots, self._chunk_blocks * self._block_bytes[group] :] = 0
                self._stamp(slots, order.ticket)
                copied += len(ids) * self._block_bytes[group]
            except Exception as error:
                log.warning("KV is not kept: %s: %s", type(error).__name__, one_line(error))
                self._stamp(slots, -order.ticket)
        return copied

    @torch.inference_mode()
    def load(self, order: Order, blocks: Blocks, ready: StreamEvent | None = None) -> int:
        """Copy slots to pages; return the number of bytes. Raises if it cannot, because the engine must not use such
        pages. ready: as for `store`."""
        if order.nonces[self._rank] != self._staging.nonce:
            raise RuntimeError("the scheduler names slots of another worker")
        copied = 0
        for group, slots, ids in self._parts(order, blocks):
            skip = blocks.first[group] % self._chunk_blocks
            if len(slots) != -(-(skip + len(ids)) // self._chunk_blocks):
                raise RuntimeError(f"{len(slots)} chunks do not go with {len(ids)} blocks")
            self._move(group, slots, skip, ids, ready, into_slots=False)
            self._stamp(slots, order.ticket)
            copied += len(ids) * self._block_bytes[group]
        return copied

    def _parts(self, order: Order, blocks: Blocks) -> Iterator[tuple[int, list[int], list[int]]]:
        """Each group that has keys, with their slots and the engine's blocks."""
        begin = 0
        for group, size in enumerate(blocks.group_sizes):
            ids = [int(block) for block in blocks.ids[begin : begin + size]]
            begin += size
            slots = [slot for slot, other in zip(order.slots, order.groups, strict=True) if other == group]
            if slots or ids:
                yield group, slots, ids

    def _move(
        self, group: int, slots: list[int], skip: int, ids: list[int], ready: StreamEvent | None, *,
        into_slots: bool,
    ) -> None:  # fmt: skip
        """Blocks into slots one after another, or back; done on return. skip: blocks of the first slot before them."""
        if not ids:
            return
        if min(ids) < 0 or any(max(ids) >= some.blocks for some in self._layers[group]):
            raise IndexError(f"blocks {min(ids)} to {max(ids)}: there are not so many")
        if min(slots) < 0 or max(slots) >= self._staging.slots:
            raise IndexError(f"slots {min(slots)} to {max(slots)}: there are {self._staging.slots}")
        tensors, of = [], []
        for number, slot in enumerate(slots):
            first = number * self._chunk_blocks
            begin, end = max(skip, first), min(skip + len(ids), first + self._chunk_blocks)
            size = self._block_bytes[group]
            tensors.append(self._staging.data[slot, (begin - first) * size : (end - first) * size])
            of.append(ids[begin - skip : end - skip])
        near = partial(self._near, group, of, into_slots)
        if self._buffers is None:
            near(0, tensors)
        else:
            go = self._buffers.read if into_slots else self._buffers.write
            go(tensors, near, ready).wait()

    def _near(
        self, group: int, of: Sequence[list[int]], into_slots: bool, first: int, parts: Sequence[torch.Tensor]
    ) -> object:
        """Between the pages and parts of slots on their device, of the slots from number `first` on."""
        some_ids, size = of[first : first + len(parts)], self._block_bytes[group]
        do = operator.call if self._buffers is None else self._buffers.device.queue
        if self._run is None:
            for part, ids in zip(parts, some_ids, strict=True):
                rows = part.view(len(ids), size)
                do(partial(self._by_torch, group, rows, ids, into_slots=into_slots))
            return None
        blocks = np.array([block for ids in some_ids for block in ids], dtype=np.int64)
        begin = np.concatenate(
            [part.data_ptr() + np.arange(len(ids)) * size for part, ids in zip(parts, some_ids, strict=True)]
        )
        held = []
        for some in self._layers[group]:
            chunks = np.zeros((len(blocks), 4), dtype=np.int64)
            chunks[:, 0], chunks[:, 2], chunks[:, 3] = begin + some.at, some.width, np.arange(len(blocks))
            width, to_pages = some.width, not into_slots
            tables = native.Tables.of_blocks(some.rows, chunks, blocks, width=width, to_pages=to_pages)
            held.append(do(partial(self._run, tables)))
        return held

    def _by_torch(self, group: int, rows: torch.Tensor, ids: list[int], *, into_slots: bool) -> None:
        """rows: uint8 `[blocks, bytes]` on the pages' device."""
        at, numbers = 0, torch.tensor(ids, device=rows.device)
        for pages in self._groups[group]:
            width = pages.shape[1]
            column = rows[:, at : at + width]
            if into_slots:
                column.copy_(pages.index_select(0, numbers))
            else:
                pages.index_copy_(0, numbers, column)
            at += width

    def _stamp(self, slots: list[int], ticket: int) -> None:
        """ticket: negative for slots that failed."""
        with self._lock:
            for slot in slots:
                left, last = self._expected.pop(slot, (1, 0))
                if left > 1:
                    self._expected[slot] = (left - 1, last)
                else:
                    self._staging.stamps[slot] = ticket if abs(ticket) >= last else last
