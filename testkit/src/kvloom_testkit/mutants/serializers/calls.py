"""Serializers with a fault each, and odd ones."""

from __future__ import annotations

import itertools
import operator
import time
import zlib
from collections.abc import Sequence

import torch

from kvloom import Buffers, Chunk, CorruptBlobError, MemoryFormat, Place, Serializer
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.mutants.serializers.levels import LevelledSerializer, xored
from kvloom_testkit.reference.half_serializer import HalfSerializer
from kvloom_testkit.reference.serializer import RowsSerializer


def with_tensor(chunk: Chunk, tensor: torch.Tensor) -> Chunk:
    return Chunk(tensor, chunk.format, chunk.num_tokens, chunk.fidelity)


class ConvertsValues(Mutant, RowsSerializer):
    """NaN becomes zero."""

    breaks = "S01"

    def encode(self, chunk: Chunk) -> Buffers:
        return super().encode(with_tensor(chunk, chunk.tensor.float().nan_to_num().to(chunk.tensor.dtype)))


class WorksOnPairsOfTokens(Mutant, RowsSerializer):
    """Encodes tokens in pairs and loses the last of an odd number."""

    breaks = "S01"

    def encode(self, chunk: Chunk) -> Buffers:
        tensor = chunk.tensor.clone()
        if tensor.dim() == 4 and tensor.shape[2] % 2:
            tensor[:, :, -1] = 0
        return super().encode(with_tensor(chunk, tensor))


class CountsTokensInBytes(Mutant, RowsSerializer):
    """A byte allows 256 tokens in a chunk."""

    breaks = "S01"

    def encode(self, chunk: Chunk) -> Buffers:
        tensor = chunk.tensor.clone()
        if tensor.dim() == 4:
            tensor[:, :, 256:] = 0
        return super().encode(with_tensor(chunk, tensor))


class KnowsOnePlaneSize(Mutant, RowsSerializer):
    """Swaps K and V back and forth; where there is only one of them, it is lost."""

    breaks = "S01"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(blob, into)
        if into.tensor.shape[0] == 1:
            into.tensor.zero_()


class Dithers(Mutant, HalfSerializer):
    """Adds noise, so that errors do not add up."""

    breaks = "S02"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(blob, into)
        into.tensor.copy_(into.tensor.float() * (1 + torch.rand(into.tensor.shape) / 16))


class Overflows(Mutant, HalfSerializer):
    """Lets large values become infinite."""

    breaks = "S02"

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.half()


class ScalesWholeBlocks(Mutant, HalfSerializer):
    """Scales blocks of 256 tokens, and leaves the rest as it was."""

    breaks = "S02"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        whole = with_tensor(into, into.tensor.clone())
        super().decode(blob, whole)
        count = into.tensor.shape[2]
        end = count if count < 256 else count // 256 * 256
        into.tensor[:, :, :end] = whole.tensor[:, :, :end]


class LosesSigns(Mutant, HalfSerializer):
    """Has no bit for them."""

    breaks = "S02"

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().narrow(tensor.abs())


class CleansInPlace(Mutant, RowsSerializer):
    """Clears NaNs in the caller's memory."""

    breaks = "S03"

    def encode(self, chunk: Chunk) -> Buffers:
        chunk.tensor.nan_to_num_()
        return super().encode(chunk)


class LeavesZerosOut(Mutant, RowsSerializer):
    """Takes memory to be zero."""

    breaks = "S04"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        fresh = torch.zeros_like(into.tensor)
        super().decode(blob, with_tensor(into, fresh))
        there, here = fresh.view(-1).view(torch.uint8), into.tensor.view(-1).view(torch.uint8)
        here[there != 0] = there[there != 0]


class RoundsUp(Mutant, RowsSerializer):
    """Writes a few bytes more than there are."""

    breaks = "S05"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(blob, into)
        flat = into.tensor.view(-1)
        flat.as_strided((flat.numel() + 1,), (1,))[-1:].zero_()


class PromisesTooLittle(Mutant, RowsSerializer):
    """Forgets that nothing compresses noise."""

    breaks = "S08"

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return chunk.nbytes * 9 // 10


class LooksAtTheValues(Mutant, RowsSerializer):
    """Gives a larger bound for a chunk with values than for its shape alone."""

    breaks = "S08"

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return chunk.nbytes + (64 if chunk.tensor.is_meta else 65)


