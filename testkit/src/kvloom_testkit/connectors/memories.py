"""An engine's memory that tests can read, for the requirements of connectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kvloom import Chunk, ChunkKey, GPUConnector, KVSpec, MemoryFormat, Segment
from kvloom_testkit.chunks import room_for
from kvloom_testkit.remaking import spec_of


class EngineMemory(ABC):
    """The KV memory of an engine, with one request's KV in it and other things around. Written by who tests."""

    @property
    @abstractmethod
    def where(self) -> Mapping[str, Any]:
        """Arguments for `Engine.store` and `Engine.retrieve` that locate this request's KV."""

    @abstractmethod
    def kv(self) -> torch.Tensor:
        """A copy of the request's KV, `[planes, layers, tokens, hidden]`; for KV_PAGES, `[pages, ...]` in any form.

        Without the connector's help: it is what the connector is checked against.
        """

    @abstractmethod
    def set_kv(self, kv: torch.Tensor) -> None:
        """Put KV of the form of `kv()` into the request's memory, without the connector's help."""

    def move(self) -> bool:
        """Give the request other pages, by writing others into its page table: the same tensor, as engines do it.

        Afterwards `kv()` and `surroundings()` are those of the new pages. False if there is no page table.
        """
        return False

    def surroundings(self) -> bytes:
        """The bytes of all that belongs to others, and of what the connector only reads: page tables, other rows."""
        return b""


@dataclass(frozen=True)
class ConnectorHarness:
    """The result of `make`: a connector, and memory for it to work on."""

    connector: GPUConnector
    memory: Callable[[KVSpec, int], EngineMemory]
    """Makes an engine's memory for a model, with room for exactly this many tokens of one request."""
    page_tokens: int = 1
    """Segments are multiples of this many tokens: 1, unless the format is KV_PAGES."""

    @property
    def spec(self) -> KVSpec:
        return spec_of(self.connector)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in a request of the tests."""
        return 40 * self.page_tokens

    def engine(self, *, seed: int = 0, num_tokens: int | None = None, blank: bool = False) -> EngineMemory:
        """Memory filled with KV of any bits, or with the same byte everywhere. num_tokens: of room for it."""
        memory = self.memory(self.spec, num_tokens or self.num_tokens)
        fill(memory, seed=None if blank else seed)
        return memory

    def segments(self, *sizes: int, start: int = 0, gap: int = 0) -> list[Segment]:
        """Segments with the given numbers of pages, one after the other, with `gap` pages between them."""
        found, at, step = [], start * self.page_tokens, self.page_tokens
        for number, size in enumerate(sizes):
            key = ChunkKey(f"{'0' * 32}/-", number, number.to_bytes(2, "big") * 16)
            found.append(Segment(at, at + size * step, key))
            at += (size + gap) * step
        return found

    def chunks(self, segments: Sequence[Segment], *, poison: int = 0x5A) -> list[Chunk]:
        """Chunks for the segments, filled with `poison`."""
        return [self._chunk(segment.end - segment.start, poison) for segment in segments]

    def _chunk(self, num_tokens: int, poison: int) -> Chunk:
        tensor = torch.empty(self.connector.shape(num_tokens), dtype=self.spec.torch_dtype, device="meta")
        return room_for(Chunk(tensor, self.connector.format, num_tokens), poison)

    def part(self, kv: torch.Tensor, segment: Segment) -> torch.Tensor:
        """A segment's part of `kv()`: a view."""
        if self.connector.format is MemoryFormat.KV_BLOB:
            return kv[:, :, segment.start : segment.end]
        return kv[segment.start // self.page_tokens : segment.end // self.page_tokens]

    def indices_out_of_range(self, name: str) -> dict[str, Mapping[str, Any]]:
        """Invalid arguments that `check` should refuse, by description: an index tensor with one invalid entry that is
        read.

        A place whose entry does not change what is read is padding, and is skipped.
        """
        memory, found = self.engine(), dict[str, Mapping[str, Any]]()
        where, segments = memory.where, self.segments(self.num_tokens // self.page_tokens)
        chunk = self.read(segments, memory)[0]
        entries = where[name].flatten().tolist()
        for at in sorted({0, len(entries) // 2, len(entries) - 1}):

            def put(value: int, at: int = at) -> Mapping[str, Any]:
                tensor = where[name].clone()
                tensor.view(-1)[at] = value
                return {**where, name: tensor}

            other = self.chunks(segments)
            done(self.connector.read(segments, other, **put(entries[at - 1 if at else 1 % len(entries)])))
            if not same(other[0].tensor, chunk.tensor):
                for value in (-1, torch.iinfo(where[name].dtype).max):
                    found[f"{value} as entry {at} of {len(entries)} in {name}"] = put(value)
        return found

    def read(self, segments: Sequence[Segment], memory: EngineMemory, *, poison: int = 0x5A) -> list[Chunk]:
        """New chunks with what the connector reads; the fence was waited for."""
        chunks = self.chunks(segments, poison=poison)
        done(self.connector.read(segments, chunks, **memory.where))
        return chunks

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], memory: EngineMemory) -> None:
        """Have the connector write, and wait for the fence."""
        done(self.connector.write(segments, chunks, **memory.where))


def done(fence: Any) -> None:
    """Wait for a fence, where there is one."""
    if fence is not None:
        fence.wait()


def fill(memory: EngineMemory, *, seed: int | None) -> None:
    """Put KV of any bits into a request's memory; without a seed, of one byte everywhere."""
    memory.set_kv(filled(memory.kv(), seed))


def layer_of(chunk: Chunk, layer: int) -> Chunk:
    """A view of one layer of a chunk, `[planes, 1, tokens, hidden]`, as the core hands it to a connector."""
    return replace(chunk, tensor=chunk.tensor[:, layer : layer + 1])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: a copy, 1-D uint8."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, NaNs too."""
    return one.shape == other.shape and torch.equal(raw(one), raw(other))


@lru_cache(maxsize=16)
def _bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def filled(kv: torch.Tensor, seed: int | None) -> torch.Tensor:
    """Like `kv`, of any bits; without a seed, of one byte everywhere."""
    count = kv.numel() * kv.element_size()
    flat = torch.full((count,), 0x11, dtype=torch.uint8) if seed is None else _bytes(count, seed).clone()
    return flat.view(kv.dtype).view(kv.shape)
