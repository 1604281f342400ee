"""LMCache's token databases: prompts cut into segments with keys.

python examples/from_lmcache/tokens.py
"""

from __future__ import annotations

import torch

from kvloom import KVSpec, Segment, TokenDatabase
from kvloom.builtin.chunked import ChunkedTokenDatabase
from kvloom_tokens_radix.database import RadixTokenDatabase


def main() -> None:
    spec = KVSpec("example", num_layers=2, num_kv_heads=2, head_size=8, dtype="float32")
    tokens = torch.arange(48)
    for of in (ChunkedTokenDatabase, RadixTokenDatabase):
        database: TokenDatabase = of(of.Config(), spec)
        database.chunk_tokens, database.fingerprint = 16, "0" * 32  # which an engine sets
        segments: list[Segment] = database.segments(tokens)  # process_tokens
        print(of.__name__, [(one.start, one.end) for one in segments])
        behind = database.segments(tokens, mask=torch.arange(48) >= 16)
        assert behind == [one for one in segments if one.start >= 16]


if __name__ == "__main__":
    main()
