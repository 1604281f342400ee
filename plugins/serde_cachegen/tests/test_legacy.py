"""LMCache's names for CacheGen: its quantiser, and round trips through what stands for its outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_streams import bits, kv_of

from kvloom import CorruptBlobError
from kvloom_serde_cachegen import container, legacy
from kvloom_serde_cachegen.bins import CacheGenConfig, QuantizationSpec
from kvloom_serde_cachegen.legacy import CacheGenEncoderOutput

CONFIG = CacheGenConfig(3, [QuantizationSpec(0, 1, 32), QuantizationSpec(1, 3, 16)], [QuantizationSpec(0, 3, 16)])


def kv(tokens: int = 50, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """`[layers, 2, tokens, heads, head_size]`"""
    return kv_of((2, 3, tokens, 2 * 32), dtype, seed, odd=False).transpose(0, 1).unflatten(3, (2, 32))


def groups(plane: int, seed: int = 0) -> torch.Tensor:
    """`[layers, tokens, channels]`"""
    return kv(seed=seed)[:, plane].flatten(2)


def test_bins_by_layer() -> None:
    assert legacy.make_key_bins(CONFIG).tolist() == [32, 16, 16]
    assert legacy.make_value_bins(CONFIG).tolist() == [16, 16, 16]


@given(st.integers(4, 63), st.integers(0, 1000))
def test_levels_about_zero(bins: int, seed: int) -> None:
    x = groups(0, seed)[0].float()
    x[3] = 0
    levels, most = legacy.torch_quant(bins, x)
    half = bins // 2 - 1
    assert levels.dtype == torch.float32 and most.shape == (50, 1)
    assert torch.equal(levels.abs().amax(-1)[x.any(-1)].unique(), torch.tensor([float(half)]))
    assert ((legacy.quant(bins, levels, most) - x).abs() <= most / half / 2 * 1.0001).all()
    assert not levels[3].any()


def test_levels_of_layers_with_their_own_bins() -> None:
    bins, x = legacy.make_key_bins(CONFIG), groups(0).float()
    x[1, 4] = 0
    levels, most = legacy.torch_quant_vectorized(bins, x)
    assert levels.dtype == torch.int8 and most.shape == (3, 50, 1)
    assert levels.amin((1, 2)).min() >= 0 and levels.amax((1, 2)).tolist() == [30, 14, 14]
    for layer, count in enumerate(bins.tolist()):
        own, own_most = legacy.torch_quant(count, x[layer])
        off = own + count // 2 - 1 - levels[layer]
        assert torch.equal(own_most, most[layer])
        assert off.abs().max() <= 1 and off.count_nonzero() < 0.02 * off.numel(), "ties go to what is even"
    back = legacy.do_dequantize(levels, bins, most)
    half = (bins // 2 - 1)[:, None, None]
    assert ((back - x).abs() <= most / half / 2 * 1.0001).all() and not back[1, 4].any()
    assert torch.equal(legacy.concat_max({2: most[2], 0: most[0], 1: most[1]}), most)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_what_is_decoded_is_what_its_quantiser_says(tokens: int, chunk_size: int, dtype: torch.dtype) -> None:
    """Or the value itself, of levels that are so rare in a channel that they would cost more than its bits."""
    source = kv(tokens, dtype)
    output = legacy.encode_function(source, CONFIG, chunk_size)
    assert [chunk.ntokens for chunk in output.data_chunks] == [len(p) for p in torch.arange(tokens).split(chunk_size)]
    for plane, (decoded, bins, scales) in enumerate(
        zip(
            legacy.decode_function(output),
            (legacy.make_key_bins(CONFIG), legacy.make_value_bins(CONFIG)),
            (output.max_tensors_key, output.max_tensors_value),
            strict=True,
        )
    ):
        x = source[:, plane].flatten(2)
        levels, most = legacy.torch_quant_vectorized(bins, x)
        assert torch.equal(scales, most)
        expected = legacy.do_dequantize(levels, bins, most.float()).to(dtype)
        assert decoded.shape == x.shape and ((decoded == expected) | (decoded == x)).all()


def test_outputs_come_back_from_bytes() -> None:
    output = legacy.encode_function(kv(), CONFIG, 20)
    again = CacheGenEncoderOutput.from_bytes(output.to_bytes())
    assert (again.num_heads, again.head_size, again.dtype) == (2, 32, torch.bfloat16)
    assert again.nlayers == 3 and again.ntokens == 50 and again.bytestream == output.bytestream
    for one, other in zip(legacy.decode_function(output), legacy.decode_function(again), strict=True):
        assert torch.equal(one, other)
    starts = output.start_indices
    assert starts.shape == (3, 3)
    assert all(output.bytestream[start : start + 4] == b"KVZ1" for start in starts.flatten().tolist())
    (single,) = legacy.encode_function(kv(), CONFIG, 50).data_chunks
    target = legacy.get_output_buffer(3, 64, 50, torch.bfloat16)
    legacy.decode_chunk(single, target)
    whole = container.from_bytes(legacy.encode_function(kv(), CONFIG, 50).to_bytes())
    assert torch.equal(bits(target), bits(whole.flatten(0, 1)))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"heads": 2},
        {"heads": 0, "chunks": [20, 20, 10]},
        {"heads": 3, "chunks": [20, 20, 10]},
        {"heads": 2.0, "chunks": [20, 20, 10]},
        {"heads": 2, "chunks": [20, 20, 11]},
        {"heads": 2, "chunks": [20, 30]},
        {"heads": 2, "chunks": [60, -20, 10]},
        {"heads": 2, "chunks": [50, 0, 0]},
        {"heads": 2, "chunks": "abc"},
        {"heads": 2, "chunks": [20, 20.0, 10]},
    ],
    ids=str,
)
def test_lies_about_chunks_are_refused(params: dict[str, Any]) -> None:
    output = legacy.encode_function(kv(), CONFIG, 20)
    streams = [stream for chunk in output.data_chunks for stream in legacy.recombine_bytes(chunk)]
    blob = container.pack(streams, (2, 3, 50, 64), torch.bfloat16, params=params)
    with pytest.raises(CorruptBlobError, match=r"^byte 112: not the chunks"):
        CacheGenEncoderOutput.from_bytes(blob)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float64], ids=str)
def test_a_dtype_that_has_no_levels_is_refused(dtype: torch.dtype) -> None:
    blob = container.pack([b"stream"], (2, 1, 1, 1), dtype, params={"heads": 1, "chunks": [1]})
    with pytest.raises(CorruptBlobError, match=r"^byte 112: not the chunks"):
        CacheGenEncoderOutput.from_bytes(blob)


def test_damage_is_refused() -> None:
    output = legacy.encode_function(kv(), CONFIG, 20)
    blob = bytearray(output.to_bytes())
    for place in range(0, len(blob), 7):
        blob[place] ^= 1
        with pytest.raises(CorruptBlobError, match=r"^byte \d+"):
            CacheGenEncoderOutput.from_bytes(blob)
        blob[place] ^= 1
    chunk = output.data_chunks[0]
    for lengths in ([1, 2, 3], [-1, *(chunk.bytestream_lengths + 1).tolist()[1:]], []):
        with pytest.raises(CorruptBlobError, match="streams of"):
            legacy.recombine_bytes(dataclasses.replace(chunk, bytestream_lengths=torch.tensor(lengths)))
    swapped = [dataclasses.replace(chunk, ntokens=21), *output.data_chunks[1:]]
    with pytest.raises(CorruptBlobError, match="of another geometry"):
        legacy.decode_function(dataclasses.replace(output, data_chunks=swapped))
    other = container.to_bytes(kv_of((2, 3, 50, 64), torch.bfloat16, 0))
    streams = container.unpack(other)[1]
    with pytest.raises(CorruptBlobError, match="no scales"):
        _ = dataclasses.replace(output, data_chunks=[legacy.collect_bytes(streams, 50)]).max_tensors_value


def test_bins_for_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="bins for 32 layers"):
        legacy.encode_function(kv(), CacheGenConfig.for_layers(32), 20)
    with pytest.raises(ValueError, match="chunk_size 0"):
        legacy.encode_function(kv(), CONFIG, 0)
