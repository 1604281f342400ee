"""The kernels, on a GPU where there is one, else thread by thread on a processor: the bytes and values of the codec."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import profile_like
from test_streams import DTYPES, OF_THEIR_OWN, bits, decoded, kv_of, settings_for
from test_transform import heads

from kvloom import Chunk, CorruptBlobError, MemoryFormat, Place, UnreadableBlobError
from kvloom_serde_cachegen import device, serializer, streams
from kvloom_serde_cachegen.native_profile import NativeProfile
from kvloom_serde_cachegen.serializer import CacheGenSerializer
from kvloom_serde_cachegen.streams import Mode, Settings
from kvloom_testkit.devices.simulated import SimulatedDevice

SOURCE = Path(__file__).parents[1] / "csrc" / "cuda.cu"


@pytest.fixture(scope="session")
def codec(for_a_processor: Callable[..., Path]) -> ctypes.CDLL:
    if (kernels := device.library()) is not None:
        return kernels
    built = for_a_processor(SOURCE, "-Og", "-ffp-contract=off", "-fno-math-errno")
    return device.declared(ctypes.CDLL(str(built)))


@pytest.fixture(scope="session")
def on(codec: ctypes.CDLL) -> str:
    return "cpu" if codec is not device.library() else "cuda"


shapes = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 40), st.integers(1, 150))
few = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


@few
@given(shapes, st.sampled_from(DTYPES), st.sampled_from(OF_THEIR_OWN), st.integers(1, 130),
       st.integers(1, 3), st.booleans(), st.integers(0, 10**6))  # fmt: skip
def test_it_writes_the_same(
    codec: ctypes.CDLL, on: str, shape: tuple[int, ...], dtype: torch.dtype, mode: Mode, band: int, count: int,
    odd: bool, seed: int,
) -> None:  # fmt: skip
    kvs = [kv_of(shape, dtype, seed + each, odd=odd) for each in range(count)]
    how = settings_for(mode, kvs[0], band=band)
    if mode is Mode.CACHEGEN:
        how = replace(how, bins=[(4 + (seed + layer) % 60, 4 + seed // 60 % 60) for layer in range(shape[1])])
    if seed % 2:
        for kv in kvs:
            kv[-1, :, 3::40] = (kv[-1, :, 3::40].float() * 0.1).to(dtype)  # attention sinks
    if seed % 3 == 0:
        weights = torch.rand(shape[0], shape[1], shape[3], generator=torch.Generator().manual_seed(seed)) + 0.1
        how = replace(how, weights=weights[: 1 + seed % 2])
    if seed % 3 == 1:
        how = replace(how, shared_from=shape[3] // how.band * how.band)
    made = device.encode([kv.to(on) for kv in kvs], how, codec)
    assert [[bytes(each) for each in blob] for blob in made] == [
        [bytes(each) for each in streams.encode(kv, how)] for kv in kvs
    ]


@few
@given(shapes, st.sampled_from(DTYPES), st.sampled_from(OF_THEIR_OWN), st.integers(1, 130),
       st.integers(1, 3), st.booleans(), st.integers(0, 10**6))  # fmt: skip
def test_it_reads_the_same(
    codec: ctypes.CDLL, on: str, shape: tuple[int, ...], dtype: torch.dtype, mode: Mode, band: int, count: int,
    odd: bool, seed: int,
) -> None:  # fmt: skip
    kvs = [kv_of(shape, dtype, seed + each, odd=odd) for each in range(count)]
    blobs = [streams.encode(kv, settings_for(mode, kv, band=band)) for kv in kvs]
    into = [torch.full_like(bits(kv), 0xA5).view(kv.dtype).view(kv.shape).to(on) for kv in kvs]
    device.decode(blobs, into, mode, codec)
    for kv, blob, out in zip(kvs, blobs, into, strict=True):
        assert torch.equal(bits(out.cpu()), bits(decoded(blob, kv, mode)))


@pytest.mark.parametrize("apart", [0, 1, 4, 6])
@pytest.mark.parametrize("pinned", [False, True])
def test_streams_are_read_wherever_they_lie(codec: ctypes.CDLL, on: str, apart: int, pinned: bool) -> None:
    """In one piece of memory, as in a blob, at odd distances, and each in memory of its own."""
    for mode in (Mode.STEP, Mode.CACHEGEN, Mode.LOSSLESS):
        kv = kv_of((2, 3, 33, 130), torch.bfloat16, 5)
        how = settings_for(mode, kv, band=128)
        made = streams.encode(kv, how)
        whole = torch.zeros(sum(map(len, made)) + apart * len(made), dtype=torch.uint8)
        whole = whole.pin_memory() if pinned and on == "cuda" else whole
        at, blob = 0, []
        for stream in made:
            whole[at : at + len(stream)] = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
            blob.append(memoryview(whole.numpy())[at : at + len(stream)])
            at += len(stream) + apart
        into = torch.zeros_like(kv, device=on)
        device.decode([blob, blob], [into, torch.zeros_like(into)], mode, codec)
        assert torch.equal(bits(into.cpu()), bits(decoded(made, kv, mode)))


NUMBERING = """
#define KVZ_NAMESPACE cuda
#include "decode_work.h"
using namespace kvz;
using namespace kvz::cuda;
// `work`: next, the number of all tiles, and the tiles of each stream, of which the numbers of the first are made.
extern "C" void numbered(int32_t count, KvzDecode* jobs, DecodeWork* work) {
  KVZ_LAUNCH(number_tiles, 1, 32, 0, nullptr, count, jobs, work);
}
"""


@pytest.fixture(scope="module")
def numbering(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler to emulate the kernels with")
    built = tmp_path_factory.mktemp("numbering") / "libnumbering.so"
    options = ["-std=c++17", "-O0", "-fPIC", "-shared", "-I", SOURCE.parent, "-x", "c++", "-"]
    subprocess.run([compiler, *options, "-o", built], input=NUMBERING, text=True, check=True)
    return ctypes.CDLL(str(built))


@pytest.mark.parametrize("of_one", [0, 1, 3, (1 << 25) - 1, 1 << 25])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 70])
def test_tiles_of_many_streams_are_numbered_and_no_number_overflows(
    numbering: ctypes.CDLL, of_one: int, count: int
) -> None:
    """A launch has 2^30 tiles; streams that have no room any more are refused, and no warp takes a tile of theirs."""
    jobs, work = (streams.Decode * count)(), (ctypes.c_int32 * (2 + count))(-1, -1, *[of_one] * count)
    numbering.numbered(count, jobs, work)
    room = count if of_one == 0 else min(count, (1 << 30) // of_one)
    assert list(work) == [0, room * of_one, *(n * of_one for n in range(room)), *[1 << 30] * (count - room)]
    assert [job.error for job in jobs] == [0] * room + [9] * (count - room)


def test_a_stream_without_room_is_not_called_corrupt() -> None:
    job = streams.Decode()
    job.error = 9
    with pytest.raises(UnreadableBlobError, match="stream 0: more tiles than one launch takes"):
        streams.check([job])


@pytest.mark.parametrize("mode", [Mode.STEP, Mode.CACHEGEN, Mode.LOSSLESS])
def test_a_stream_of_odd_length_does_not_shift_the_next(codec: ctypes.CDLL, on: str, mode: Mode) -> None:
    """Kernels read words; a stream that a hostile header begins between two of them would stop the device."""
    kv = kv_of((2, 3, 33, 130), torch.bfloat16, 5)
    made = streams.encode(kv, settings_for(mode, kv, band=128))
    whole = torch.frombuffer(bytearray(b"".join(map(bytes, made))), dtype=torch.uint8)
    whole = whole.pin_memory() if on == "cuda" else whole
    ends = [0, len(made[0]) - 1, len(made[0]) + len(made[1]) - 1, len(whole)]
    blob = [memoryview(whole.numpy())[begin:end] for begin, end in itertools.pairwise(ends)]
    with pytest.raises(CorruptBlobError):
        device.decode([blob], [torch.zeros_like(kv, device=on)], mode, codec)
    into = torch.zeros_like(kv, device=on)
    device.decode([made], [into], mode, codec)
    assert torch.equal(bits(into.cpu()), bits(decoded(made, kv, mode))), "the device goes on"


@few
@given(
    heads, st.integers(1, 2), st.integers(1, 70), st.integers(8, 130),
    st.sampled_from([None, 0, 100_000, (1 << 24) - 30]),
    st.sampled_from(DTYPES), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.sampled_from([1.0, 4.0, 32.0]),
    st.integers(1, 2), st.integers(0, 10**6),
)  # fmt: skip
def test_it_reads_transformed_tokens(
    codec: ctypes.CDLL, on: str, shape: tuple[int, int], planes: int, tokens: int, band: int, start: int | None,
    dtype: torch.dtype, rotary: float, interleaved: bool, sigma: float, count: int, seed: int,
) -> None:  # fmt: skip
    heads, size = shape
    kvs = [kv_of((planes, 2, tokens, heads * size), dtype, seed + each, odd=sigma < 4.0) for each in range(count)]
    profile = profile_like(kvs[0], heads=heads, rotary=rotary, interleaved=interleaved, sigma=sigma, seed=seed)
    how = Settings(Mode.KLT, min(band, heads * size), 0, 0.5, profile=NativeProfile(profile))
    blobs = [streams.encode(kv, how, start=start) for kv in kvs]
    into = [torch.full_like(bits(kv), 0xA5).view(kv.dtype).view(kv.shape).to(on) for kv in kvs]
    device.decode(blobs, into, Mode.KLT, codec, profile=how.profile)
    for kv, blob, out in zip(kvs, blobs, into, strict=True):
        assert torch.equal(bits(out.cpu()), bits(decoded(blob, kv, Mode.KLT, profile=how.profile)))
    one = torch.zeros_like(kvs[0][:, 1:], device=on)
    device.decode([blobs[0][1:]], [one], Mode.KLT, codec, first_layer=1, profile=how.profile)
    assert torch.equal(bits(one), bits(into[0][:, 1:]))


def test_sums_over_many_components(codec: ctypes.CDLL, on: str) -> None:
    kv = torch.randn((2, 1, 20, 576), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    how = Settings(Mode.KLT, 256, 0, 0.5, profile=NativeProfile(profile_like(kv, heads=4, sigma=16.0)))
    blob = streams.encode(kv, how, start=5)
    used = int.from_bytes(bytes(blob[0][52:54]), "little")  # of the first block
    assert used > 512 and used % 2, used
    workspace = torch.full((1 << 20,), 0x5A, dtype=torch.uint8, device=on)  # in the places of what is not used
    out = torch.zeros_like(kv, device=on)
    device.decode([blob], [out], Mode.KLT, codec, profile=how.profile, workspace=workspace)
    assert torch.equal(bits(out.cpu()), bits(decoded(blob, kv, Mode.KLT, profile=how.profile)))


def test_each_block_of_tokens_is_transformed_or_not(codec: ctypes.CDLL, on: str) -> None:
    kv = kv_of((2, 1, 300, 64), torch.bfloat16, 7, odd=False)
    kv[1, :, 280, 3] = float("nan")
    how = Settings(Mode.KLT, 64, 0, 0.5, profile=NativeProfile(profile_like(kv, heads=2, sigma=32.0)))
    blob = streams.encode(kv, how, start=9)
    codes = [int.from_bytes(bytes(blob[0][at : at + 2]), "little") for at in range(54, 70, 4)]
    assert [code > 0 for code in codes] == [True, True, True, False]
    out = torch.zeros_like(kv, device=on)
    device.decode([blob], [out], Mode.KLT, codec, profile=how.profile)
    assert torch.equal(bits(out.cpu()), bits(decoded(blob, kv, Mode.KLT, profile=how.profile)))


@pytest.mark.parametrize("mode", sorted(device.DECODES))
def test_tiles_of_many_tokens_and_channels(codec: ctypes.CDLL, on: str, mode: Mode) -> None:
    kv = kv_of((2, 1, 300, 140), torch.bfloat16, 7)
    how = settings_for(mode, kv)
    blob = streams.encode(kv, how, start=7)
    if mode in device.ENCODES:
        (made,) = device.encode([kv.to(on)], how, codec)
        assert [bytes(each) for each in made] == [bytes(each) for each in blob]
    out = torch.zeros_like(kv, device=on)
    device.decode([blob], [out], mode, codec, profile=how.profile)
    assert torch.equal(bits(out.cpu()), bits(decoded(blob, kv, mode, profile=how.profile)))


OPAQUE = [
    torch.int8, torch.float64, torch.bfloat16,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.uint8, torch.int32, torch.float8_e5m2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", OPAQUE, ids=str)
def test_runs_of_many_elements_of_any_type(codec: ctypes.CDLL, on: str, dtype: torch.dtype) -> None:
    """Streams of one token, as pages are cut: tiles of coded elements, of equal ones, of noise, and the rest."""
    elements = 3 * 32768 // max(1, dtype.itemsize // 4) + 1001
    generator = torch.Generator().manual_seed(int(dtype.itemsize))
    kv = torch.randn((2, 1, 1, elements), generator=generator).mul(3).to(dtype)
    whole = bits(kv).view(2, -1)
    whole[0, 32768 * 4 : 32768 * 8] = whole[0, 0]
    noise = whole[1, 32768 * 4 : 32768 * 8]
    noise[:] = torch.randint(256, noise.shape, generator=generator, dtype=torch.uint8)
    how = settings_for(Mode.LOSSLESS, kv)
    blob = streams.encode(kv, how)
    (made,) = device.encode([kv.to(on)], how, codec)
    assert [bytes(each) for each in made] == [bytes(each) for each in blob]
    out = torch.zeros_like(kv, device=on)
    device.decode([blob], [out], Mode.LOSSLESS, codec)
    assert torch.equal(bits(out.cpu()), bits(kv))


@pytest.mark.parametrize(("elements", "kind"), [(192, 0), (196, 5)])
def test_what_coding_does_not_make_smaller_is_raw(codec: ctypes.CDLL, on: str, elements: int, kind: int) -> None:
    """Both take 192 bytes when they are coded."""
    generator = torch.Generator().manual_seed(1)
    kv = torch.randint(16, (1, 4, 1, elements), generator=generator).to(torch.int8)
    how = settings_for(Mode.LOSSLESS, kv)
    expected = [bytes(each) for each in streams.encode(kv, how)]
    assert {kind_of(each) for each in expected} == {kind}
    (made,) = device.encode([kv.to(on)], how, codec)
    assert [bytes(each) for each in made] == expected


def kind_of(stream: bytes) -> int:
    """The kind of its first tile."""
    return stream[32 + int.from_bytes(stream[24:28], "little") + 3] >> 5


def problem_of(decode: Callable[[], None]) -> str:
    """The error; if a stream has several, each may come first."""
    try:
        decode()
    except CorruptBlobError as error:
        return str(error).split(": ")[1]
    except UnreadableBlobError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", sorted(device.DECODES))
def test_bad_streams_are_refused_where_the_processor_refuses_them(codec: ctypes.CDLL, on: str, mode: Mode) -> None:
    """All in one launch, beside good ones that come out whole."""
    kv = kv_of((2, 1, 9, 40 if mode is Mode.KLT else 41), torch.bfloat16, 8, odd=mode is not Mode.KLT)
    how = settings_for(mode, kv)
    (stream,) = streams.encode(kv, how, start=0)
    blobs = [bytes(stream)]
    for place in (*range(96), *range(96, len(stream), 5)):  # the header and tables, and some of the rest
        spoilt = bytearray(stream)
        spoilt[place] ^= 1 << place % 8
        blobs += [bytes(spoilt)] if place % 2 else [bytes(stream[:place])]
    decode = partial(device.decode, mode=mode, codec=codec, profile=how.profile)
    for blob in blobs:
        expected, made = torch.zeros_like(kv), torch.zeros_like(kv, device=on)
        problem = problem_of(lambda blob=blob, to=expected: streams.decode([blob], to, mode, profile=how.profile))
        assert problem_of(lambda blob=blob, to=made: decode([[blob]], [to])) == problem
        assert problem or torch.equal(bits(made.cpu()), bits(expected))
    with pytest.raises(CorruptBlobError, match="stream 1, byte"):
        decode([blobs[:1], blobs[2:3]], [torch.zeros_like(kv, device=on) for _ in range(2)])


def test_tiles_without_components_are_empty(codec: ctypes.CDLL, on: str) -> None:
    kv = torch.zeros((1, 1, 40, 64), dtype=torch.bfloat16)
    how = Settings(Mode.KLT, 32, 0, 0.5, profile=NativeProfile(profile_like(kv, heads=2, sigma=64.0)))
    stream = bytearray(streams.encode(kv, how, start=0)[0])
    last = 32 + 24 + 4  # where the directory has the second tile, which ends where the stream does
    stream += b"\0\0\0\0"
    for at, more in ((last, 1), (28, 4)):
        stream[at : at + 4] = struct.pack("<I", struct.unpack_from("<I", stream, at)[0] + more)
    with pytest.raises(CorruptBlobError, match="tiles that are not where they should be"):
        streams.decode([stream], torch.zeros_like(kv), Mode.KLT, profile=how.profile)
    with pytest.raises(CorruptBlobError, match="tiles that are not where they should be"):
        device.decode([[stream]], [torch.zeros_like(kv, device=on)], Mode.KLT, codec, profile=how.profile)


def test_what_the_kernels_do_not_take_is_said(codec: ctypes.CDLL, on: str) -> None:
    kv = kv_of((2, 1, 9, 40), torch.bfloat16, 9)
    lossless = streams.encode(kv, settings_for(Mode.LOSSLESS, kv))
    with pytest.raises(CorruptBlobError, match="byte 5"):
        device.decode([lossless], [torch.zeros_like(kv, device=on)], Mode.STEP, codec)
    klt = settings_for(Mode.KLT, kv)
    transformed = streams.encode(kv, klt, start=0)
    for profile in (None, NativeProfile(profile_like(kv, sigma=3.0))):
        with pytest.raises(UnreadableBlobError, match="not at hand"):
            device.decode([transformed], [torch.zeros_like(kv, device=on)], Mode.KLT, codec, profile=profile)
    with pytest.raises(ValueError, match="cannot be made"):
        device.encode([kv.to(on)], klt, codec)
    for bins in (3, 64, -1, 1 << 30):
        with pytest.raises(ValueError, match="cannot be made"):
            device.encode([kv.to(on)], replace(settings_for(Mode.CACHEGEN, kv), bins=[(32, bins)]), codec)


@pytest.mark.parametrize("settings", [{}, {"mode": "cachegen"}, {"mode": "lossless"}], ids=str)
def test_the_serializer_takes_chunks_in_device_memory(
    codec: ctypes.CDLL, on: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at a time, of several shapes, whole and by layers: the same blobs and values as in host memory."""
    one = CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings))
    kvs = [kv_of((2, 2, tokens, 40), torch.bfloat16, tokens) for tokens in (5, 9, 5)]
    blobs = [[bytes(part) for part in one.encode(chunk_of(kv))] for kv in kvs]
    values = [decoded(blob, kv, streams.mode_of(blob[0])) for blob, kv in zip(blobs, kvs, strict=True)]
    monkeypatch.setattr(serializer, "_kernels", lambda kv: codec)
    place = Place(torch.device(on), workspace=torch.empty(1 << 20, dtype=torch.uint8, device=on))
    made = one.encode_many([chunk_of(kv.to(on)) for kv in kvs], place)
    assert [[bytes(part) for part in blob] for blob in made] == blobs
    into = [chunk_of(torch.zeros_like(kv, device=on)) for kv in kvs]
    one.decode_many(blobs, into, place)
    assert all(torch.equal(bits(chunk.tensor.cpu()), bits(kv)) for chunk, kv in zip(into, values, strict=True))
    layer = chunk_of(torch.zeros((2, 1, 9, 40), dtype=torch.bfloat16, device=on))
    one.decode_layers(blobs[1][1:], range(1, 2), layer)
    assert torch.equal(bits(layer.tensor.cpu()), bits(values[1][:, 1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_the_serializer_takes_pages_in_device_memory(
    codec: ctypes.CDLL, on: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = CacheGenSerializer(CacheGenSerializer.Config.model_validate({"mode": "lossless"}))
    pages = kv_of((3, 2, 9, 40), torch.float32, 5).clamp(-100, 100).nan_to_num().to(dtype)
    blob = [bytes(part) for part in one.encode(Chunk(pages, MemoryFormat.KV_PAGES, 9))]
    monkeypatch.setattr(serializer, "_kernels", lambda kv: codec)
    for name in ("encode", "decode"):
        monkeypatch.setattr(streams, name, lambda *_, **__: pytest.fail("it went through host memory"))
    (made,) = one.encode_many([Chunk(pages.to(on), MemoryFormat.KV_PAGES, 9)])
    assert [bytes(part) for part in made] == blob
    into = Chunk(torch.zeros_like(pages, device=on), MemoryFormat.KV_PAGES, 9)
    one.decode(blob, into)
    assert torch.equal(bits(into.tensor.cpu()), bits(pages))


@pytest.mark.parametrize("settings", [{}, {"mode": "lossless"}], ids=str)
def test_streams_are_queued_by_the_device_and_damage_is_found(
    codec: ctypes.CDLL, on: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values, whatever the order of what is queued, and nothing but streams and a table over the bus."""
    if on == "cuda":
        pytest.skip("a simulated device has host memory, which kernels of a GPU cannot read")
    one = CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings))
    kvs = [kv_of((2, 2, 9, 40), torch.bfloat16, number) for number in range(3)]
    blobs = [[bytes(part) for part in one.encode(replace(chunk_of(kv), start=0))] for kv in kvs]
    values = [torch.zeros_like(kv) for kv in kvs]
    for blob, value in zip(blobs, values, strict=True):
        one.decode(blob, chunk_of(value))
    monkeypatch.setattr(device, "library", lambda: codec)
    for seed in range(10):
        there = SimulatedDevice(seed)
        with there.installed():
            stream = there.stream()
            with there.on(stream):
                into = [there.empty(kv.nbytes).view(kv.dtype).view(kv.shape) for kv in kvs]
            place = Place(torch.device("cpu"), stream)
            assert one.decodes_on(place.device)
            one.decode_many(blobs, [chunk_of(kv) for kv in into], place)
            assert all(torch.equal(bits(kv), bits(value)) for kv, value in zip(into, values, strict=True))
            table = 6 * ctypes.sizeof(streams.Decode)
            assert there.bus_bytes == sum(len(part) for blob in blobs for part in blob[:2]) + table
            harm = [blobs[0], [blobs[1][0], blobs[1][1][:-8], *blobs[1][2:]]]
            with pytest.raises(CorruptBlobError):
                one.decode_many(harm, [chunk_of(kv) for kv in into[:2]], place)
            there.settle()


def chunk_of(kv: torch.Tensor) -> Chunk:
    return Chunk(kv, MemoryFormat.KV_BLOB, kv.shape[2])
