"""An engine with observers, and what happens in it."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
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


@contextlib.contextmanager
def dripping(begun: bytes, path: str | None = None) -> Iterator[int | str]:
    """A server that answers with `begun` and then a byte at a time, at a socket or a port. Nobody reads it all."""
    over, read_to_its_end = threading.Event(), threading.Event()

    def drip() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(begun)
            for _ in range(2000):
                if over.wait(0.01):
                    return
                client.sendall(b"#")
            read_to_its_end.set()

    with socket.socket(socket.AF_INET if path is None else socket.AF_UNIX) as listener:
        listener.bind(path or ("127.0.0.1", 0))
        listener.listen()
        server = threading.Thread(target=drip)
        server.start()
        try:
            yield path or listener.getsockname()[1]
        finally:
            over.set()
            server.join()
    assert not read_to_its_end.is_set()
