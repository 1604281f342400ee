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
    """Where a batched encode or decode runs."""

    device: Any
    """A torch.device."""
    stream: Any = None
    """A torch stream, or None for the current one."""
    workspace: Any = None
    """Scratch memory that the caller owns, a uint8 tensor on `device`, or None."""


class Serializer(Component):
    """Turns chunks into blobs. Called from several threads; keeps no state between calls.

    The core frames every blob with checksums, key, shape, dtype and `params`: a serializer needs no header of its own
    and is never handed bytes that fail their checksum. It must still survive any bytes: raise `CorruptBlobError`.
    """

    lossless: ClassVar[bool] = True
    formats: ClassVar[frozenset[MemoryFormat]] = frozenset(MemoryFormat)
    """What it can encode; anything else is refused when the engine opens."""

    @property
    def params(self) -> Mapping[str, Any]:
        """What `decode` needs to know and the blob should say (JSON values)."""
        return {}

    @property
    def fidelity(self) -> str:
        """What becomes of an exact chunk: `"exact"`, or this codec and its level."""
        return EXACT if self.lossless else self.type

    @abstractmethod
    def encode(self, chunk: Chunk) -> Buffers:
        """The chunk as one or several buffers, in order.

        They may be views of the chunk's memory, which stays as it is until the blob is written.
        """

    @abstractmethod
    def decode(self, blob: Buffers, into: Chunk) -> None:
        """Fill `into`, whose shape and dtype are those of the encoded chunk, from the buffers of `encode`.

        Raises CorruptBlobError if the buffers are not what `encode` returns for such a chunk.
        """

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        """The chunk as a view of `blob` (the payload, joined), if encoding is the identity; else None.

        `like` has the wanted shape and dtype, on the meta device.
        """
        return None

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        """An upper bound of the blob's size in bytes; what is longer is taken for damage. `chunk` may be on `meta`."""
        return chunk.nbytes * 2 + 65536

    def encode_many(self, chunks: Sequence[Chunk], place: Place | None = None) -> list[Buffers]:
        """`encode` of each; override to launch once for all."""
        return [self.encode(chunk) for chunk in chunks]

    def decode_many(self, blobs: Sequence[Buffers], into: Sequence[Chunk], place: Place | None = None) -> None:
        """`decode` of each; override to launch once for all."""
        for blob, chunk in zip(blobs, into, strict=True):
            self.decode(blob, chunk)

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        """Optional: `decode` of some layers only."""
        raise NotImplementedError(f"{type(self).__name__} does not decode single layers")
