"""Streams: the same bytes whatever the processor, errors within what was promised, and nothing wrong from bad bytes."""

from __future__ import annotations

import base64
import hashlib
import struct
from dataclasses import replace
from typing import Any

import another_decoder
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import profile_like

from kvloom import Chunk, CorruptBlobError, MemoryFormat, UnreadableBlobError
from kvloom_serde_cachegen import streams
from kvloom_serde_cachegen.bins import CacheGenConfig
from kvloom_serde_cachegen.native_profile import NativeProfile
from kvloom_serde_cachegen.profile import Profile, Transform
from kvloom_serde_cachegen.serializer import CacheGenSerializer
from kvloom_serde_cachegen.streams import Mode, Settings

DTYPES = sorted(streams.DTYPES, key=str)
SETS = range(streams.instructions() + 1)
OF_THEIR_OWN = [mode for mode in Mode if mode is not Mode.KLT]
"""Modes that need no profile."""


def kv_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int, odd: bool = True) -> torch.Tensor:
    """KV with means, scales and outliers by channel; odd: and values that no model should make."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape, generator=generator) * torch.rand(shape[-1], generator=generator) * 3
    kv += torch.randn(shape[-1], generator=generator)
    kv[..., ::7] *= 20
    if odd:
        flat = kv.view(-1)
        places = torch.randperm(len(flat), generator=generator)[:8]
        strange = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 0.0, 1e-40, -0.0]
        flat[places] = torch.tensor(strange)[: len(places)]
        kv[:, :, :, 0] = 0.0
        kv[:, :, -1] = 0.0
    return kv.to(dtype)


def settings_for(mode: Mode, kv: torch.Tensor, step: float = 0.5, band: int = 128, **profile: Any) -> Settings:
    bins = CacheGenConfig.for_layers(kv.shape[1]).by_layer() if mode is Mode.CACHEGEN else ()
    native = NativeProfile(profile_like(kv, sigma=4.0, **profile)) if mode is Mode.KLT else None
    return Settings(mode, min(band, kv.shape[-1]), 0, step, bins=bins, profile=native)


def bits(kv: torch.Tensor) -> torch.Tensor:
    return kv.contiguous().view(torch.uint8)


def decoded(blob: Any, kv: torch.Tensor, mode: Mode, which: int = -1, profile: Any = None) -> torch.Tensor:
    into = torch.full_like(bits(kv), 0xA5).view(kv.dtype).view(kv.shape)
    streams.decode(blob, into, mode, profile=profile, with_instructions=which)
    return into


shapes = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 300), st.integers(1, 300))


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.sampled_from(OF_THEIR_OWN), st.integers(1, 130), st.integers(0, 10**6))
def test_every_processor_writes_and_reads_the_same(
    shape: tuple[int, ...], dtype: torch.dtype, mode: Mode, band: int, seed: int
) -> None:
    kv = kv_of(shape, dtype, seed)
    how = settings_for(mode, kv, band=band)
    blobs = [[bytes(each) for each in streams.encode(kv, how, with_instructions=which)] for which in SETS]
    assert all(blob == blobs[0] for blob in blobs)
    read = [bits(decoded(blobs[0], kv, mode, which)) for which in SETS]
    assert all(torch.equal(one, read[0]) for one in read)
    if mode is Mode.LOSSLESS:
        assert torch.equal(read[0], bits(kv))


small = st.tuples(st.integers(1, 2), st.just(1), st.integers(1, 40), st.integers(1, 70))


@settings(max_examples=20, deadline=None)
@given(small, st.sampled_from(DTYPES), st.sampled_from(OF_THEIR_OWN), st.floats(0.05, 3.0), st.integers(0, 10**6))
def test_who_reads_the_document_decodes_the_same(
    shape: tuple[int, ...], dtype: torch.dtype, mode: Mode, step: float, seed: int
) -> None:
    """And errors are at most half a step, and half an ulp: of every finite value, whatever else is in its chunk."""
    kv = kv_of(shape, dtype, seed)
    (stream,) = streams.encode(kv, settings_for(mode, kv, step))
    other = another_decoder.decode(bytes(stream))
    out = decoded([stream], kv, mode)[:, 0]
    width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    back = out.contiguous().view(width).to(torch.int64)
    exact = torch.from_numpy(other.exact)
    assert torch.equal(back[exact], torch.from_numpy(other.bits.astype("int64"))[exact])
    assert torch.equal(back[exact], kv[:, 0].contiguous().view(width).to(torch.int64)[exact])
    rounded = torch.from_numpy(other.values).to(dtype)
    assert torch.equal(out[~exact].float(), rounded[~exact].float())
    if mode is Mode.STEP:
        info = torch.finfo(dtype)
        half_ulp = (out.double().abs() + info.smallest_normal) * info.eps / 2
        off = (out.double() - kv[:, 0].double()).abs()
        bound = torch.from_numpy(other.steps) / 2 * (1 + 2**-14) + half_ulp
        assert bool((off <= bound)[~exact].all())


@pytest.mark.parametrize("mode", OF_THEIR_OWN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", [[0.0], [1.5], [float("nan")], [float("-inf")], [1e-40], [0.0, -0.0], [3.0, -3.0]])
def test_tiles_of_few_values(mode: Mode, dtype: torch.dtype, values: list[float]) -> None:
    kv = torch.tensor(values).repeat(2 * 2 * 5 * 16)[: 2 * 2 * 5 * 16].view(2, 2, 5, 16).to(dtype)
    out = decoded(streams.encode(kv, settings_for(mode, kv)), kv, mode)
    if mode is Mode.LOSSLESS or len(values) == 1:
        assert torch.equal(bits(out), bits(kv))


GOLDEN = {
    Mode.STEP: "15c5dce8b9588761da141fe5712de940681eb519cf0d16dd960a04c8b3e832b5",
    Mode.LOSSLESS: "bcf0050f4e8a357282fe1e40e69e047b8e9db6293c097889b744d9ee12144417",
    Mode.KLT: "472625ee5af7c354f003cbdc53682c91d5aae790578b2e5f7cead5844f48d0e1",
    Mode.CACHEGEN: "73207e6090f9028b417f8cb3cb3d812d92a279c42d57a1e45d6bad4fa3813425",
}


def golden_profile() -> Profile:
    """A profile of whole numbers and given rotations, so that no library's rounding affects it."""
    numbers = torch.arange(96 * 96).view(96, 96)
    turn = torch.tensor([0.6, 0.8]).expand(24, 24, 2)
    components = ((numbers * 7919 % 1009) % 255 - 127).to(torch.int8)
    transform = Transform(
        torch.zeros(2, 1, 96), torch.ones(2, 1, 96), torch.full((2, 1), 4.0), ((components,),) * 2,
        ((torch.full((96,), 3, dtype=torch.uint8),),) * 2,
    )  # fmt: skip
    return Profile("golden", "golden", 2, 1, 96, 48, 0, torch.ones(1, 96), 48, False, turn.contiguous(), transform)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_machine_writes_these_bytes(mode: Mode) -> None:
    """Equal KV is stored alike on every machine. Steps may change from release to release, what they mean may not."""
    numbers = torch.arange(2 * 1 * 70 * 96).view(2, 1, 70, 96)
    kv = ((numbers * 7919 % 1009 + numbers * 104_729 % 907 - 958) * (numbers % 96 + 5) / 16384).to(torch.bfloat16)
    how = settings_for(mode, kv)
    if mode is Mode.KLT:
        how = replace(how, profile=NativeProfile(golden_profile()))
    (stream,) = streams.encode(kv, how, start=77)
    assert hashlib.sha256(stream).hexdigest() == GOLDEN[mode]


