"""The process of `test_read_only.py` that is not root."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from kvloom import ConfigError, Engine, KVSpec, Registry

NOBODY = 65534
SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=4, head_size=128, dtype="bfloat16")
CHUNK_TOKENS = 64
"""Tokens of a chunk of 256 KiB: long enough to be read past the page cache."""
TOKENS = torch.arange(2 * CHUNK_TOKENS)
KV = torch.randn(SPEC.blob_shape(TOKENS.numel()), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def config(path: str, **tier: Any) -> dict[str, Any]:
    tiers = ["memory", {"type": "disk", "path": path, **tier}]
    return {"chunk_tokens": CHUNK_TOKENS, "connector": "plain", "tiers": tiers}


def read(path: str, registry: Registry) -> object:
    seen = []
    for direct in ("auto", "never"):
        with Engine.open(config(path, write="never", direct=direct, ttl="1h"), SPEC, registry=registry) as engine:
            got = torch.zeros_like(KV)
            mask = engine.retrieve(TOKENS, kv=got)
            engine.store(TOKENS + 1, kv=KV)
            right = bool(mask.all()) and torch.equal(got, KV)
            trouble = [key.name for key in engine.counters() if key.name in ("tier_error", "dropped", "corrupt")]
            seen.append((right, engine.flush(20), engine.health().ok, trouble))
    return seen


def ask(path: str, registry: Registry) -> object:
    with Engine.open(config(path), SPEC, role="index", registry=registry) as index:
        return index.lookup(TOKENS).tokens


def write(path: str, registry: Registry) -> object:
    Engine.open(config(path), SPEC, registry=registry).close()
    return "opened"


def main(what: str, path: str) -> None:
    """what: read, ask or write."""
    registry = Registry.discover()  # while the packages can be read
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        print(json.dumps({"read": read, "ask": ask, "write": write}[what](path, registry)))
    except ConfigError as error:
        print(json.dumps(str(error)))