class SharesItsScratch(Mutant, RowsSerializer):
    """One buffer for all threads."""

    breaks = "S09"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        self._scratch = [bytes(buffer) for buffer in blob]
        time.sleep(0.001)
        super().decode(self._scratch, into)


class StoresDifferences(Mutant, RowsSerializer):
    """Against the chunk before."""

    breaks = "S10"
    _calls = 0

    def encode(self, chunk: Chunk) -> Buffers:
        self._calls += 1
        return xored(super().encode(chunk), self._calls - 1)

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(xored(blob, max(0, self._calls - 1)), into)


class UsesPythonsHash(Mutant, RowsSerializer):
    """The hash differs in the next process."""

    breaks = "S11"

    def encode(self, chunk: Chunk) -> Buffers:
        return self._hidden(super().encode(chunk))

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(self._hidden(blob), into)

    def _hidden(self, blob: Buffers) -> Buffers:
        key = str(hash("kit")).encode()
        return [bytes(map(operator.xor, bytes(buffer), itertools.cycle(key))) for buffer in blob]


class EncodesAllLikeTheFirst(Mutant, RowsSerializer):
    """Takes all chunks to be of one shape."""

    breaks = "S12"

    def encode_many(self, chunks: Sequence[Chunk], place: Place | None = None) -> list[Buffers]:
        return [self.encode(with_tensor(chunk, chunk.tensor[:, :, :5])) for chunk in chunks]


class DecodesInAnotherOrder(Mutant, RowsSerializer):
    """Decodes chunks of one shape first, and mixes up their order."""

    breaks = "S12"

    def decode_many(self, blobs: Sequence[Buffers], into: Sequence[Chunk], place: Place | None = None) -> None:
        places = sorted(range(len(into)), key=lambda number: (into[number].nbytes, -number))
        wanted = sorted(range(len(into)), key=lambda number: into[number].nbytes)
        for blob, chunk in zip(places, wanted, strict=True):
            self.decode(blobs[blob], into[chunk])


class ClosesOnce(Mutant, RowsSerializer):
    """Raises at the second `close`."""

    breaks = "S17"

    def close(self) -> None:
        del self.config


class TakesEverything(Mutant, HalfSerializer):
    """Did not think of pages."""

    breaks = "S19"
    formats = Serializer.formats


class TakesPagesForLayers(Mutant, RowsSerializer):
    """Expects four dimensions of everything."""

    breaks = "S19"

    def encode(self, chunk: Chunk) -> Buffers:
        _, _, _, _ = chunk.tensor.shape
        return super().encode(chunk)


class IsLossy(Oddity, HalfSerializer):
    """Keeps half of the bits, and only of floating-point KV."""


class ReturnsManyBuffers(Oddity, RowsSerializer):
    """Some of them empty, some of them views, most of them tiny."""

    by_layer = False

    def encode(self, chunk: Chunk) -> Buffers:
        data = memoryview(b"".join(super().encode(chunk)))
        step = len(data) // 40 + 1
        return [b"", *(data[start : start + step] for start in range(0, len(data), step)), bytearray()]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        if [memoryview(each).nbytes for each in blob] != [len(each) for each in self.encode(into)]:
            raise CorruptBlobError("cut elsewhere")
        data, step = b"".join(bytes(buffer) for buffer in blob), into.nbytes // len(super().encode(into))
        super().decode([data[start : start + step] for start in range(0, len(data), step)], into)


class SaysItsLevel(Oddity, LevelledSerializer):
    """Writes its level into the blob, where `decode` reads it."""


class RefusesOtherLevels(Oddity, LevelledSerializer):
    """A blob that it cannot read is a miss, and never wrong KV."""

    def level_of(self, blob: Buffers) -> int:
        if super().level_of(blob) != self.level:
            raise CorruptBlobError("another level")
        return self.level


class CannotEncodeAtEveryLevel(Oddity, LevelledSerializer):
    """Accepts levels that its compression library refuses later."""

    def encode(self, chunk: Chunk) -> Buffers:
        if not 0 < self.level <= 2:
            raise zlib.error("bad compression level")
        return super().encode(chunk)


class TakesPagesOnly(Oddity, RowsSerializer):
    """Unusable for most engines."""

    formats = frozenset({MemoryFormat.KV_PAGES})
    by_layer = False
