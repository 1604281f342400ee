"""kvloom's tiers behind vLLM's own OffloadingConnector, found by a fresh process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Run, disk, memory, tokens
from test_prefixes import FOUND, PROMPTS, same

OFFLOADING: dict[str, Any] = {
    "kv": {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None},
    "extra": {
        "spec_name": "KVLoomOffloadingSpec", "spec_module_path": "kvloom_connector_vllm.adapter.offloading",
        "staging": "64MiB",
    },
    "config": {"connector": "vllm_offload"},
}  # fmt: skip
ASKED = {"generate": {"prompts": PROMPTS}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_process_answers_as_the_engines_own_prefix_cache(run: Run, dtype: str) -> None:
    _, control, _ = run(ASKED, ASKED, {"settle": {}}, **OFFLOADING, dtype=dtype)
    assert [one["cached"] for one in control] == FOUND
    found, metrics = run(ASKED, {"metrics": {}}, **OFFLOADING, dtype=dtype)
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    assert metrics["vllm:external_prefix_cache_hits"] == 256 + 640
