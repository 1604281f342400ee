"""LMCache's GPU connectors: paged and nested KV, read into chunks and written back.

python examples/from_lmcache/connectors.py
"""

from __future__ import annotations

import torch

from kvloom import Chunk, ChunkKey, GPUConnector, KVSpec, MemoryFormat, Segment
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.cuda import PagedCudaConnector
from kvloom_connector_vllm.paged.layout import PagedLayout
from kvloom_connector_vllm.paged.nested_tuple import NestedTupleConnector

SPEC = KVSpec("example", num_layers=2, num_kv_heads=2, head_size=8, dtype="float32")
SEGMENT = Segment(0, 32, ChunkKey("0/-", 0, bytes(32)))


def there_and_back(connector: GPUConnector, kvcaches: list, **where: torch.Tensor) -> None:
    """from_gpu is read, to_gpu is write, get_shape is shape."""
    chunk = Chunk(torch.zeros(connector.shape(32)), MemoryFormat.KV_BLOB, 32)
    connector.read([SEGMENT], [chunk], kvcaches=kvcaches, **where)
    kept = chunk.tensor.clone()
    for layer in kvcaches:
        for plane in layer:
            plane.zero_()
    connector.write([SEGMENT], [chunk], kvcaches=kvcaches, **where)
    chunk.tensor.zero_()
    connector.read([SEGMENT], [chunk], kvcaches=kvcaches, **where)
    assert kept.any() and torch.equal(chunk.tensor, kept)


def main() -> None:
    pages = [torch.rand(2, 4, 16, 2, 8) for _ in range(SPEC.num_layers)]  # K and V, blocks, tokens, heads, head size
    slots = torch.tensor([16 * block + token for block in (3, 1) for token in range(16)])
    assert PagedLayout.of(kvcaches=pages, spec=SPEC).num_blocks == 4
    there_and_back(PagedConnector(PagedConnector.Config(), SPEC), pages, slot_mapping=slots)  # VLLMPagedMemGPUConnector

    if torch.cuda.is_available():  # VLLMPagedMemGPUConnectorV2
        on_gpu = PagedCudaConnector(PagedCudaConnector.Config(), SPEC)
        there_and_back(on_gpu, [layer.cuda() for layer in pages], slot_mapping=slots.cuda())

    pairs = [tuple(torch.rand(40, SPEC.hidden_dim) for _ in range(2)) for _ in range(SPEC.num_layers)]
    there_and_back(NestedTupleConnector(NestedTupleConnector.Config(token_dim=0), SPEC), pairs)
    print("ok")


if __name__ == "__main__":
    main()
