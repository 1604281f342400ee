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
PIECE_TOKENS = 1
PLANES, LAYERS, HIDDEN = 2, 2, 8
TOKEN_BYTES = PLANES * LAYERS * HIDDEN * 2
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
SALTS = ("", "alice", "bob")
SPECS = tuple(
    KVSpec(model="tiny", num_layers=LAYERS, num_kv_heads=2, head_size=4, dtype="bfloat16", adapters=adapters)
    for adapters in ((), ("style",))
)
"""The model of an engine, and that of its sibling."""
UNTOUCHED = 0x5A5A
"""The value of every element of a caller's KV before a retrieve."""


class Prompt:
    """A token sequence, and its KV under every model and salt."""

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
            data = bytearray(b"".join(_value(model, salt, tuple(self.list[: at + 1])) for at in range(self.length)))
            values = torch.frombuffer(data, dtype=torch.uint8)
            values = values + 1 if lossy else values
            kv = values.view(torch.int16).view(self.length, PLANES, LAYERS, HIDDEN).permute(1, 2, 0, 3).contiguous()
            self._kv[model, salt, lossy] = kv
        return kv

    def blank(self) -> torch.Tensor:
        """A caller's KV before a retrieve, as int16."""
        return torch.full((PLANES, LAYERS, self.length, HIDDEN), UNTOUCHED, dtype=torch.int16)


@functools.cache
def _value(model: int, salt: str, tokens: tuple[int, ...]) -> bytes:
    return hashlib.shake_256(f"{model}|{salt}|{tokens}".encode()).digest(TOKEN_BYTES)


@functools.cache
def prompts() -> tuple[Prompt, ...]:
    """The prompts of every run: families of up to six chunks that branch, some with a tail that fills no chunk.

    Some tails are the beginning of another prompt's chunk.
    """
    rng = random.Random("prompts")
    found = []
    for family in range(5):
        stem = [family * 1000 + at for at in range(6 * CHUNK_TOKENS)]
        for variant in range(8):
            branch, chunks, tail = rng.randrange(7), rng.choice((1, 1, 2, 2, 3, 4, 6)), rng.choice((0, 0, 0, 1, 3))
            own = [100_000 + variant * 1000 + at for at in range(len(stem) + 3)]
            kept = min(branch, chunks) * CHUNK_TOKENS + (tail if branch > chunks else 0)
            found.append(Prompt((stem[:kept] + own)[: chunks * CHUNK_TOKENS + tail]))
    return tuple(found)
