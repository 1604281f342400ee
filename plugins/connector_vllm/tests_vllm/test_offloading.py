"""kvloom's tiers behind vLLM's own OffloadingConnector: what a fresh process finds, and what damage does."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, faulty, memory, tokens
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
PAGE = 2 * 2 * 128 * 2 * 32 * 4
"""Bytes of a block in two layers: K and V, tokens, heads, elements of a head, bytes."""


def blobs(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.is_file())


def named(engine: str) -> dict[str, Any]:
    return {**OFFLOADING, "kv": {**OFFLOADING["kv"], "engine_id": engine}}


def left_behind(engine: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"kvloom-*{engine}*"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_process_answers_as_the_engines_own_prefix_cache(run: Run, dtype: str) -> None:
    engine = str(uuid.uuid4())
    _, control, _ = run(ASKED, ASKED, {"settle": {}}, **named(engine), dtype=dtype)
    assert [one["cached"] for one in control] == FOUND
    _, found, steps, metrics = run(
        {"patient": {}}, ASKED, {"steps": {}}, {"metrics": {}}, fresh=dtype == "float32", **named(engine), dtype=dtype
    )
    # Eight tokens of each; two prompts of four ask the tiers, are told, and wait for slots, and then for pages.
    assert steps <= 4 * 8 + 2 * 10, "steps that compute nothing wait for what is under way"
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    assert metrics["vllm:external_prefix_cache_hits"] == 256 + 640
    assert left_behind(engine) == []


def test_layers_with_windows_load_their_windows_only(hybrid: Run) -> None:
    _, control, _ = hybrid(ASKED, ASKED, {"settle": {}}, **OFFLOADING)
    found, metrics = hybrid(ASKED, {"metrics": {}}, **OFFLOADING)
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    # Of the third prompt the windows' blocks are not in the engine's own cache any more.
    assert metrics["vllm:external_prefix_cache_hits"] == 256 + 640 + 512
    assert metrics["vllm:kv_offload_load_bytes"] == ((2 + 5 + 4) + 3 * 2) * PAGE


@pytest.mark.parametrize("fault", ["flipped", "gone", "raises", "hangs"])
def test_what_cannot_be_read_is_computed(hybrid: Run, tmp_path: Path, fault: str) -> None:
    """vLLM's connector cannot be told of a load that failed: it would end the engine, or answer from other bytes."""
    _, control, _ = hybrid(ASKED, ASKED, {"settle": {}}, **OFFLOADING)
    assert len(blobs(tmp_path)) >= 12
    faults: dict[str, Any] = {"raises": {"get": {"fail": True}}, "hangs": {"get": {"hang": 20}}}.get(fault, {})
    for path in blobs(tmp_path)[:: 2 if fault == "gone" else 1]:
        if fault == "gone":
            path.unlink()
        elif fault == "flipped":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0x10
            path.write_bytes(data)
    tiers = [memory(), faulty(tmp_path, faults, deadline="1s")]
    found, again = hybrid(ASKED, ASKED, tiers=tiers, **OFFLOADING)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    assert {one["reason"] for one in found} == {"length"}
    if fault != "gone":
        assert found[0]["cached"] == found[1]["cached"] == 0
    assert [one["cached"] for one in again] == FOUND
    same(again, control)


def test_more_than_there_are_slots(run: Run, tmp_path: Path) -> None:
    """Four slots: what does not fit is computed, and what is stored late does not keep others from being answered."""
    extra = {**OFFLOADING["extra"], "staging": 4 * 2 * PAGE}
    many = {"generate": {"prompts": [tokens(1, 256) + tokens(10 + n, 400) for n in range(6)], "together": True}}
    (expected,) = run(many, connector=False)
    settings: dict[str, Any] = {**OFFLOADING, "extra": extra, "tiers": [faulty(tmp_path, {"put": {"delay": 0.05}})]}
    first, second = run(many, many, **settings)
    (third,) = run(many, **settings)
    for found in (first, second, third):
        assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
    assert max(one["cached"] for one in third) >= 256


def test_clearing_leaves_nothing(run: Run, tmp_path: Path) -> None:
    first, _, cleared, _, again = run(
        ASKED, {"settle": {}}, {"reset": {}}, {"forget": {}}, ASKED, **OFFLOADING, enable_prefix_caching=False
    )
    assert cleared is True
    assert [one["cached"] for one in again[:2]] == [0, 0]
    assert [one["tokens"] for one in again] == [one["tokens"] for one in first]


def test_ranks_go_together(run: Run, tmp_path: Path) -> None:
    engine = str(uuid.uuid4())
    settings: dict[str, Any] = {
        **named(engine), "tensor_parallel_size": 2, "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }  # fmt: skip
    _, control, _ = run(ASKED, ASKED, {"settle": {}}, **settings)
    (found,) = run(ASKED, **settings)
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    assert left_behind(engine) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"extra": {**OFFLOADING["extra"], "staging": 1000}}, "at least"),
        ({"config": {"connector": "vllm"}}, "connector: vllm_offload"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_cannot_work_is_said_at_start(run: Run, settings: dict[str, Any], text: str) -> None:
    assert text in run(ASKED, **{**OFFLOADING, **settings}, fails=True)
