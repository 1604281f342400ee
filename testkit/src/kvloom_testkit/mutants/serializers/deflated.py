"""A correct serializer that compresses, and one that allocates as much memory as a blob says."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom import Buffers, Chunk, Config, CorruptBlobError, KVSpec
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.reference.serializer import RowsSerializer


class _Deflates(RowsSerializer):
    """All rows in one stream."""

    by_layer = False

    def encode(self, chunk: Chunk) -> Buffers:
        return [zlib.compress(b"".join(super().encode(chunk)), 1)]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        if len(blob) != 1:
            raise CorruptBlobError("not one buffer")
        try:
            data = self.inflated(bytes(blob[0]), into.nbytes)
        except zlib.error as error:
            raise CorruptBlobError(str(error)) from None
        if len(data) != into.nbytes:
            raise CorruptBlobError("not as long as its chunk")
        step = into.nbytes // len(super().encode(into))
        super().decode([data[start : start + step] for start in range(0, into.nbytes, step)], into)

    def inflated(self, data: bytes, num_bytes: int) -> bytes:
        """Empty if it is not of this length."""
        inflate = zlib.decompressobj()
        inflated = inflate.decompress(data, num_bytes + 1)
        return inflated if inflate.eof and not inflate.unused_data else b""

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return chunk.nbytes + (chunk.nbytes >> 8) + 64

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        return None

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        return None


class InflatesWhateverComes(Mutant, _Deflates):
    """Inflates a blob of any size before it checks the length."""

    breaks = "S07"

    def inflated(self, data: bytes, num_bytes: int) -> bytes:
        return zlib.decompress(data)


class CompressesByOne(Mutant, _Deflates):
    """One compressor for everybody, which costs much to make; each blob ends where it is flushed."""

    breaks = "S09"

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._compressor = zlib.compressobj(1, wbits=-15)

    def encode(self, chunk: Chunk) -> Buffers:
        data = b"".join(RowsSerializer.encode(self, chunk))
        return [self._compressor.compress(data) + self._compressor.flush(zlib.Z_FULL_FLUSH)]

    def inflated(self, data: bytes, num_bytes: int) -> bytes:
        return zlib.decompressobj(wbits=-15).decompress(data, num_bytes)


class InflatesNoMoreThanItNeeds(Oddity, _Deflates):
    """A blob of zeros is a thousandth of its chunk."""
