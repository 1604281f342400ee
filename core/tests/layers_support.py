"""Support for the tests of the layer-wise calls: deep KV, a shelf that reads ranges, and a check of the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from core_support import CHUNK, Gate, Shelf, tokens_of

from kvloom import Engine, KVSpec, envelope
from kvloom.pipeline.layer_load import Loading

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
NEAR, FAR = SHELF | {"name": "near", "shelf": "near"}, SHELF | {"name": "far", "shelf": "far"}
Open = Callable[..., Engine]

LAYERS = 6
DEEP = KVSpec(model="deep", num_layers=LAYERS, num_kv_heads=2, head_size=8, dtype="bfloat16")
STEP = CHUNK * DEEP.hidden_dim * 2
"""Bytes of one plane of one layer of one chunk."""
TOKENS = tokens_of(16)


def deep_kv(count: int, spec: KVSpec = DEEP, seed: int = 0) -> torch.Tensor:
    return torch.randn(spec.blob_shape(count), generator=torch.Generator().manual_seed(seed)).to(spec.torch_dtype)


KV = deep_kv(16)


class Ranges:
    """Hooks that run before the shelf reads a range."""

    def __init__(self) -> None:
        self.before: Callable[[str, int], None] = lambda key, offset: None


def fill(open_engine: Open, *, tokens: torch.Tensor = TOKENS, kv: torch.Tensor = KV, spec: KVSpec = DEEP) -> Shelf:
    """A shelf with the KV of `tokens`."""
    with open_engine(SHELF, spec=spec) as engine:
        engine.store(tokens, kv=kv)
    return Shelf.shelves["default"]


def names_of(engine: Engine, tokens: torch.Tensor = TOKENS) -> list[str]:
    return [str(segment.key) for segment in engine.segments(tokens)]


def count(engine: Engine, name: str) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == name)


def layer_at(offset: int) -> int:
    """The layer whose K or V begins at this offset of a blob of DEEP; -1 for the header."""
    return -1 if offset < envelope.ALIGN_BYTES else (offset - envelope.ALIGN_BYTES) // STEP % LAYERS


def damage(shelf: Shelf, name: str, *, layer: int, plane: int = 1) -> None:
    blob = bytearray(shelf._blobs[name])
    blob[envelope.ALIGN_BYTES + (plane * LAYERS + layer) * STEP + 5] ^= 1
    shelf._blobs[name] = bytes(blob)


def kept(engine: Engine) -> tuple[int, bool]:
    """Bytes of the chunks in memory, and whether nobody has a lease on one."""
    memory = engine._stack.memory
    held = [one.lease for one in memory.lease(memory.chunks()) if one is not None]
    blocks = [lease.block for lease in held if lease.block is not None]
    total, alone = sum(block.size for block in blocks), all(block._leases == 1 for block in blocks)
    for lease in held:
        lease.release()
    return total, alone


def settled(engine: Engine) -> bool:
    """All of the pool that is not free is chunks in memory, and nobody has a lease on one."""
    pool = engine._stack.memory.pool
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if kept(engine) == (pool.used_bytes, True):
            return pool.staged_bytes == 0 and not pool.leaked
        time.sleep(0.001)
    return False


def by_layers(engine: Engine, tokens: torch.Tensor = TOKENS, like: torch.Tensor = KV, **more: Any) -> Any:
    """The KV that came and the masks of all layers."""
    got = torch.zeros_like(like)
    with engine.retrieve_layer(tokens, kv=got, **more) as loading:
        masks = [mask for _, mask in loading]
    assert settled(engine)
    return got, masks


def chunks_in(masks: list[torch.Tensor]) -> list[int]:
    """Number of leading chunks in each mask; masks are prefixes that never grow."""
    numbers = [int(mask.sum()) // CHUNK for mask in masks]
    for number, mask in zip(numbers, masks, strict=True):
        assert mask.dtype == torch.bool and mask.device.type == "cpu"
        assert mask.tolist() == [at < number * CHUNK for at in range(len(mask))]
    assert numbers == sorted(numbers, reverse=True)
    return numbers


def right(got: torch.Tensor, want: torch.Tensor, masks: list[torch.Tensor]) -> bool:
    """Each layer has what its mask says, and nothing else was touched."""
    return all(
        torch.equal(got[:, layer, mask], want[:, layer, mask]) and not got[:, layer, ~mask].any()
        for layer, mask in enumerate(masks)
    )


def store_layers(engine: Engine, tokens: torch.Tensor, kv: torch.Tensor, layers: Any = range(LAYERS)) -> int:
    with engine.store_layer(tokens, kv=kv) as storing:
        for layer in layers:
            storing.layer(layer)
        return storing.finish()


def slow_writes(engine: Engine, gate: Gate, *, layer: int) -> None:
    """The connector waits at the gate before it writes `layer`."""
    write_layer = engine.connector.write_layer

    def wait_and_write(number: int, segments: Any, chunks: Any, **where: Any) -> None:
        if number == layer:
            gate("write", "")
        write_layer(number, segments, chunks, **where)

    engine.connector.write_layer = wait_and_write  # type: ignore[method-assign]


def gated(ranges: Ranges, gate: Gate, layer: int) -> None:
    """Nobody reads `layer`, nor what lies behind it, before the gate is open."""
    ranges.before = lambda key, offset: gate("range", key) if layer_at(offset) >= layer else None


def until(seen: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.001)


def finish(loading: Loading, got: torch.Tensor, want: torch.Tensor = KV, chunks: int = 4) -> None:
    masks = [mask for _, mask in loading]
    assert chunks_in(masks) == [chunks] * LAYERS and right(got, want, masks)
