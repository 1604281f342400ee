"""Tier: one level of the cache, addressed by chunk. Its public methods have the seed storage interface's semantics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvloom.errors import BackendError
from kvloom.forks import notify_after_fork
from kvloom.interrupts import shielded, shielded_waiting
from kvloom.memory import Lease, MappedLease
from kvloom.runtime import close_all
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.types import EXACT, Chunk, ChunkKey, MemoryFormat, TierHealth

if TYPE_CHECKING:
    from kvloom.runtime import Runtime
    from kvloom.tiers.request_context import RequestContext

Shape = Callable[[int], Sequence[int]]
"""Tokens to the shape of their chunk."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of every chunk of one engine."""

    format: MemoryFormat
    dtype: torch.dtype
    shape: Callable[[int], Sequence[int]]
    """Tokens to the shape of their chunk."""

    def nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize


class Loaded(NamedTuple):
    """A chunk in memory and the lease that keeps it there. Release it when done reading.

    Its memory is the pool's, or a store's. A store may change its memory: check `lease.intact` after reading.
    """

    chunk: Chunk
    lease: Lease | MappedLease
    written: float = 0.0
    """Time at which the KV was first stored, in seconds since the epoch; 0 if that is not known."""
    chain: Chain = NO_CHAIN
    """The chain it is part of, if it is to be written when memory evicts it."""

    def again(self) -> Loaded:
        """The same chunk with another lease."""
        return Loaded(self.chunk, self.lease.again(), self.written, self.chain)

    def release(self) -> None:
        self.lease.release()


class Tier(ABC):
    """One level of the cache. `engine.tiers[name]` has one for each tier of the config.

    put, contains, get, batched_put, batched_get and close follow the storage interface of the seed: chunks in, chunks
    out, as tensors that belong to the caller. dst_device: where `get` puts them; RuntimeError if torch knows no such
    device.

    kv_chunk: `[planes, layers, tokens, hidden]`, in the dtype of the spec: ValueError for another.

    Every method raises BackendError in a child of the process that opened the tier.
    """

    name: str
    dst_device: torch.device
    _runtime: Runtime

    def __init__(self, name: str, layout: Layout, *, dst_device: str = "cpu") -> None:
        self.name = name
        self.layout = layout
        self.dst_device = torch.device(dst_device)
        self._closed = False
        self._gone = ""
        notify_after_fork(self)
        self._with_it: list[Callable[[], None]] = []

    def after_fork_in_child(self, pid: int) -> None:
        """In a forked child: refuse every verb, and have nothing to close."""
        self._closed = True
        self._gone = self._gone or f"this tier was opened in process {pid}; open one in this process"

    def _check_here(self) -> None:
        if self._gone:
            raise BackendError(self._gone)

    # -- the seed's interface ----------------------------------------------------------------------------------------

    def put(self, key: ChunkKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Keep an exact chunk of KV_BLOB shape. `blocking`: return once it is stored, or has failed to be."""
        self.batched_put([(key, kv_chunk)], blocking=blocking)

    @abstractmethod
    def find(self, keys: Sequence[ChunkKey], context: RequestContext | None = None) -> list[bool]:
        """Return which keys the tier says it holds, asked in one go, as part of the operation `context`."""

    def find_within(self, keys: Sequence[ChunkKey], context: RequestContext, share: float) -> list[bool]:
        """`find`; a tier that asks its store takes at most this share of its deadline."""
        return self.find(keys, context)

    @abstractmethod
    def health(self) -> TierHealth:
        """State of the tier, as known here."""

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Return whether the tier says it holds `key`: a forecast, nothing is verified."""

    @shielded
    def get(self, key: ChunkKey) -> torch.Tensor | None:
        """A copy of the verified chunk on `dst_device`, or None: `[planes, layers, tokens, hidden]`, in the
        dtype of the spec.
        """
        self._check_here()
        loaded = self._take(key)
        if loaded is None:
            return None
        try:
            copy = loaded.chunk.tensor.to(self.dst_device, copy=True)
            return copy if loaded.lease.intact else None
        finally:
            loaded.release()

    @shielded
    def batched_put(self, keys_and_chunks: Iterable[tuple[ChunkKey, torch.Tensor]], blocking: bool = True) -> int:
        """Keep several chunks; how many were stored (with blocking=False: how many were accepted).

        keys_and_chunks: chunks of shape and dtype as `put` takes them.
        """
        self._check_here()
        pending = []
        for key, tensor in keys_and_chunks:
            token = self._accept(key, tensor)
            if token is not None:
                pending.append(token)
        return sum(self._settled(token) for token in pending) if blocking else len(pending)

    def batched_get(self, keys: Iterable[ChunkKey]) -> Iterator[torch.Tensor | None]:
        """`get` of each key, of its shape and dtype, as the iterator is advanced."""
        for key in keys:
            yield self.get(key)

    @shielded_waiting
    def close(self) -> None:
        """Finish what was accepted, within the deadline, and give everything back. Idempotent."""
        if not self._closed:
            self._closed = True
            close_all(self._close, *self._with_it)

    def closes_too(self, close: Callable[[], None]) -> None:
        """Have `close` called when this tier is closed."""
        self._with_it.append(close)

    # -- implemented by the two kinds of tier -------------------------------------------------------------------

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _take(self, key: ChunkKey) -> Loaded | None: ...

    @abstractmethod
    def _accept(self, key: ChunkKey, tensor: torch.Tensor) -> Any | None:
        """Begin to keep `tensor`; None if it cannot be kept."""

    @abstractmethod
    def _settled(self, token: Any) -> bool:
        """Wait for what `_accept` began; return whether it was kept."""

    def _blob_chunk(self, tensor: torch.Tensor, like: torch.Tensor) -> Chunk:
        like.copy_(tensor)
        return Chunk(like, self.layout.format, tensor.shape[2], EXACT)

    def _check(self, tensor: torch.Tensor) -> None:
        expected = list(self.layout.shape(tensor.shape[2])) if tensor.dim() == 4 else None
        if list(tensor.shape) != expected or tensor.dtype != self.layout.dtype:
            wanted = expected or list(self.layout.shape(1))
            raise ValueError(
                f"kv_chunk: expected {wanted} (planes, layers, tokens, hidden) of {self.layout.dtype}, "
                f"got {list(tensor.shape)} of {tensor.dtype}"
            )
