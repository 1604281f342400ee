"""Support for the reliability tests: KV whose every byte can be checked, engines, and the audit of a directory."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch

from kvloom import CorruptBlobError, Engine, KVSpec, Registry, UnreadableBlobError, envelope
from kvloom.runtime import Runtime

SMALL = KVSpec(model="small", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
"""64 bytes of KV for each token."""
WIDE = KVSpec(model="wide", num_layers=4, num_kv_heads=4, head_size=128, dtype="bfloat16")
"""8 KiB of KV for each token."""
GENEROUS_SECONDS = 60.0
"""Time after which an operation counts as hanging."""


def plugins_with(*modules: str) -> Registry:
    """The installed plugins and, as if they were installed, `modules`."""
    mine = [EntryPoint(module, module, "kvloom.v1") for module in modules]
    return Registry.discover(entry_points=[*entry_points(group="kvloom.v1"), *mine])


def open_engine(
    *tiers: dict[str, Any],
    spec: KVSpec = SMALL,
    chunk_tokens: int = 4,
    registry: Registry | None = None,
    runtime: Runtime | None = None,
    **config: Any,
) -> Engine:
    source = {"chunk_tokens": chunk_tokens, "connector": "plain", "tiers": list(tiers), **config}
    return Engine.open(source, spec, registry=registry, runtime=runtime)


def tokens_of(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 50_000, (count,), generator=torch.Generator().manual_seed(seed))


def kv_of(count: int, seed: int, spec: KVSpec = SMALL) -> torch.Tensor:
    """Random bits, so that every one of them counts; what they are as numbers does not matter."""
    shape = spec.blob_shape(count)
    data = bytearray(random.Random(seed).randbytes(math.prod(shape) * spec.torch_dtype.itemsize))
    return torch.frombuffer(data, dtype=spec.torch_dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def is_right(got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor) -> bool:
    """The tokens of `mask` are those of `want`, and the others were not touched (zero)."""
    return same_bits(got[:, :, mask], want[:, :, mask]) and not got[:, :, ~mask].contiguous().view(torch.uint8).any()


def retrieved(engine: Engine, tokens: torch.Tensor, want: torch.Tensor, **options: Any) -> int:
    """Number of tokens that a retrieve delivers; fails if one byte of them, or of the others, is wrong."""
    got = torch.zeros_like(want)
    mask = engine.retrieve(tokens, kv=got, **options)
    assert is_right(got, want, mask), "wrong bytes"
    return int(mask.sum())


def eventually(true: Callable[[], Any], what: str, seconds: float = GENEROUS_SECONDS) -> None:
    """Wait until `true()`; fails if that takes unreasonably long."""
    until, pause = time.monotonic() + seconds, 0.002
    while not true():
        assert time.monotonic() < until, f"never came: {what}"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)


def events(engine: Engine, name: str) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == name)


# -- accounting --------------------------------------------------------------------------------------------------------


def ledger_bytes(engine: Engine, tier: str = "disk") -> int:
    """Size of a stored tier, as its ledger has it."""
    (health,) = [health for health in engine.health().tiers if health.name == tier]
    return int(health.bytes)


def forget_memory(engine: Engine, tier: str = "memory") -> None:
    """Empty the memory tier; fails if anything else holds memory of the pool: a lease or a reservation was lost."""
    memory: Any = engine.tiers[tier]

    def empty() -> bool:
        memory.remove(memory.chunks())  # again and again: what is being prefetched still arrives
        return int(memory.used_bytes) == 0

    eventually(empty, "the last page back in the pool")


@dataclass(slots=True)
class Audit:
    """The content of a disk backend's directory, read without any of its code."""

    blobs: int = 0
    bytes: int = 0
    """Their blocks on the file system."""
    unreadable: int = 0
    broken: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


def audit(root: Path) -> Audit:
    """Verify every blob under `root` from its first byte to its last."""
    found = Audit()
    for folder, _, names in os.walk(root):
        above = Path(folder).relative_to(root).parts
        if above[:1] == ("+tmp",):
            found.unfinished += names
        if not above or above[0] in ("+tmp", "spec"):
            continue
        key_above = "/".join(part for part in above if not part.startswith("+"))
        for name in names:
            path = Path(folder, name)
            try:
                blob, blocks = path.read_bytes(), path.stat().st_blocks
            except FileNotFoundError:
                continue  # an engine has just evicted it
            found.blobs += 1
            found.bytes += blocks * 512
            try:
                envelope.unseal(blob, key=f"{key_above}/{name}")
            except UnreadableBlobError:
                found.unreadable += 1
            except CorruptBlobError as error:
                found.broken.append(f"{key_above}/{name}: {error}")
    return found
