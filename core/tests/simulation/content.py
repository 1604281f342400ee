"""The stored content: prompts that share prefixes, and KV that is a function of model, salt and every token before it.

So any chunk that comes back can be checked in full, whoever stored it, whenever.
"""

from __future__ import annotations

import functools
import hashlib
import random

import torch

from kvloom import KVSpec

CHUNK_TOKENS = 4
PLANES, LAYERS, HIDDEN = 2, 2, 8
CHUNK_BYTES = PLANES * LAYERS * CHUNK_TOKENS * HIDDEN * 2
SALTS = ("", "alice", "bob")
SPECS = tuple(
    KVSpec(model="tiny", num_layers=LAYERS, num_kv_heads=2, head_size=4, dtype="bfloat16", adapters=adapters)
    for adapters in ((), ("style",))
)
"""The model of an engine, and that of its sibling."""
UNTOUCHED = 0x5A5A
"""The value of every element of a caller's KV before a retrieve."""


class Prompt:
    """A token sequence, its KV under every model and salt, and where its chunks are in it."""

    def __init__(self, tokens: list[int]) -> None:
        self.list = tokens
        self.tokens = torch.tensor(tokens, dtype=torch.int32)
        self.length = len(tokens)
        self.chunks = len(tokens) // CHUNK_TOKENS
        self._kv: dict[tuple[int, str, bool], torch.Tensor] = {}

    def kv(self, model: int, salt: str, *, lossy: bool = False) -> torch.Tensor:
        """`[2, layers, tokens, hidden]` as int16; lossy: what comes out of the lossy serializer."""
        kv = self._kv.get((model, salt, lossy))
        if kv is None:
            kv = torch.full((PLANES, LAYERS, self.length, HIDDEN), 0x0101, dtype=torch.int16)
            for index in range(self.chunks):
                end = (index + 1) * CHUNK_TOKENS
                data = bytearray(_value(model, salt, tuple(self.list[:end])))
                chunk = torch.frombuffer(data, dtype=torch.uint8)
                chunk = chunk + 1 if lossy else chunk
                shaped = chunk.view(torch.int16).view(PLANES, LAYERS, CHUNK_TOKENS, HIDDEN)
                kv[:, :, end - CHUNK_TOKENS : end] = shaped
            self._kv[model, salt, lossy] = kv
        return kv

    def blank(self) -> torch.Tensor:
        """A caller's KV before a retrieve, as int16."""
        return torch.full((PLANES, LAYERS, self.length, HIDDEN), UNTOUCHED, dtype=torch.int16)


@functools.cache
def _value(model: int, salt: str, tokens: tuple[int, ...]) -> bytes:
    return hashlib.shake_256(f"{model}|{salt}|{tokens}".encode()).digest(CHUNK_BYTES)


@functools.cache
def prompts() -> tuple[Prompt, ...]:
    """The prompts of every run: families of up to six chunks that branch, some with a tail that fills no chunk."""
    rng = random.Random("prompts")
    found = []
    for family in range(5):
        stem = [family * 1000 + at for at in range(6 * CHUNK_TOKENS)]
        for variant in range(8):
            branch, chunks, tail = rng.randrange(7), rng.choice((1, 1, 2, 2, 3, 4, 6)), rng.choice((0, 0, 0, 1, 3))
            own = [100_000 + variant * 1000 + at for at in range(len(stem) + 3)]
            kept = min(branch, chunks) * CHUNK_TOKENS
            found.append(Prompt((stem[:kept] + own)[: chunks * CHUNK_TOKENS + tail]))
    return tuple(found)
