"""vLLM's two buffer interfaces over a storage backend: entries that are taken once, and tensors by name.

Their content is framed and verified like every blob of kvloom, and never unpickled.
"""

from __future__ import annotations

from kvloom_connector_vllm.buffers.lookup import KVLookupBuffer
from kvloom_connector_vllm.buffers.store import KVStoreBuffer

__all__ = ["KVLookupBuffer", "KVStoreBuffer"]
