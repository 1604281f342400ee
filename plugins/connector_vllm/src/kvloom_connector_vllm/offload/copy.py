"""A worker's job for the scheduler: copies between its pages and its slots, without asking a tier."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import native
from ..staging import Staging

log = logging.getLogger(__name__)


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
    """Layers of a group that follow each other, with pages of one size, in host memory."""

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
    """One rank's copies, on one thread, in the order in which the scheduler asked for them.

    groups: for each group of layers its pages, uint8 `[num_blocks, page_bytes]`. A key stands for `chunk_blocks`
    blocks; in its slot a block's pages follow each other, then those of the next block, then zeros.
    """

    def __init__(
        self, staging: Staging, groups: Sequence[Sequence[torch.Tensor]], *, chunk_blocks: int, rank: int
    ) -> None:
        self._staging, self._groups = staging, groups
        self._chunk_blocks, self._rank = chunk_blocks, rank
        self._block_bytes = [sum(page.shape[1] for page in pages) for pages in groups]
        self._native = native.processor()
        near = [all(page.device.type == "cpu" and page.stride(1) == 1 for page in pages) for pages in groups]
        self._layers = [_Layers.of(pages) if here else None for pages, here in zip(groups, near, strict=True)]

    @torch.inference_mode()
    def store(self, order: Order, blocks: Blocks) -> int:
        """Pages into slots; how many bytes. Never raises: what could not be copied is stamped as failed."""
        copied = 0
        for group, slots, ids in self._parts(order, blocks):
            try:
                if len(ids) != len(slots) * self._chunk_blocks or blocks.first[group] % self._chunk_blocks:
                    raise ValueError("the engine has only a part of these chunks")
                self._move(group, slots, list(range(len(ids))), ids, into_slots=True)
                self._staging.data[slots, self._chunk_blocks * self._block_bytes[group] :] = 0
                self._synchronize(group)
                self._stamp(slots, order.ticket)
                copied += len(ids) * self._block_bytes[group]
            except Exception as error:
                log.warning("KV is not kept: %s: %s", type(error).__name__, error)
                self._stamp(slots, -order.ticket)
        return copied

    @torch.inference_mode()
    def load(self, order: Order, blocks: Blocks) -> int:
        """Copy slots to pages; return the number of bytes. Raises if it cannot, because the engine must not use such
        pages."""
        if order.nonces[self._rank] != self._staging.nonce:
            raise RuntimeError("the scheduler names slots of another worker")
        copied = 0
        for group, slots, ids in self._parts(order, blocks):
            skip = blocks.first[group] % self._chunk_blocks
            if len(slots) != -(-(skip + len(ids)) // self._chunk_blocks):
                raise RuntimeError(f"{len(slots)} chunks do not go with {len(ids)} blocks")
            self._move(group, slots, list(range(skip, skip + len(ids))), ids, into_slots=False)
            self._synchronize(group)
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

    def _move(self, group: int, slots: list[int], places: list[int], ids: list[int], *, into_slots: bool) -> None:
        """places: of each block, counted in blocks from the beginning of the first slot."""
        layers = self._layers[group]
        if self._native is not None and layers is not None:
            self._move_at_once(self._native, group, layers, slots, places, ids, into_slots=into_slots)
            return
        data = self._staging.data
        for part in range(self._chunk_blocks):
            chosen = [index for index, place in enumerate(places) if place % self._chunk_blocks == part]
            if not chosen:
                continue
            rows = torch.tensor([slots[places[index] // self._chunk_blocks] for index in chosen])
            at = part * self._block_bytes[group]
            for pages in self._groups[group]:
                width = pages.shape[1]
                numbers = torch.tensor([ids[index] for index in chosen], device=pages.device)
                column = data[:, at : at + width]
                if into_slots:
                    column.index_copy_(0, rows, pages.index_select(0, numbers).to(data.device))
                else:
                    pages.index_copy_(0, numbers, column.index_select(0, rows).to(pages.device))
                at += width

    def _move_at_once(
        self, library: ctypes.CDLL, group: int, layers: Sequence[_Layers], slots: list[int], places: list[int],
        ids: list[int], *, into_slots: bool,
    ) -> None:  # fmt: skip
        """The same without a copy in between: `index_select` would make one."""
        if not ids:
            return
        data, place, blocks = self._staging.data, np.array(places), np.array(ids, dtype=np.int64)
        if blocks.min() < 0 or any(blocks.max() >= some.blocks for some in layers):
            raise IndexError(f"blocks {blocks.min()} to {blocks.max()}: there are not so many")
        rows = np.array(slots)[place // self._chunk_blocks]
        if rows.min() < 0 or rows.max() >= len(data):
            raise IndexError(f"slots {rows.min()} to {rows.max()}: there are {len(data)}")
        begin = data.data_ptr() + rows * data.stride(0) + place % self._chunk_blocks * self._block_bytes[group]
        chunks = np.zeros((len(ids), 4), dtype=np.int64)
        chunks[:, 3] = np.arange(len(ids))
        for some in layers:
            chunks[:, 0], chunks[:, 2] = begin + some.at, some.width
            native.copy_blocks(library, some.rows, chunks, blocks, width=some.width, to_pages=not into_slots)

    def _synchronize(self, group: int) -> None:
        pages = self._groups[group]
        if pages and pages[0].is_cuda:
            torch.cuda.current_stream(pages[0].device).synchronize()

    def _stamp(self, slots: list[int], ticket: int) -> None:
        self._staging.stamps[slots] = ticket
