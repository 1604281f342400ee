"""LMCache's allocators and memory objects as kvloom.memory: reserve, seal, lease.

python examples/from_lmcache/memory.py
"""

from __future__ import annotations

import torch

import kvloom.memory
from kvloom import Buffers, Chunk, MemoryFormat
from kvloom.memory.extents import Extents
from kvloom.memory.pages import PAGE_BYTES
from kvloom.runtime import SystemRuntime
from kvloom.tiers.tier import Loaded


def main() -> None:
    pool = kvloom.memory.Pool(1 << 20, SystemRuntime())  # every allocator; pinned where there is a GPU
    reservation = pool.reserve(256)  # allocate
    assert isinstance(reservation, kvloom.memory.Reservation) and reservation.nbytes == 256
    reservation.view[:4] = b"KVKV"  # bytes, writable
    reservation.tensor([64], torch.float32).fill_(1)  # or a tensor
    block: kvloom.memory.Block = reservation.seal()
    assert block.start % PAGE_BYTES == 0 and block.size >= 256

    with block.lease():  # ref_count_up; ref_count_down when the `with` block ends
        assert block.leased, "somebody reads"
        assert block.tensor([64], torch.float32).sum() == 64
    lease = block.lease()
    chunk = Chunk(block.tensor([64], torch.float32), MemoryFormat.KV_BLOB, num_tokens=1)  # MemoryObj, with its metadata
    loaded = Loaded(chunk, lease)
    assert loaded.chunk.format is MemoryFormat.KV_BLOB and loaded.chunk.tensor.shape == (64,)
    lease.release()
    block.drop()  # free
    unused = pool.reserve(256)
    assert unused is not None
    unused.abandon()  # free what was never filled
    pool.close()

    ranges = Extents(1024)  # FreeBlock: which ranges are free
    assert ranges.take(256) == 0
    encoded: Buffers = [b"what a serializer makes"]  # MemoryFormat.BINARY
    print("memory: ok;", len(encoded[0]), "bytes need no format")


if __name__ == "__main__":
    main()
