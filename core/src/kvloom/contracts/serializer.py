"""Serializer: a chunk to a blob and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvloom.contracts.component import Component
from kvloom.types import EXACT, Buffers, Chunk, MemoryFormat


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a batched encode or decode runs."""

    device: Any
    """A torch.device."""
    stream: Any = None
    """A torch stream, or None for the current one."""
    workspace: Any = None
    """Scratch memory that the caller owns, a uint8 tensor on `device`, or None."""


class Serializer(Component):
    """Turns chunks into blobs. Called from several threads; keeps no state between calls.

    The core frames every blob with checksums, key, shape, dtype and `params`: a serializer needs no header of its own
    and never receives bytes that fail their checksum. It must still handle any bytes, by raising `CorruptBlobError`.

    `decode` only receives the buffers, and must not depend on the instance's settings, because the blob may have been
    encoded with others. `encode` must put everything else that `decode` needs, beside shape and dtype, into the blob.

    Chunks are contiguous and of the dtype of `spec`. A serializer that cannot encode KV of `spec` raises ValueError
    when it is made.
    """

    lossless: ClassVar[bool] = True
    formats: ClassVar[frozenset[MemoryFormat]] = frozenset(MemoryFormat)
    """The formats it can encode; any other is refused when the engine opens."""
    by_layer: ClassVar[bool] = False
    """It has `layer_buffers` and `decode_layers`, so that its blobs may be read layer by layer."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters of the encoding (JSON values), stored in the header of a blob for tools that inspect a store.

        Some 15 KiB at most, with fewer than 256 lists and mappings in it.

        `layer_buffers` receives those of the blob in question; `decode`, which has the buffers, does not.
        """
        return {}

    @property
    def fidelity(self) -> str:
        """The fidelity of a chunk after encoding an exact one: `"exact"`, or this codec and its level."""
        return EXACT if self.lossless else self.type

    @abstractmethod
    def encode(self, chunk: Chunk) -> Buffers:
        """The chunk as one or several buffers, in order; 4,096 at most.

        They may be views of the chunk's memory, which does not change until the blob is written. Encoding other chunks
        must not change them. A memoryview may have any shape and format that `cast("B")` accepts.
        """

    @abstractmethod
    def decode(self, blob: Buffers, into: Chunk) -> None:
        """Fill `into`, whose shape and dtype are those of the encoded chunk, from the buffers of `encode`.

        The buffers may be bytes, bytearrays and memoryviews, the latter 1-D, contiguous and of unsigned bytes
        (`format` "B"). They may be read-only and at any address, and stay as they are. Nothing but `into` is written
        to. Raises CorruptBlobError if the buffers are not what `encode` returns for such a chunk, with whatever
        settings; UnreadableBlobError, by which the blob is kept, if they need what this process does not have.
        """

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        """The chunk as a view of `blob` (the payload, joined), if encoding is the identity; else None.

        None or CorruptBlobError for a payload of another length than the chunk's.
        `like` has the wanted shape and dtype. Its tensor is on the meta device, or it is the memory of `blob` already.
        """
        return None

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        """An upper bound of the blob's size in bytes; a longer blob counts as damaged. `chunk` may be on `meta`."""
        return chunk.nbytes * 2 + 65536

    def encode_many(self, chunks: Sequence[Chunk], place: Place | None = None) -> list[Buffers]:
        """`encode` of each; override to launch once for all."""
        return [self.encode(chunk) for chunk in chunks]

    def decode_many(self, blobs: Sequence[Buffers], into: Sequence[Chunk], place: Place | None = None) -> None:
        """`decode` of each; override to launch once for all."""
        for blob, chunk in zip(blobs, into, strict=True):
            self.decode(blob, chunk)

    def decodes_on(self, device: Any) -> bool:
        """Return whether `decode_many` fills chunks in the memory of this torch.device by the device itself. It then
        returns when that is done, and raises only then."""
        return False

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        """Optional: for each layer the numbers of the buffers that hold it; None: this blob is to be decoded whole.

        lengths: of the buffers of the blob, in bytes. like: the chunk's shape and dtype, on the meta device. params:
        those of the serializer that encoded it. A buffer that holds several layers is read for each group of layers
        that are asked for together, so that buffers of one layer each, or one plane of one, cost the least.
        """
        return None

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        """Optional: decode some adjacent layers only. Needs `layer_buffers`.

        blob: the buffers that hold these layers, each once, in the order of `encode`; each passed its checksum. layers:
        counted from 0. into: `[planes, len(layers), tokens, hidden]`, in which each layer of a plane is contiguous, but
        not the whole. Raises CorruptBlobError like `decode`; anything written by then is not used. NotImplementedError:
        it decodes whole chunks only.
        """
        raise NotImplementedError(f"{type(self).__name__} does not decode single layers")
