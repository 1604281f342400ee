"""An engine with observers, and what happens in it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import Engine, KVSpec

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
SOON = 30.0


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(seed))


def kv_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 2, count, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def opened(folder: Path, *observers: Any, memory: str = "64KiB", disk: str = "256KiB", **config: Any) -> Engine:
    """chunks of 4 tokens; the disk tier encodes."""
    tiers = [
        {"type": "memory", "capacity": memory},
        {"type": "disk", "path": str(folder / "kv"), "capacity": disk, "serializer": "torch"},
    ]
    source = {"chunk_tokens": 4, "connector": "plain", "tiers": tiers, "observers": list(observers), **config}
    return Engine.open(source, SPEC)


def own_sockets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sockets in a directory that tests beside this one do not see. Make pytest's own directories before."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def busy(engine: Engine) -> None:
    """Stores, hits, misses, evictions of both tiers, a promotion."""
    for seed in range(40):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
        assert engine.flush(SOON)
    for seed in (39, 39, 34, 99):
        engine.retrieve(tokens_of(16, seed), kv=kv_of(16))
    settled(engine)


def settled(engine: Engine) -> None:
    """Everything so far was written, and told."""
    assert engine.flush(SOON) and engine._events.flush(SOON)


def path_of(engine: Engine) -> Path:
    """The socket of the engine's live view."""
    (observer,) = [one for one in engine._events._observers if one.type == "live"]
    return Path(observer.path)


def port_of(engine: Engine) -> int:
    """The port of the engine's metrics."""
    (observer,) = [one for one in engine._events._observers if one.type == "prometheus"]
    return int(observer.port)
