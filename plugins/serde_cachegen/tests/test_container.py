"""Bytes that say all about themselves: they come back, or they are refused and it is said why and where."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import profile_like
from test_streams import DTYPES, bits, kv_of

from kvloom import CorruptBlobError, UnreadableBlobError, envelope
from kvloom_serde_cachegen.container import from_bytes, pack, to_bytes, unpack
from kvloom_serde_cachegen.serializer import CacheGenSerializer
from kvloom_serde_cachegen.streams import Mode, Settings, bound

WHERE = re.compile(r"^byte (\d+)( and what follows)?: \w+")


def config(**values: Any) -> CacheGenSerializer.Config:
    return CacheGenSerializer.Config.model_validate(values)


def refused(blob: bytes, **wanted: Any) -> str:
    with pytest.raises(CorruptBlobError, match=WHERE) as caught:
        from_bytes(blob, **wanted)
    return str(caught.value)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from([*DTYPES, torch.int8]),
    st.text(max_size=20),
)
def test_lossless_comes_back_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype, model: str) -> None:
    kv = kv_of(shape, dtype, 1)
    back = from_bytes(to_bytes(kv, config(mode="lossless"), model=model), model=model)
    assert back.dtype == dtype and back.shape == kv.shape and torch.equal(bits(back), bits(kv))


@pytest.mark.parametrize("mode", ["step", "cachegen"])
def test_lossy_modes_come_back_as_through_the_serializer(mode: str) -> None:
    """A view too, whose planes and layers are in another order."""
    kv = kv_of((3, 2, 40, 64), torch.bfloat16, 2, odd=False).transpose(0, 1)
    back = from_bytes(to_bytes(kv, config(mode=mode)))
    assert torch.equal(back, from_bytes(to_bytes(kv.contiguous(), config(mode=mode))))
    assert 0 < (back.float() - kv.float()).norm() < 0.2 * kv.float().norm()


def test_klt_needs_its_profile_to_come_back(tmp_path: Path) -> None:
    kv = kv_of((2, 2, 40, 64), torch.bfloat16, 9, odd=False)
    profile_like(kv).save(tmp_path / "profile")
    klt = config(mode="klt", profile=tmp_path / "profile")
    blob = to_bytes(kv, klt, start=1000)
    back = from_bytes(blob, klt)
    assert 0 < (back.float() - kv.float()).norm() < 0.3 * kv.float().norm()
    with pytest.raises(UnreadableBlobError, match="not at hand"):
        from_bytes(blob)
    for length in range(60):
        refused(pack([b"KVZ1\1\4".ljust(length, b"\0")] * 2, (2, 2, 40, 64), torch.bfloat16))


def test_what_is_wanted_is_what_is_given() -> None:
    kv = kv_of((2, 2, 20, 32), torch.float16, 3)
    blob = to_bytes(kv, model="ours")
    assert from_bytes(blob, model="ours", shape=kv.shape, dtype=kv.dtype).shape == kv.shape
    assert refused(blob, model="theirs").startswith("byte 112: the blob of another key")
    assert refused(blob).startswith("byte 112: the blob of another key")
    assert refused(blob, model="ours", shape=(2, 2, 32, 20)).startswith("byte 112: KV of (2, 2, 20, 32)")
    assert refused(blob, model="ours", dtype=torch.bfloat16).startswith("byte 112: KV of")
    assert "more than 1000 bytes" in refused(blob, model="ours", max_bytes=1000)


@pytest.mark.parametrize("mode", ["step", "lossless", "cachegen"])
def test_every_flipped_byte_and_every_length_is_refused(mode: str) -> None:
    blob = bytearray(to_bytes(kv_of((2, 1, 6, 8), torch.bfloat16, 4), config(mode=mode)))
    from_bytes(blob)
    for place in range(len(blob)):
        blob[place] ^= 1 << place % 8
        said = refused(blob)
        if place >= 4096:
            assert said.startswith("byte 4096: payload checksum")
        blob[place] ^= 1 << place % 8
    for length in [*range(0, 4096, 37), *range(4090, len(blob))]:
        refused(blob[:length])
    refused(blob + b"\0")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=5000))
def test_random_bytes_are_refused(noise: bytes) -> None:
    refused(noise)
    refused(b"KVLOOM\r\n" + noise)


def resealed(blob: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A blob forged with knowledge of the format: another description, with valid checksums."""
    header, payload = envelope.unseal(blob, key="")
    fields = header.description._asdict()
    change(fields)
    return b"".join(envelope.seal(envelope.Description(**fields), envelope.split(header, payload)))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (2, 2, 20)},
        {"shape": (2, 2, 20, 32, 1)},
        {"shape": (2, 2, 20, 0)},
        {"shape": (2, 2, -20, 32)},
        {"shape": (2, 2, 20.0, 32)},
        {"shape": (2, 2, True, 32)},
        {"shape": (2, 2, "20", 32)},
        {"shape": (2, 2, 1 << 60, 1 << 60)},
        {"shape": (2, 2, 1 << 20, 32)},
        {"shape": (2, 2, 32, 20)},
        {"shape": (2, 3, 20, 32)},
        {"shape": (2, 1, 20, 32)},
        {"shape": (1, 2, 20, 32)},
        {"shape": (4, 1, 20, 32)},
        {"dtype": "float16"},
        {"dtype": "float64"},
        {"dtype": "__class__"},
        {"dtype": "complex64"},
        {"dtype": ["bfloat16"]},
        {"serializer": "raw"},
        {"format": "kv_pages"},
        {"params": 1},
    ],
    ids=str,
)
def test_lies_with_right_checksums_are_refused(change: dict[str, Any]) -> None:
    blob = to_bytes(kv_of((2, 2, 20, 32), torch.bfloat16, 5))
    assert resealed(blob, lambda fields: fields) == blob
    refused(resealed(blob, lambda fields: fields.update(change)))


