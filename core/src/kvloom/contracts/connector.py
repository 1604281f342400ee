"""GPUConnector: an engine's KV to chunks and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from kvloom.contracts.component import Component
from kvloom.types import Chunk, MemoryFormat, Segment


class Fence(Protocol):
    """Tells when copies that were queued on a device are done."""

    def wait(self) -> None:
        """Block until they are. May be called again; fences may be waited for in any order."""


class GPUConnector(Component):
    """Moves KV between an engine's memory and chunks. One call moves many segments: one kernel launch, not many.

    Layers are counted from 0, and tokens from the beginning of the request.

    `where` has the arguments of `Engine.store` and `Engine.retrieve` for the connector: the engine's KV tensors, page
    tables, or whatever its docstring names. Called by one thread at a time per request, and for several requests at
    once; keep nothing of `where` for the next call, because an engine rewrites its page tables in place. Its tensors
    may be inference tensors, and the calling thread need not be in inference mode: copy under `torch.inference_mode()`.

    The segments of one call are in order and do not overlap, and there may be gaps between them. Change nothing else:
    not the engine's other memory when writing, and none of it when reading.
    """

    format: ClassVar[MemoryFormat] = MemoryFormat.KV_BLOB
    """The one representation of this connector; part of every key."""

    @property
    def representation(self) -> Mapping[str, Any]:
        """Anything else that determines a chunk's bytes (page layout, block size, ISA); part of the fingerprint."""
        return {}

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """The shape of a chunk of `num_tokens` tokens, in elements of `spec.dtype`."""
        assert self.spec is not None
        return self.spec.blob_shape(num_tokens)

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        """Raise ValueError if `where` is not something this connector can read or write `num_tokens` tokens of.

        This includes missing arguments, too little room, another dtype or shape, and unknown names.
        """

    def device(self, where: Mapping[str, Any]) -> Any:
        """The torch.device of the engine's KV, if `write` takes chunks that are in its memory; None by default.

        Called after `check`. Compressed chunks are then decoded there, where the tier's serializer can.
        """
        return None

    def ordered(self, where: Mapping[str, Any]) -> Mapping[str, Any]:
        """`where`, with a mark of what the calling thread has queued on a device so far: a move comes after it.

        Called on the engine's thread, after `check`, for moves that go on on another thread, whose current stream and
        device are others. By default `where` as it is.
        """
        return where

    @abstractmethod
    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Fence | None:
        """Copy the engine's KV of each segment into its chunk. None means done; else the fence tells."""

    @abstractmethod
    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Fence | None:
        """Copy each chunk into the engine's KV of its segment. None means done; else the fence tells."""

    def read_layer(
        self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any
    ) -> Fence | None:
        """Optional: `read` of one layer only, while later layers are still being computed.

        chunks: of this layer only, `[planes, 1, tokens, hidden]`, a view: each plane is contiguous, but they do not
        lie side by side. `check` was not called, since later layers may not be there yet: raise ValueError as it
        does, for this layer. NotImplementedError: it moves whole chunks only.
        """
        raise NotImplementedError(f"{type(self).__name__} does not move single layers")

    def write_layer(
        self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any
    ) -> Fence | None:
        """Optional: `write` of one layer only, while earlier layers are already in use.

        chunks: as for `read_layer`. Called on a thread of its own; layers come in order for each segment, but not all
        segments come in one call. Chunks all of whose layers arrive together are given to `write`, on that thread,
        before any layer of theirs is in use. Raises NotImplementedError if it moves whole chunks only.
        """
        raise NotImplementedError(f"{type(self).__name__} does not move single layers")
