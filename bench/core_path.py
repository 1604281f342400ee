"""Keys, lookup and the memory tier: each row beside its limit, measured in the same run.

KV is [2, 32 layers, 256 tokens a chunk, 1024] bf16: 33.6 MB a chunk, 16 chunks an operation. Run it on a quiet machine.
"""

from __future__ import annotations

import hashlib
import time

import torch
from table import SPEC, Rows, kv_cache, median_seconds, tokens_of

from kvloom import Engine, chain

CHUNK, CHUNKS = 256, 16
TOKENS = CHUNK * CHUNKS


def keys(rows: Rows) -> None:
    count = 1_000_000 // CHUNK * CHUNK
    tokens = tokens_of(count, seed=1).to(torch.int32)
    data = memoryview(tokens.numpy()).cast("B")

    def hash_only() -> None:
        digest = bytes(32)
        for at in range(0, len(data), 4 * CHUNK):
            digest = hashlib.sha256(digest + data[at : at + 4 * CHUNK]).digest()

    limit = median_seconds(hash_only, 9)
    ours = median_seconds(lambda: chain(tokens, chunk_tokens=CHUNK, fingerprint="f", salt="s"), 9)
    rows.rate("keys for a million tokens (Mtok/s)", ours, count / 1e6, limit, "the SHA-256 chain alone")


def memory(rows: Rows) -> None:
    source = kv_cache(TOKENS)
    target = torch.zeros_like(source)
    nbytes = source.numel() * source.element_size()
    one = torch.empty(2, 32, CHUNK, 1024, dtype=torch.bfloat16)
    many = [torch.zeros(2, 32, CHUNK, 1024, dtype=torch.bfloat16) for _ in range(CHUNKS)]

    def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[:, :, at : at + CHUNK] for at in range(0, TOKENS, CHUNK)]

    def into_one() -> None:
        for part in parts(source):
            one.copy_(part)

    def into_many() -> None:
        for part, chunk in zip(parts(source), many, strict=True):
            chunk.copy_(part)

    def from_many() -> None:
        for part, chunk in zip(parts(target), many, strict=True):
            part.copy_(chunk)

    config = {"connector": "plain", "tiers": [{"type": "memory", "capacity": "8GiB"}]}
    prompts = [tokens_of(TOKENS, seed=10 + index) for index in range(8)]

    began = time.perf_counter()
    engine = Engine.open(config, SPEC)
    opened = time.perf_counter() - began
    engine.store(prompts[0], kv=source)
    first = time.perf_counter() - began
    touch = time.perf_counter()
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    touch = time.perf_counter() - touch
    rows.seconds("engine open, 8 GiB pool", opened)
    rows.seconds("engine open to the end of the first store", first, touch, "first touch of as much memory")

    for prompt in prompts:  # every page of the pool that is used below is present
        engine.store(prompt, kv=source)
    while not engine._stack.memory.pool.pages.settled:
        time.sleep(0.1)
    stores, retrieves, limits = [], [], {"one": [], "in": [], "out": []}
    for _ in range(5):  # in turn, so that a slow moment of the machine meets all of them
        for name, copy in (("one", into_one), ("in", into_many), ("out", from_many)):
            limits[name].append(median_seconds(copy, 1))
        for prompt in prompts[:2]:
            engine.remove(prompt)
            stores.append(median_seconds(lambda prompt=prompt: engine.store(prompt, kv=source), 1))
        retrieves += [
            median_seconds(lambda prompt=prompt: engine.retrieve(prompt, kv=target), 1) for prompt in prompts[:2]
        ]
    assert torch.equal(source, target)
    gigabytes = nbytes / 1e9
    rows.spread("store into the memory tier (GB/s)", stores, gigabytes, limits["in"], "copy_ into 16 buffers")
    rows.spread("  beside copy_ into one buffer, over and over", stores, gigabytes, limits["one"], "copy_ into one")
    rows.spread("retrieve from the memory tier (GB/s)", retrieves, gigabytes, limits["out"], "copy_ from 16 buffers")

    again = median_seconds(lambda: engine.store(prompts[0], kv=source), 101)
    rows.seconds("store again what is cached, 4,096 tokens", again)
    look = median_seconds(lambda: engine.lookup(prompts[0]), 101)
    rows.micros("lookup, all hit (us a chunk), 16 chunks", look / CHUNKS)
    engine.close()


def control(rows: Rows) -> None:
    """Cost of a chunk besides its bytes: 512 chunks of 256 bytes."""
    from dataclasses import replace

    spec = replace(SPEC, num_layers=1, num_kv_heads=1, head_size=1)
    count = 512 * CHUNK
    kv = torch.zeros(2, 1, count, 1, dtype=torch.bfloat16)
    config = {"connector": "plain", "tiers": [{"type": "memory", "capacity": "1GiB"}]}
    with Engine.open(config, spec) as engine:
        prompts = [tokens_of(count, seed=50 + index) for index in range(8)]
        some = iter(prompts)
        rows.micros(
            "store, 512 tiny chunks (us a chunk)", median_seconds(lambda: engine.store(next(some), kv=kv), 5) / 512
        )
        rows.micros(
            "retrieve, 512 tiny chunks (us a chunk)",
            median_seconds(lambda: engine.retrieve(prompts[0], kv=kv), 9) / 512,
        )
        rows.micros(
            "lookup, all hit (us a chunk), 512 chunks", median_seconds(lambda: engine.lookup(prompts[0]), 21) / 512
        )


if __name__ == "__main__":
    rows = Rows("core_path")
    keys(rows)
    memory(rows)
    control(rows)
    rows.finish()