OLDER = base64.b64decode(
    "S1ZaMQEBAQIMAAAAEAAAABAAAAECAAAAAAAAAGwBAAArAABAUQAAYHgwomKSzxWbhgoDAM09AQB+zQMAYvQJACSMFwCtcyUAYkslAP+GFwDWAT"
    "AAMn06AIdE9ACCLKgAlku/ATA3fAKBg4OEhYWGhoeHh4iIiYmJAAAAAAAAAAAAAAAAAP8AAB8fISEhIyMjIyMlJSUlJycSgbEA1ovmFGwsUJTE"
    "L5vT+Tb6pXk/hY+MQsdRKApfsYl6QepXjcJ8WKieSyl/sJqmsV39UTRzgweC4mDKUw8AJJ+WAZwNmQGiAhwMD20wSk88AQDiCwMAaIMGAOcBMA"
    "DGXSUARjG2AP6IoQFdQM0CxldXBVJ3kwZm8okQhwAAAAAAAAAAAQAAAAAAAAAXGxsdHyEhISUjJScnJycpAMdWfa4CocRS/GJniU0gu8NSe6tO"
    "9+2g5/5Vomq9g0SnXUK+e3M7prHp8cVDXt995geChFWKhA=="
)
"""A stream of mode `STEP` by the first encoder, which had other steps."""


