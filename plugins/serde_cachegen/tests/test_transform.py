"""The mode `klt`: the same on every processor, as the document says, near what went in; nothing without its profile."""

from __future__ import annotations

import struct
from dataclasses import replace

import another_decoder
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import profile_like
from test_streams import DTYPES, SETS, bits, decoded, kv_of, settings_for

from kvloom import UnreadableBlobError
from kvloom_serde_cachegen import streams
from kvloom_serde_cachegen.native_profile import NativeProfile
from kvloom_serde_cachegen.profile import Profile
from kvloom_serde_cachegen.streams import Mode, Settings

heads = st.sampled_from([(1, 32), (1, 34), (2, 16), (2, 40), (3, 24), (2, 66), (5, 64)])


@settings(max_examples=20, deadline=None)
@given(
    heads, st.integers(1, 2), st.integers(1, 300), st.integers(8, 130), st.integers(0, 1 << 24),
    st.sampled_from(DTYPES), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.sampled_from([1.0, 4.0, 32.0]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_every_processor_and_who_reads_the_document_agree(
    shape: tuple[int, int], planes: int, tokens: int, band: int, start: int, dtype: torch.dtype, rotary: float,
    interleaved: bool, sigma: float, seed: int,
) -> None:  # fmt: skip
    heads, size = shape
    kv = kv_of((planes, 1, tokens, heads * size), dtype, seed, odd=sigma < 4.0)
    profile = profile_like(kv, heads=heads, rotary=rotary, interleaved=interleaved, sigma=sigma, seed=seed)
    how = Settings(Mode.KLT, min(band, kv.shape[-1]), 0, 0.5, profile=NativeProfile(profile))
    blobs = [[bytes(each) for each in streams.encode(kv, how, start=start, with_instructions=which)] for which in SETS]
    assert all(blob == blobs[0] for blob in blobs)
    read = [decoded(blobs[0], kv, Mode.KLT, which, how.profile) for which in SETS]
    assert all(torch.equal(bits(one), bits(read[0])) for one in read)
    if tokens > 40:
        return  # the other decoder is slow
    other = another_decoder.decode(blobs[0][0], profile)
    summed = torch.from_numpy(other.transformed)
    largest = torch.finfo(dtype).max
    expected = torch.from_numpy(other.values).clamp(-largest, largest).to(dtype)
    assert torch.equal(read[0][:, 0][summed].float(), expected[summed].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "size", "tokens"), [(5, 206, 67), (2, 66, 131), (5, 14, 90)])
def test_products_are_alike_with_components_at_the_limits_of_a_byte(
    heads: int, size: int, tokens: int, dtype: torch.dtype
) -> None:
    """More channels and tokens than are multiplied at once, no multiples of any vector, and sums that fill 16 bits."""
    hidden = heads * size
    generator = torch.Generator().manual_seed(tokens)
    profile = profile_like(torch.empty(1, 1, tokens, hidden), heads=heads, rotary=0.0, sigma=1.0)
    assert profile.transform is not None
    components, exponents = profile.transform.bases[0][0], profile.transform.exponents[0][0]
    rank = len(exponents)
    limits = torch.tensor([1, -1, 2, 63, -64, 65, 126, 127, -127, 128, -128, 129, 300])
    wanted = limits[torch.randint(len(limits), (tokens, rank), generator=generator)]
    wanted[torch.rand(tokens, rank, generator=generator) < 0.96] = 0
    basis = components.double() / 127 * 2.0 ** -exponents[:, None].double()
    kv = 0.5 * wanted.double() @ basis / profile.transform.scales[0] + profile.transform.means[0]
    kv = kv.to(dtype)[None, None]
    how = Settings(Mode.KLT, min(40, hidden), 0, 0.5, profile=NativeProfile(profile))
    blobs = [[bytes(each) for each in streams.encode(kv, how, start=0, with_instructions=which)] for which in SETS]
    assert struct.unpack_from("<2H", blobs[0][0], 52)[1] > 0, "it is not transformed"
    assert all(blob == blobs[0] for blob in blobs)
    read = [bits(decoded(blobs[0], kv, Mode.KLT, which, how.profile)) for which in SETS]
    assert all(torch.equal(one, read[0]) for one in read)


def test_blocks_without_components_are_the_means() -> None:
    profile = profile_like(torch.empty(1, 1, 70, 64), rotary=0.0)
    assert profile.transform is not None
    kv = profile.transform.means[:, :, None].expand(1, 1, 70, 64).contiguous()
    how = Settings(Mode.KLT, 64, 0, 0.5, profile=NativeProfile(profile))
    blob = streams.encode(kv, how, start=0)
    for which in SETS:
        decoded(streams.encode(kv + 1, how, start=0), kv, Mode.KLT, which, how.profile)  # leaves sums in memory
        assert torch.equal(decoded(blob, kv, Mode.KLT, which, how.profile), kv)


def transformed(kv: torch.Tensor, profile: Profile, step: float, start: int | None = 0) -> tuple[torch.Tensor, int]:
    how = Settings(Mode.KLT, min(128, kv.shape[-1]), 0, step, profile=NativeProfile(profile))
    blob = streams.encode(kv, how, start=start)
    return decoded(blob, kv, Mode.KLT, profile=how.profile), sum(map(len, blob))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 256, 100_000, (1 << 24) - 100])
