"""Requirements on a serializer's blobs: its own, however they are passed, and any other bytes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from kvloom import Buffer, Chunk, CorruptBlobError, MemoryFormat, Serializer, UnreadableBlobError
from kvloom_testkit.chunks import bits, room_for
from kvloom_testkit.serializers.models import usual_chunk

Blob = list[bytes]
T = TypeVar("T")
_LARGE_BYTES = 1 << 23
_SPARE_BYTES = 1 << 20
"""Memory that a decoder may use beside a few copies of the blob."""


class BytesRequirements:
    """Mixed into `SerializerConformance`."""

    def test_S06_a_blob_of_another_length_is_corrupt(self, opened: Callable[[], Serializer]) -> None:
        """`decode` raises CorruptBlobError for buffers that are too short or long, too few or too many.

        Why: accepting a truncated blob gives wrong KV; any other exception looks like a bug.

        Usually: missing bytes are left unset, extra bytes are ignored, or an error of the underlying library passes
        through.
        """
        one = opened()
        for num_tokens in (1, 7):
            chunk = _usual(one, num_tokens)
            good = [bytes(buffer) for buffer in one.encode(chunk)]
            others = [bytes(buffer) for buffer in one.encode(_usual(one, num_tokens + 3))]
            spoilt = dict(_spoilt(good))
            if others != good and _usual(one, num_tokens + 3).nbytes != chunk.nbytes:
                spoilt["the blob of a longer chunk"] = others
            for name, blob in spoilt.items():
                accepted, error = _decoded(one, blob, chunk)
                assert error is None, f"{name}: {type(error).__name__} instead of CorruptBlobError: {error}"
                assert not accepted, f"{name} was accepted"

    def test_S07_no_bytes_do_any_harm(self, opened: Callable[[], Serializer]) -> None:
        """For any bytes of the right lengths, `decode` fills the chunk or raises CorruptBlobError, and nothing else; or
        UnreadableBlobError, if the blob needs something that this process lacks. A short blob that claims a much
        larger chunk is refused without allocating it.

        Why: a checksum does not protect against blobs of another version, or of an attacker with write access. Zeros
        compress to a thousandth, so a blob of a few MiB could take all memory.

        Usually: a length in the blob is trusted, everything is decompressed and its length compared afterwards, or a
        parser's error passes through.
        """
        one, chance = opened(), random.Random(3)
        chunk = _usual(one, 7)
        good = [bytes(buffer) for buffer in one.encode(chunk)]
        blobs = [[chance.randbytes(len(part)) for part in good] for _ in range(8)]
        blobs += [[bytes([byte]) * len(part) for part in good] for byte in (0, 0xFF)]
        blobs += [good[::-1]]
        blobs += [_flipped(good, chance) for _ in range(60)]
        for blob in blobs:
            _, error = _decoded(one, blob, chunk)
            assert error is None, f"{type(error).__name__} instead of CorruptBlobError: {error}"
        if not (large := _deflated(one, chunk)):
            return
        (accepted, error), taken = _peak_bytes(lambda: _decoded(one, large, chunk))
        about = f"a blob of {_length(large)} bytes, of a chunk of {_LARGE_BYTES >> 20} MiB"
        assert error is None, f"{about}: {type(error).__name__} instead of CorruptBlobError: {error}"
        assert not accepted, f"{about} was accepted for one of {chunk.nbytes} bytes"
        assert taken < 4 * _length(large) + _SPARE_BYTES, f"{about}, took {taken >> 20} MiB before it was refused"

    def test_S16_any_kind_of_buffer_will_do(self, opened: Callable[[], Serializer]) -> None:
        """`decode` accepts bytes, bytearrays and memoryviews, also read-only, at any address, and changes none.

        Why: a backend may return any buffer, often a part of a larger one that others read.

        Usually: a method of `bytes` is called, or bytes are decoded in place.
        """
        one = opened()
        chunk = _usual(one, 7)
        good, into = [bytes(buffer) for buffer in one.encode(chunk)], room_for(chunk)
        one.decode(good, into)
        expected = bits(into)
        forms: dict[str, Callable[[bytes], Buffer]] = {
            "bytearray": bytearray,
            "memoryview": lambda part: memoryview(bytearray(part)),
            "read-only memoryview": memoryview,
            "part of something larger": lambda part: memoryview(bytearray(b"-" + part + b"-"))[1:-1],
            "read-only part of something larger": lambda part: memoryview(b"---" + part + b"-")[3:-1],
        }
        for name, form in forms.items():
            blob, into = [form(part) for part in good], room_for(chunk)
            one.decode(blob, into)
            assert torch.equal(bits(into), expected), name
            assert [bytes(part) for part in blob] == good, f"the {name} was changed"

    def test_S18_what_was_encoded_stays_as_it_is(self, opened: Callable[[], Serializer]) -> None:
        """`encode` returns contiguous buffers that a memoryview can cast to "B", and that later calls do not change.

        Why: a blob waits to be written while the next one is encoded, and its buffers are framed as bytes.

        Usually: a scratch buffer of the instance is returned, and filled again; or an array with several dimensions,
        one of them 0, which cannot be cast.
        """
        one = opened()
        blob = one.encode(_usual(one, 7))
        for buffer in blob:
            assert isinstance(buffer, bytes | bytearray | memoryview), f"a {type(buffer).__name__}"
            assert memoryview(buffer).c_contiguous
            try:
                memoryview(buffer).cast("B")
            except TypeError as error:
                pytest.fail(f"a buffer of shape {memoryview(buffer).shape} is no run of bytes: {error}")
        before = [bytes(buffer) for buffer in blob]
        for other in (_usual(one, 7, seed=1), _usual(one, 9, seed=1)):
            one.decode(one.encode(other), room_for(other))
            one.encode_many([other])
        assert [bytes(buffer) for buffer in blob] == before


def _usual(one: Serializer, num_tokens: int, *, seed: int = 0) -> Chunk:
    return usual_chunk(one, num_tokens, seed=seed)


def _decoded(one: Serializer, blob: Blob, like: Chunk) -> tuple[bool, Exception | None]:
    """Return whether a blob is accepted, and any error that is not one of the expected ones."""
    try:
        one.decode(blob, room_for(like))
    except (CorruptBlobError, UnreadableBlobError):
        return False, None
    except pytest.fail.Exception:
        raise
    except Exception as error:
        return False, error
    return True, None


def _spoilt(good: Blob) -> Iterator[tuple[str, Blob]]:
    yield "no buffer", []
    for at in sorted({0, len(good) // 2, len(good) - 1}):
        before, part, after = good[:at], good[at], good[at + 1 :]
        where = f"buffer {at} of {len(good)}"
        if part:
            yield f"{where}, without its last byte", [*before, part[:-1], *after]
            yield f"{where}, without its first byte", [*before, part[1:], *after]
            yield f"{where}, half of it", [*before, part[: len(part) // 2], *after]
            yield f"{where}, empty", [*before, b"", *after]
            yield f"without {where}", [*before, *after]
            yield f"{where}, twice", [*before, part, part, *after]
        yield f"{where}, and a byte", [*before, part + b"\0", *after]
        yield f"{where}, and 64 bytes", [*before, part + bytes(64), *after]
    yield "a buffer too many", [*good, b"one more"]
    yield "the whole blob twice", [*good, *good]
    yield "the whole blob as one buffer without its end", [b"".join(good)[:-1]]


def _flipped(good: Blob, chance: random.Random) -> Blob:
    """With one byte changed, more often than not near the beginning of a buffer, where headers are."""
    parts: list[Any] = [bytearray(part) for part in good]
    part = chance.choice([part for part in parts if part])
    place = chance.randrange(min(len(part), 64) if chance.random() < 0.6 else len(part))
    part[place] ^= chance.randrange(1, 256)
    return [bytes(part) for part in parts]


def _length(blob: Blob) -> int:
    return sum(map(len, blob))


def _deflated(one: Serializer, like: Chunk) -> Blob:
    """The blob of a chunk of `_LARGE_BYTES` of zeros, if that is much less; else empty."""
    blob: Blob = []
    for num_bytes in (_LARGE_BYTES >> 5, _LARGE_BYTES):
        shape, tokens = list(like.tensor.shape), 2 if like.format is MemoryFormat.KV_BLOB else 0
        times = num_bytes // like.nbytes
        shape[tokens] *= times
        zeros = torch.zeros(shape).to(like.tensor.dtype)
        blob = [bytes(buffer) for buffer in one.encode(Chunk(zeros, like.format, like.num_tokens * times))]
        if 16 * _length(blob) > num_bytes:
            return []
    return blob


def _peak_bytes(run: Callable[[], T]) -> tuple[T, int]:
    """A function's result, and the peak memory that Python and numpy used in it."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        returned = run()
        return returned, tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()