def test_streams_of_older_encoders_are_read() -> None:
    back = torch.empty(2, 1, 12, 16, dtype=torch.bfloat16)
    streams.decode([OLDER], back, Mode.STEP)
    digest = hashlib.sha256(bits(back).numpy().tobytes()).hexdigest()
    assert digest == "bd2eca1352be56afc847b3521993c32bb4d67f5190a5ae4c02e96ca796325b2c"


LENGTHS = st.integers(16, 300).filter(lambda tokens: not 0 < tokens % 256 < 4)
"""Blocks of fewer than four tokens come back as they were, sinks or not."""


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 2), LENGTHS, st.integers(32, 100), st.integers(0, 4), st.integers(0, 10**6))
def test_attention_sinks_come_back_as_they_were(planes: int, tokens: int, hidden: int, sinks: int, seed: int) -> None:
    """Tokens whose V is small, in K too, if they are few in a block of 256 tokens and there are both."""
    chance = torch.Generator().manual_seed(seed)
    kv = torch.randn(planes, 2, tokens, hidden, generator=chance)
    kv += 4 * torch.ones(hidden)  # No other token has a V that is small by chance.
    where = torch.randperm(min(tokens, 256), generator=chance)[:sinks]
    kv[-1, 0, where] *= 0.2
    kv = kv.to(torch.bfloat16)
    back = decoded(streams.encode(kv, settings_for(Mode.STEP, kv)), kv, Mode.STEP)
    kept = (back == kv).all(-1).all(0)
    few = planes == 2 and len(where) <= min(tokens, 256) // 16
    assert set(kept[0].nonzero().flatten().tolist()) >= set(where.tolist()) if few else not kept[0].any()
    assert kept.sum() == (len(where) if few else 0)


def test_steps_of_k_are_finer_than_those_of_v() -> None:
    kv = torch.randn(2, 1, 256, 128, generator=torch.Generator().manual_seed(1))
    kv[0, ..., 5] *= 20
    off = (decoded(streams.encode(kv, settings_for(Mode.STEP, kv)), kv, Mode.STEP) - kv).square().mean(2).sqrt()[:, 0]
    assert 1.8 < off[1].mean() / off[0].median() < 2.2
    assert 6 < off[0, 5] / off[0].median() < 12, "a channel of K that deviates by far more has a coarser step"


def test_long_chunks() -> None:
    kv = kv_of((2, 1, 65_535, 4), torch.bfloat16, 1)
    for mode in OF_THEIR_OWN:
        how = settings_for(mode, kv)
        out = decoded(streams.encode(kv, how), kv, mode)
        assert torch.equal(out.isnan(), kv.isnan())


