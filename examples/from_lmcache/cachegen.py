"""CacheGen's parts, one by one, under LMCache's names.

python examples/from_lmcache/cachegen.py
"""

from __future__ import annotations

import torch

import kvloom_serde_cachegen.bins
import kvloom_serde_cachegen.container
import kvloom_serde_cachegen.serializer
from kvloom import Chunk, KVSpec, MemoryFormat
from kvloom_serde_cachegen import legacy, streams
from kvloom_serde_cachegen.bins import CacheGenConfig, QuantizationSpec
from kvloom_serde_cachegen.legacy import CacheGenBytestream, CacheGenEncoderOutput
from kvloom_serde_cachegen.serializer import CacheGenSerializer

LAYERS, TOKENS, HEADS, SIZE = 32, 64, 2, 32


def quantiser(kv: torch.Tensor, config: CacheGenConfig) -> None:
    bins = legacy.make_key_bins(config)
    assert legacy.make_value_bins(config).shape == bins.shape
    x = kv[:, 0].flatten(2).float()
    levels, most = legacy.torch_quant_vectorized(bins, x)
    off = (legacy.do_dequantize(levels, bins, most) - x).abs().max()
    one, one_most = legacy.torch_quant(32, x[0])
    assert (legacy.quant(32, one, one_most) - x[0]).abs().max() < 0.2 and off < 0.5
    assert torch.equal(legacy.concat_max(dict(enumerate(most))), most)


def outputs(kv: torch.Tensor, config: CacheGenConfig) -> None:
    output = legacy.encode_function(kv, config, TOKENS)
    again = CacheGenEncoderOutput.from_bytes(output.to_bytes())  # no pickle
    assert (again.num_heads, again.head_size) == (HEADS, SIZE) and again.bytestream == output.bytestream
    assert again.max_tensors_key.shape == again.max_tensors_value.shape and again.start_indices.numel()
    key, value = legacy.decode_function(again)
    (chunk,) = again.data_chunks
    assert isinstance(chunk, CacheGenBytestream) and chunk.ntokens == TOKENS
    assert chunk.bytestream_lengths.sum() == chunk.bytestream.numel()
    target = legacy.get_output_buffer(LAYERS, HEADS * SIZE, TOKENS, kv.dtype)
    legacy.decode_chunk(chunk, target)
    parts = legacy.recombine_bytes(chunk)
    assert legacy.collect_bytes(parts, TOKENS).ntokens == TOKENS
    print(
        "K and V", tuple(key.shape), tuple(value.shape), "in", len(again.bytestream), "bytes; tables:", streams.encode
    )


def whole(kv: torch.Tensor) -> None:
    """Encode whole chunks as a tier does, and as self-describing bytes."""
    spec = KVSpec("mistralai/Mistral-7B-Instruct-v0.2", LAYERS, HEADS, SIZE, "bfloat16")
    serializer = CacheGenSerializer(CacheGenSerializer.Config(mode="cachegen"), spec)
    planes = kv.transpose(0, 1).flatten(3).contiguous()
    chunk = Chunk(planes, MemoryFormat.KV_BLOB, TOKENS, start=0)
    blob = serializer.encode(chunk)
    serializer.decode(blob, Chunk(torch.empty_like(planes), MemoryFormat.KV_BLOB, TOKENS, start=0))
    data = kvloom_serde_cachegen.container.to_bytes(planes)
    assert kvloom_serde_cachegen.container.from_bytes(data).shape == planes.shape


if __name__ == "__main__":
    torch.manual_seed(0)
    made = CacheGenConfig.from_model_name("mistralai/Mistral-7B-Instruct-v0.2")
    assert made.nlayers == LAYERS and isinstance(made.kspecs[0], QuantizationSpec) and made.vspecs
    assert made.kspecs[0].start_layer < made.kspecs[0].end_layer and made.kspecs[0].bins > 1
    random = torch.randn(LAYERS, 2, TOKENS, HEADS, SIZE).bfloat16()
    quantiser(random, made)
    outputs(random, made)
    whole(random)
