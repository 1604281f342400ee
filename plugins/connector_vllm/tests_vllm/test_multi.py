"""Beside another connector in vLLM's MultiConnector, whose loads come or do not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run, disk, memory
from test_prefixes import FOUND, PROMPTS, same


def beside(folder: Path, tiers: Any, *, first: bool = True, **peer: Any) -> dict[str, Any]:
    """MultiConnector's settings. first: the other connector is asked first."""
    other = {
        "kv_connector": "Peer", "kv_connector_module_path": "peers", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(folder / "peer"), **peer},
    }  # fmt: skip
    ours = {
        "kv_connector": "KVLoomConnector", "kv_connector_module_path": "kvloom_connector_vllm.adapter",
        "kv_role": "kv_both", "kv_connector_extra_config": {"config": {"chunk_tokens": 128, "tiers": tiers}},
    }  # fmt: skip
    extra = {"connectors": [other, ours] if first else [ours, other]}
    return {"kv_connector": "MultiConnector", "kv_connector_module_path": None, "kv_connector_extra_config": extra}


@pytest.mark.parametrize(("asynchronous", "together"), [(False, True), (True, False)])
def test_what_another_connector_fails_to_load_is_computed_and_nothing_of_it_is_stored(
    run: Run, tmp_path: Path, asynchronous: bool, together: bool
) -> None:
    asked = {"generate": {"prompts": PROMPTS}}
    peer = {"asynchronous": asynchronous}
    _, control, _ = run(asked, asked, {"settle": {}}, kv=beside(tmp_path, [memory()], **peer))
    ours = [memory(), disk(tmp_path)]
    at_once = {"generate": {"prompts": PROMPTS, "together": together}}
    first, again, _ = run(at_once, asked, {"settle": {}}, kv=beside(tmp_path, ours, failing=1, **peer))
    for found in (first, again):
        assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    (found,) = run(asked, tiers=[disk(tmp_path)])
    assert [one["cached"] for one in found] == FOUND
    same(found, control)


def test_the_first_that_has_kv_loads_it(run: Run, tmp_path: Path) -> None:
    asked = {"generate": {"prompts": PROMPTS}}
    ours = [memory(), disk(tmp_path)]
    _, control, _ = run(asked, asked, {"settle": {}}, kv=beside(tmp_path, ours))
    found, metrics = run(asked, {"metrics": {}}, kv=beside(tmp_path, ours, first=False, failing=9))
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    assert metrics["vllm:external_prefix_cache_hits"] == 256 + 640