@pytest.mark.parametrize("shape", [(1, 1, 1, (1 << 32) + 64), (1, 1, (1 << 32) + 1, 64), ((1 << 32) + 1, 1, 1, 64)])
def test_sizes_that_the_codec_would_cut_off_are_refused(shape: tuple[int, ...]) -> None:
    """Whatever the caller allows: the streams would be taken for those of the smaller size, and fill a part."""
    kv = torch.zeros(1, 1, 1, 64, dtype=torch.uint8)
    _, streams = unpack(to_bytes(kv, config(mode="lossless")))
    with pytest.raises(CorruptBlobError, match="no description of KV"):
        from_bytes(pack(streams, shape, torch.uint8), max_bytes=1 << 60)


def test_kv_that_no_stream_can_be_of_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="no streams are of"):
        bound((1, 1, 1, 1 << 32), torch.uint8, Settings(Mode.LOSSLESS))


def test_absurd_lengths_are_refused() -> None:
    """Lengths of the description, of buffers, and of all of them, in a header with a valid checksum."""
    blob = to_bytes(kv_of((2, 2, 20, 32), torch.bfloat16, 6))
    table = 112 + struct.unpack_from("<I", blob, 16)[0]
    for place, form in ((12, "<I"), (16, "<I"), (20, "<I"), (24, "<Q"), (table, "<Q"), (table + 24, "<Q")):
        top = (1 << 8 * struct.calcsize(form)) - 1
        for value in (0, 1, 4095, 8192, 1 << 24, 1 << 31, top, top - 4095):
            lie = bytearray(blob)
            struct.pack_into(form, lie, place, value)
            lie[40:56] = bytes(16)
            lie[40:56] = xxhash.xxh3_128_digest(lie[:4096])
            refused(bytes(lie))


def test_a_later_version_is_refused() -> None:
    lie = bytearray(to_bytes(kv_of((2, 2, 20, 32), torch.bfloat16, 7)))
    struct.pack_into("<H", lie, 8, envelope.VERSION + 1)
    lie[40:56] = bytes(16)
    lie[40:56] = xxhash.xxh3_128_digest(lie[:4096])
    assert refused(lie).startswith(f"byte 8: format version {envelope.VERSION + 1}")
    streams = [bytes(each) for each in unpack(to_bytes(kv_of((2, 2, 20, 32), torch.bfloat16, 7)))[1]]
    streams[1] = streams[1][:4] + b"\2" + streams[1][5:]
    assert refused(pack(streams, (2, 2, 20, 32), torch.bfloat16)).endswith("stream 1, byte 4: of another version")


def test_it_says_what_it_is_to_whoever_looks() -> None:
    blob = to_bytes(kv_of((2, 2, 20, 32), torch.bfloat16, 8), config(quality="high"), model="ours")
    size = struct.unpack_from("<I", blob, 16)[0]
    said = json.loads(blob[112 : 112 + size])
    assert said["shape"] == [2, 2, 20, 32] and said["dtype"] == "bfloat16" and said["key"] == "ours"
    assert said["fidelity"] == "cachegen/0.25" and said["serializer"] == "cachegen"


def test_a_whole_prompt_may_have_more_streams_than_a_chunk() -> None:
    streams = [b""] * (envelope.MAX_BUFFERS + 1)
    blob = pack(streams, (2, 1, 4, 8), torch.bfloat16)
    assert len(unpack(blob)[1]) == len(streams)
