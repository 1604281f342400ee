"""vLLM's KV buffers, on a disk: what one process inserts, another one takes, once.

python examples/from_lmcache/buffers.py
"""

from __future__ import annotations

import tempfile

import torch

from kvloom_connector_vllm.buffers import KVLookupBuffer, KVStoreBuffer
from kvloom_connector_vllm.buffers.base import BufferOnBackend


def main(folder: str) -> None:
    disk = {"type": "disk", "path": folder}
    tokens, roi = torch.arange(8), torch.ones(8, dtype=torch.bool)
    kv = torch.randn(2, 8, 64)

    lookup = KVLookupBuffer(disk, capacity="1GiB", timeout="5s")
    assert isinstance(lookup, BufferOnBackend)
    lookup.insert(input_tokens=tokens, roi=roi, key=kv[0], value=kv[1], hidden=torch.randn(1, 64))
    _, _, key, value, _ = lookup.drop_select(input_tokens=tokens, roi=roi)
    assert torch.equal(key, kv[0]) and torch.equal(value, kv[1])
    lookup.close()

    store = KVStoreBuffer(disk, capacity="1GiB")
    store.put(key="request-7/keys", value=kv[0])
    assert torch.equal(store.get("request-7/keys"), kv[0])
    store.put("request-7/keys", None)
    store.close()
    print("lookup and store: ok")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as at:
        main(at)
