"""The tools behind the codec's quality tables: sizes are counted right, and other codecs' values are reproduced."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zstandard")
pytest.importorskip("transformers")
pytest.importorskip("kvloom_eval.peers")
import codec_page
from codec_models import subjects

from kvloom import PluginError, native
from kvloom_eval import peers
from kvloom_serde_cachegen.bins import CacheGenConfig

LAYERS, TOKENS, HIDDEN, HEAD = 3, 64, 128, 64
VALUES = 2 * LAYERS * TOKENS * HIDDEN


def kv_of(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(HIDDEN, generator=generator) * 3 + 0.1
    return (torch.randn(2, LAYERS, TOKENS, HIDDEN, generator=generator) * scales).to(torch.bfloat16)


def written_bits(stream: list[int], table: list[int]) -> list[int]:
    """The textbook's coder: bits that straddle the middle wait until the next one is known."""
    low, high, waiting, out = 0, 2**32 - 1, 0, []

    def write(bit: int) -> None:
        nonlocal waiting
        out.extend([bit] + [1 - bit] * waiting)
        waiting = 0

    for symbol in stream:
        span = high - low + 1
        low, high = low + (span * table[symbol] >> 16), low + (span * table[symbol + 1] >> 16) - 1
        while True:
            if high < 2**31 or low >= 2**31:
                write(low >> 31)
                low, high = low << 1 & 0xFFFFFFFF, (high << 1 | 1) & 0xFFFFFFFF
            elif low >= 2**30 and high < 3 * 2**30:
                waiting += 1
                low, high = 2 * (low - 2**30), 2 * (high - 2**30) + 1
            else:
                break
    waiting += 1
    write(int(low >= 2**30))
    return out


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(0, 10**6))
def test_arithmetic_coded_bytes_are_those_that_a_coder_writes(stream: list[int], seed: int) -> None:
    skewed = np.random.default_rng(seed).geometric(0.4, len(stream)).clip(max=31) - 1
    streams = np.stack([np.array(stream), skewed]).astype(np.uint8)
    tables = peers.lmcache_tables(streams).tolist()
    written = [
        math.ceil(len(written_bits(each.tolist(), table)) / 8) for each, table in zip(streams, tables, strict=True)
    ]
    assert peers.arithmetic_coded_bytes(streams).tolist() == written


def test_tables_of_lmcache_leave_room_for_what_does_not_occur() -> None:
    (table,) = peers.lmcache_tables(np.array([[3, 3, 3, 7]], dtype=np.uint8))
    assert len(table) == 33 and table[0] == 0 and table[-1] == 0xFFFF
    widths = np.diff(table)
    assert widths.min() == 1 and widths[3] == (0xFFFF - 32) * 3 // 4 + 1


@pytest.mark.parametrize(
    ("codec", "bits", "most"),
    [
        (peers.raw, 16.0, 0.0),
        (peers.fp8, 8.0, 0.04),
        (peers.int8(HEAD), 8 + 16 / HEAD, 0.01),
        (peers.int4(HEAD), 4 + 32 / HEAD, 0.15),
        (peers.kivi(4), 5.0, 0.15),
        (peers.kivi(2), 3.0, 0.6),
    ],
)
def test_codecs_of_a_fixed_rate_take_that_and_are_as_exact_as_it_allows(codec: Any, bits: float, most: float) -> None:
    kv = kv_of()
    back, size = codec(kv, 0)
    assert (back.shape, back.dtype, size * 8) == (kv.shape, kv.dtype, bits * VALUES)
    error = ((back.float() - kv.float()).square().sum() / kv.float().square().sum()).sqrt()
    assert most / 4 <= error <= most


@pytest.mark.parametrize("planes", [False, True])
def test_zstd_counts_what_it_made(planes: bool) -> None:
    kv = torch.zeros_like(kv_of())
    assert peers.zstd(3, planes=planes)(kv, 0)[1] < 200
    noise = torch.randint(-(2**15), 2**15, kv.shape, dtype=torch.int16).view(torch.bfloat16)
    assert peers.zstd(3, planes=planes)(noise, 0)[1] > 2 * VALUES


