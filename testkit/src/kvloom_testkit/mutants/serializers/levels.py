"""A serializer with a setting that its bytes depend on, which is right: what is odd and what is wrong is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvloom import Buffers, Chunk, Config, CorruptBlobError
from kvloom_testkit.reference.serializer import RowsSerializer


def xored(blob: Buffers, mask: int) -> list[bytes]:
    table = bytes(byte ^ mask for byte in range(256))
    return [bytes(buffer).translate(table) for buffer in blob]


class LevelConfig(Config):
    """With a setting that the bytes depend on."""

    level: int = 1


class LevelledSerializer(RowsSerializer):
    """A buffer that says the level, and then the layers."""

    Config = LevelConfig

    @property
    def level(self) -> int:
        return self.config.level & 0xFF  # type: ignore[attr-defined, no-any-return]

    def level_of(self, blob: Buffers) -> int:
        if not blob or memoryview(blob[0]).nbytes != 1:
            raise CorruptBlobError("no level")
        return bytes(blob[0])[0]

    def encode(self, chunk: Chunk) -> Buffers:
        return [bytes([self.level]), *xored(super().encode(chunk), self.level)]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(xored(blob[1:], self.level_of(blob)), into)

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        found = super().layer_buffers(lengths[1:], like, params)
        return found and [[0, *(number + 1 for number in each)] for each in found]

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        super().decode_layers(xored(blob[1:], self.level_of(blob)), layers, into)

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return super().max_encoded_bytes(chunk) + 1

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        return None
