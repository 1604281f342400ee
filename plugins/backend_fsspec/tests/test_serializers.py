"""An engine over the backend, with each serializer: what was exact comes back exact, after a restart too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import Engine, KVSpec

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=64, dtype="bfloat16")
TOKENS = torch.arange(256)
KV = torch.randn(SPEC.blob_shape(256), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    "serializer",
    ["raw", {"type": "cachegen", "mode": "lossless"}, {"type": "cachegen"}],
    ids=["raw", "lossless", "cachegen"],
)
def test_a_restart_keeps_its_hits(tmp_path: Path, serializer: Any, driver: str) -> None:
    if isinstance(serializer, dict):
        pytest.importorskip("kvloom_serde_cachegen")
    tier = {"type": "fsspec", "url": f"file://{tmp_path}/kv", "driver": driver, "serializer": serializer}
    config = {"chunk_tokens": 64, "connector": "plain", "tiers": [{"type": "memory", "capacity": "8MiB"}, tier]}
    with Engine.open(config, SPEC) as engine:
        engine.store(TOKENS, kv=KV)
        assert engine.flush(60)
    with Engine.open(config, SPEC) as engine:
        assert engine.lookup(TOKENS).tokens == len(TOKENS)
        got = torch.zeros_like(KV)
        assert engine.retrieve(TOKENS, kv=got).all()
    if serializer == {"type": "cachegen"}:
        assert (got - KV).abs().mean() < 0.2 * KV.abs().mean()
    else:
        assert torch.equal(got.view(torch.uint8), KV.view(torch.uint8))