def test_kivi_scales_keys_by_channel_and_values_by_token() -> None:
    kv = kv_of()
    kv[0, :, :, 5] = 1000.0
    kv[1, :, 7] = 1000.0
    back, _ = peers.kivi(4)(kv, 0)
    error = (back.float() - kv.float()).abs()
    assert error[0].max() < 2.0 and error[1].max() < 2.0


def test_kivi_keeps_keys_that_fill_no_group() -> None:
    kv = kv_of()[:, :, :50]
    back, size = peers.kivi(2)(kv, 0)
    assert torch.equal(back[0, :, 32:], kv[0, :, 32:]) and not torch.equal(back[0, :, :32], kv[0, :, :32])
    assert torch.equal(back[:, :, :32], peers.kivi(2)(kv[:, :, :32], 0)[0])
    per_value, rest = 3 / 8, LAYERS * 18 * HIDDEN
    assert size == per_value * (kv.numel() - rest) + 2 * rest


def test_cachegen_is_lmcaches_without_its_tables() -> None:
    try:
        native.load("kvloom_serde_cachegen", "kvz")
    except PluginError as missing:
        pytest.skip(str(missing))
    from codec_quality import streamed

    from kvloom_serde_cachegen.streams import Mode, Settings

    kv = kv_of()
    bins = CacheGenConfig.for_layers(LAYERS).by_layer()
    theirs, size = peers.lmcache_cachegen(bins)(kv, 0)
    ours, smaller = streamed(Settings(Mode.CACHEGEN, 128, bins=bins))(kv, 0)
    assert torch.equal(ours, theirs)
    tables, lengths, scales = 33 * 2 * HIDDEN, 4 * HIDDEN, 2 * TOKENS
    assert size > 2 * LAYERS * (tables + lengths + scales)
    assert smaller < size - 2 * LAYERS * (tables + lengths) + 2 * LAYERS * 5 * HIDDEN


def test_outliers_change_keys_and_no_prediction() -> None:
    from transformers import AutoModelForCausalLM

    plain, planted = (AutoModelForCausalLM.from_pretrained(subjects.PYLM, dtype=torch.float32) for _ in range(2))
    subjects.plant_outliers(planted)
    ids = torch.arange(40)[None] * 37 % 4096
    with torch.no_grad():
        first, second = plain(ids, use_cache=True), planted(ids, use_cache=True)
    torch.testing.assert_close(first.logits, second.logits, rtol=1e-3, atol=1e-3)
    ratio = second.past_key_values.layers[3].keys / first.past_key_values.layers[3].keys
    factors = ratio.median(dim=2).values.round().flatten().tolist()
    assert sorted(set(factors)) == [1.0, 4.0, 10.0]
    assert (factors.count(10.0), factors.count(4.0)) == (2 * 2 * 2, 2 * 2 * 4)


def test_bits_at_a_kl_lie_between_the_steps_of_that_curve() -> None:
    def row(bits: float, kl: float) -> dict[str, Any]:
        return {"mean": {"bits_per_value": bits, "kl": kl}}

    codecs = {
        "step 0.5": row(3.0, 1e-3), "step 0.25": row(4.0, 1e-5), "step 0.5, profile": row(2.0, 1e-4),
        "step 0.5, each channel": row(9.0, 1e-4),
    }  # fmt: skip
    assert codec_page.curve(codecs, "step") == [(3.0, 1e-3), (4.0, 1e-5)]
    assert codec_page.bits_at(codecs, "step", 1e-4) == pytest.approx(3.5)
    assert codec_page.bits_at(codecs, "step", 1e-2) == 3.0
    assert math.isnan(codec_page.bits_at(codecs, "step", 1e-6))
