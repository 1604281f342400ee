"""vLLM's two buffer interfaces over a storage backend: entries that are taken once, and tensors by name.

What they hold is framed and verified like every blob of kvloom, and never unpickled.
"""

from __future__ import annotations

from kvloom_connector_vllm.lookup_buffer import KVLookupBuffer
from kvloom_connector_vllm.store_buffer import KVStoreBuffer

__all__ = ["KVLookupBuffer", "KVStoreBuffer"]