def test_errors_have_the_energy_of_the_steps(start: int, interleaved: bool) -> None:
    """With all directions at hand, noise is that of rounding to steps, wherever in the sequence the chunk is."""
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn((2, 2, 100, 128), generator=generator)
    profile = profile_like(kv, heads=2, interleaved=interleaved, sigma=1.0)
    assert profile.transform is not None
    profile = replace(
        profile, transform=replace(profile.transform, means=torch.zeros(2, 2, 128), scales=torch.ones(2, 2, 128))
    )
    for step in (0.375, 0.5):
        out, _ = transformed(kv, profile, step, start)
        assert float((out - kv).square().mean().sqrt()) == pytest.approx(step / 12**0.5, rel=0.05)


def test_what_all_heads_have_in_common_is_kept_once() -> None:
    """KV of few directions, K with its positions rotated in: bits go with the directions, not with the channels."""
    generator = torch.Generator().manual_seed(2)
    kv = torch.zeros((2, 1, 256, 256))
    profile = profile_like(kv, heads=4, sigma=1.0)
    assert profile.transform is not None
    few = torch.randn((2, 256, 16), generator=generator) * 3
    exponents = profile.transform.exponents
    for plane in range(2):
        unit = profile.transform.bases[plane][0][:16].float() / 127 * 2.0 ** -exponents[plane][0][:16, None].float()
        kv[plane, 0] = few[plane] @ unit / profile.transform.scales[plane, 0] + profile.transform.means[plane, 0]
    kv[0, 0] = rotated(kv[0, 0], profile, start=1000)
    out, nbytes = transformed(kv, profile, 0.5, start=1000)
    assert nbytes * 8 < 0.5 * kv.numel()
    assert float((out - kv).square().mean()) < 0.01 * float(kv.square().mean())
    wrong, more = transformed(kv, profile, 0.5, start=0)
    assert more > 1.5 * nbytes and float((wrong - kv).square().mean()) < 0.1 * float(kv.square().mean())


def rotated(k: torch.Tensor, profile: Profile, start: int) -> torch.Tensor:
    """By the definition of RoPE, in float64."""
    half = profile.rotary_size // 2
    angles = torch.arange(start, start + len(k), dtype=torch.float64)[:, None] * torch.atan2(
        profile.rotations[0, :, 1].double(), profile.rotations[0, :, 0].double()
    )
    x = k.double().view(len(k), -1, profile.head_size)
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view_as(k).to(k.dtype)


def test_without_a_start_only_values_are_transformed() -> None:
    kv = kv_of((2, 1, 64, 64), torch.bfloat16, 3, odd=False) / 8
    how = settings_for(Mode.KLT, kv)
    step = settings_for(Mode.STEP, kv)
    assert how.profile is not None
    for start in (None, (1 << 24) - 10):
        out = decoded(streams.encode(kv, how, start=start), kv, Mode.KLT, profile=how.profile)
        assert torch.equal(out[0], decoded(streams.encode(kv, step), kv, Mode.STEP)[0])
        assert not torch.equal(out[1], decoded(streams.encode(kv, step), kv, Mode.STEP)[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_blocks_with_values_that_no_model_makes_are_left_to_step(value: float) -> None:
    kv = kv_of((2, 1, 300, 64), torch.bfloat16, 4, odd=False)
    kv[:, :, 280, 5] = value
    how = settings_for(Mode.KLT, kv)
    out = decoded(streams.encode(kv, how, start=0), kv, Mode.KLT, profile=how.profile)
    step = decoded(streams.encode(kv[:, :, 256:], settings_for(Mode.STEP, kv)), kv[:, :, 256:], Mode.STEP)
    assert torch.equal(bits(out[:, :, 256:]), bits(step))
    assert not torch.equal(out[:, :, :256], kv[:, :, :256])


def test_only_the_profile_that_encoded_it_decodes_it() -> None:
    kv = kv_of((2, 2, 40, 64), torch.bfloat16, 5, odd=False)
    how = settings_for(Mode.KLT, kv)
    blob = streams.encode(kv, how, start=0)
    for profile in (None, NativeProfile(profile_like(kv, sigma=4.0, seed=9))):
        with pytest.raises(UnreadableBlobError, match="a profile that is not at hand"):
            decoded(blob, kv, Mode.KLT, profile=profile)
    second = torch.zeros_like(kv[:, 1:])
    streams.decode(blob[1:], second, Mode.KLT, first_layer=1, profile=how.profile)
    assert torch.equal(second, decoded(blob, kv, Mode.KLT, profile=how.profile)[:, 1:])


def test_profiles_that_cannot_transform_are_refused() -> None:
    kv = torch.zeros((1, 1, 1, 64))
    with pytest.raises(ValueError, match="calibrate with --klt"):
        NativeProfile(replace(profile_like(kv), transform=None))
    with pytest.raises(ValueError, match="an even number of channels, not 65"):
        NativeProfile(profile_like(torch.zeros((1, 1, 1, 65)), rotary=0.0))