def test_bytes_of_any_type_come_back() -> None:
    for dtype in (torch.float64, torch.int8, torch.uint8):
        kv = (torch.randn(2, 3, 50, 40, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
        how = Settings(Mode.LOSSLESS)
        assert torch.equal(decoded(streams.encode(kv, how), kv, Mode.LOSSLESS), kv)


def test_layers_may_be_views_of_a_larger_tensor() -> None:
    whole = kv_of((2, 6, 40, 64), torch.bfloat16, 2)
    part = whole[:, 2:5]
    how = settings_for(Mode.STEP, part)
    blob = streams.encode(part, how)
    assert [bytes(each) for each in blob] == [bytes(each) for each in streams.encode(part.contiguous(), how)]
    into = torch.zeros_like(whole)
    streams.decode(blob, into[:, 2:5], Mode.STEP)
    assert not bits(into[:, :2]).any() and not bits(into[:, 5:]).any()
    assert torch.equal(bits(into[:, 2:5]), bits(decoded(blob, part, Mode.STEP)))


# -- bad bytes ---------------------------------------------------------------------------------------------------------


def outcome(blob: bytes, kv: torch.Tensor, how: Settings) -> bytes | None:
    """The decoded bytes, None if it is refused. All processors agree, and write nothing beside."""
    said = set()
    for which in SETS:
        room = torch.full((kv.nbytes + 128,), 0x5A, dtype=torch.uint8)
        into = room[64:-64].view(kv.dtype).view(kv.shape)
        try:
            streams.decode([blob], into, how.mode, profile=how.profile, with_instructions=which)
            said.add(bytes(bits(into).numpy()))
        except (CorruptBlobError, UnreadableBlobError) as error:
            said.add(str(error).encode())
        assert bool((room[:64] == 0x5A).all()) and bool((room[-64:] == 0x5A).all())
    assert len(said) == 1
    (one,) = said
    return None if one.startswith(b"stream 0") else one


@pytest.mark.parametrize("mode", list(Mode))
def test_what_is_cut_short_is_refused(mode: Mode) -> None:
    kv = kv_of((2, 1, 20, 66), torch.bfloat16, 3, odd=mode is not Mode.KLT)
    how = settings_for(mode, kv)
    (stream,) = streams.encode(kv, how, start=5)
    blob = bytes(stream)
    assert outcome(blob, kv, how) is not None
    short = [blob[:length] for length in (*range(64), *range(64, len(blob), 3))]
    assert all(outcome(each, kv, how) is None for each in [*short, blob + b"\0", blob + bytes(4)])


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_flipped_bits_do_no_harm(mode: Mode, dtype: torch.dtype) -> None:
    """Nearly all flips in rANS words are detected; the rest, and raw bits, are left to the checksum of
    the container."""
    kv = kv_of((2, 1, 20, 40), dtype, 4, odd=mode is not Mode.KLT)
    how = settings_for(mode, kv)
    (stream,) = streams.encode(kv, how, start=5)
    blob = bytearray(stream)
    whole = outcome(bytes(blob), kv, how)
    for place in (*range(64), *range(64, len(blob), 3)):
        for bit in range(8) if place < 64 else (place % 8,):
            blob[place] ^= 1 << bit
            made = outcome(bytes(blob), kv, how)
            assert made is None or place >= 32 or made == whole, f"bit {bit} of byte {place}"
            blob[place] ^= 1 << bit


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=400), st.sampled_from(list(Mode)), st.booleans())
def test_random_bytes_do_no_harm(noise: bytes, mode: Mode, plausible: bool) -> None:
    kv = torch.zeros((2, 1, 3, 40), dtype=torch.bfloat16)
    how = settings_for(mode, kv)
    blob = bytearray(noise)
    if plausible:
        if how.profile is not None:  # that it is the right one, and two blocks of 20 components
            blob[:0] = how.profile.id + struct.pack("<iHHHH", 0, 20, 140, 20, 140)
        band, tokens, tiles = (0, 0, 2) if mode is Mode.LOSSLESS else (40, 256, 2)
        tables = {Mode.LOSSLESS: len(noise) // 8 * 4, Mode.CACHEGEN: 4 + 12, Mode.KLT: 28, Mode.STEP: 0}[mode]
        blob[:0] = struct.pack(
            "<4sBBBBIIHHIII", b"KVZ1", 1, mode, 1, 2, 3, 40, band, tokens, tiles, tables, 32 + len(blob)
        )
    outcome(bytes(blob), kv, how)


def test_another_geometry_is_refused() -> None:
    kv = kv_of((2, 1, 20, 40), torch.bfloat16, 5)
    (stream,) = streams.encode(kv, settings_for(Mode.STEP, kv))
    for shape, dtype in (
        ((2, 1, 20, 41), torch.bfloat16), ((2, 1, 21, 40), torch.bfloat16), ((1, 1, 20, 40), torch.bfloat16),
        ((2, 1, 40, 20), torch.bfloat16), ((2, 1, 20, 40), torch.float16),
    ):  # fmt: skip
        with pytest.raises(CorruptBlobError, match="of another geometry"):
            streams.decode([stream], torch.zeros(shape, dtype=dtype), Mode.STEP)
    with pytest.raises(CorruptBlobError, match="1 streams for 2 layers"):
        streams.decode([stream], torch.zeros((2, 2, 20, 40), dtype=torch.bfloat16), Mode.STEP)


@pytest.mark.parametrize("shape", [(3, 1, 4, 16), (1, 1, 1 << 16, 1 << 14)])
def test_what_cannot_be_encoded_is_not_decoded(shape: tuple[int, ...]) -> None:
    """Three planes; a gigabyte a layer."""
    kv = torch.empty(shape, dtype=torch.uint8)
    with pytest.raises(ValueError, match="cannot be made"):
        streams.encode(kv, Settings(Mode.LOSSLESS))
    with pytest.raises(CorruptBlobError, match="no streams can be"):
        streams.decode([b"anything"], kv, Mode.LOSSLESS)


def test_latents_share_a_step_and_rotated_keys_have_their_own() -> None:
    """MLA: 512 channels of a latent, which is like V, and 64 of keys with their position."""
    kv = kv_of((1, 2, 80, 576), torch.bfloat16, 7, odd=False)
    one = CacheGenSerializer(CacheGenSerializer.Config())
    blob = one.encode(Chunk(kv, MemoryFormat.KV_BLOB, 80))
    for layer, stream in enumerate(blob):
        other = another_decoder.decode(bytes(stream))
        steps = torch.from_numpy(other.steps[0, 0])
        assert len(steps[:512].unique()) <= 4  # of a step that is shared, and bands whose means it could not name
        assert len(steps[512:].unique()) > 4
        out = Chunk(torch.zeros_like(kv), MemoryFormat.KV_BLOB, 80)
        one.decode(blob, out)
        off = (out.tensor[0, layer].double() - kv[0, layer].double()).abs()
        assert bool((off <= torch.from_numpy(other.steps[0]) / 2 * 1.01 + kv[0, layer].double().abs() / 256).all())


def test_the_same_symbols_as_lmcache() -> None:
    """`cachegen`: levels of a token are round(x * half / most + half), where half is half the bins less one.

    But levels so rare in a channel that they would cost more than their bits come back as they were.
    """
    kv = kv_of((2, 12, 30, 64), torch.bfloat16, 6, odd=False)
    how = settings_for(Mode.CACHEGEN, kv)
    out = decoded(streams.encode(kv, how), kv, Mode.CACHEGEN)
    for layer, (key_bins, value_bins) in enumerate(how.bins):
        for plane, bins in enumerate((key_bins, value_bins)):
            half = torch.tensor(bins // 2 - 1, dtype=torch.float32)
            x = kv[plane, layer].float()
            most = x.abs().amax(-1, keepdim=True)
            levels = torch.round(x * (half / most) + half)
            expected = ((levels - half) / half * most).to(torch.bfloat16)
            same, exact = out[plane, layer] == expected, out[plane, layer] == kv[plane, layer]
            assert bool((same | exact).all()) and same.float().mean() > 0.99, f"layer {layer}, plane {plane}"


def test_kv_that_is_not_contiguous_is_refused() -> None:
    kv = kv_of((2, 2, 20, 40), torch.bfloat16, 10, odd=False)
    how = settings_for(Mode.STEP, kv)
    blob = streams.encode(kv, how)
    for other in (kv.transpose(2, 3), kv[..., ::2], kv[:1, :, :1].expand(2, 2, 20, 40)):
        with pytest.raises(ValueError, match="not contiguous"):
            streams.encode(other, how)
        with pytest.raises(ValueError, match="not contiguous"):
            streams.decode(blob, other, Mode.STEP)
