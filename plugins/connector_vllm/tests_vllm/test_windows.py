"""Models with sliding windows, beside full attention and alone: the answers of vLLM's own prefix cache, or its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Run, faulty, memory, tokens
from kinds import WINDOWS, run_by
from test_prefixes import alike, same

WINDOW = 256
AROUND = [BLOCK - 1, BLOCK, BLOCK + 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * BLOCK, 4 * BLOCK + 1, 7 * BLOCK + 5]
"""Lengths of prompts: at a block, the window and a chunk, and one token more or less."""


def generate(prompts: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"generate": {"prompts": prompts, **more}}


@pytest.fixture(params=list(run_by(WINDOWS)))
def engine(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


PROMPTS = [tokens(number, length) for number, length in enumerate(AROUND, 2)]


@pytest.mark.parametrize("chunk", [BLOCK, 4 * BLOCK])
def test_hits_from_memory_and_from_disk_answer_as_the_engines_own_prefix_cache(engine: Run, chunk: int) -> None:
    config = {"chunk_tokens": chunk}
    whole = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    cold, control = engine(generate(PROMPTS), generate(PROMPTS), connector=False)
    first, _, _, warm = engine(generate(PROMPTS), {"settle": {}}, {"forget": {}}, generate(PROMPTS), config=config)
    same(first, cold)
    assert [one["cached"] for one in warm] == [one["cached"] for one in control] == whole
    same(warm, control)
    found, metrics = engine(generate(PROMPTS), {"metrics": {}}, config=config)
    assert [one["cached"] for one in found] == whole
    same(found, control)
    assert metrics["vllm:external_prefix_cache_hits"] == sum(whole)


def test_a_shared_beginning_is_found_where_every_group_has_it(engine: Run) -> None:
    """Prompts after the first need the windows that end where they part, and nothing before them."""
    stem = tokens(1, 900)
    prompts = [stem, stem[:512] + tokens(3, 100), stem[:641] + tokens(4, 30), stem[:300]]
    control, _ = engine(generate(prompts), {"settle": {}})
    reads = {"kv": {"kv_role": "kv_consumer"}, "enable_prefix_caching": False}
    (found,) = engine(generate(prompts), **reads)
    assert [one["cached"] for one in found] == [896, 512, 640, 256]
    (cold,) = engine(generate(prompts), connector=False, enable_prefix_caching=False)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in cold] == [one["tokens"] for one in control]


@pytest.mark.parametrize("fault", ["flipped", "gone", "raises"])
def test_a_request_whose_kv_does_not_come_begins_anew(engine: Run, tmp_path: Path, fault: str) -> None:
    """vLLM has no blocks before the windows, so it cannot go on in the middle."""
    prompts = [tokens(1, 900), tokens(2, 300)]
    cold, control, _ = engine(generate(prompts), generate(prompts), {"settle": {}})
    faults = {"get": {"fail": True}} if fault == "raises" else {}
    blobs = sorted(path for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.is_file())
    for path in blobs:
        depth = int(path.name.split("-")[0])
        if fault == "gone" and depth == 6:
            path.unlink()
        elif fault == "flipped" and depth in (1, 5):
            data = bytearray(path.read_bytes())
            data[-len(data) // 2] ^= 0x10
            path.write_bytes(data)
    tiers = [memory(), faulty(tmp_path, faults, deadline="1s")]
    found, again, usage = engine(generate(prompts), generate(prompts), {"usage": {}}, tiers=tiers)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in cold]
    assert {one["reason"] for one in found} == {"length"}
    if fault != "gone":
        same(found, cold)
    compare = alike if fault == "gone" else same
    assert found[0]["cached"] == (768 if fault == "gone" else 0), "what is known to be missing is not waited for"
    assert [one["cached"] for one in again] == [896, 256]
    compare(again, control)
    assert usage == 0


@pytest.mark.parametrize(("model", "blocks"), [("hybrid", 24), ("windowed", 14)])
def test_requests_that_come_and_go_while_blocks_are_few(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, blocks: int
) -> None:
    engine = request.getfixturevalue(model)
    few = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 256}
    while_blocks_are_few(engine, tmp_path, few, max_tokens=200)


def while_blocks_are_few(engine: Run, tmp_path: Path, few: dict[str, int], *, max_tokens: int, **limits: Any) -> None:
    """Preempted, aborted and cut off from a slow store: no wrong token, and no block is lost."""
    many = [tokens(1, 400) + tokens(10 + number, 60) for number in range(6)]
    asked = generate(many, max_tokens=max_tokens, together=True)
    little = {"max_model_len": 768, **few, **limits}
    (expected,) = engine(asked, connector=False, **limits)
    slow = [memory("8MiB"), faulty(tmp_path, {"put": {"delay": 0.05}, "get": {"delay": 0.05}})]
    config = {"save_decode_cache": True, "chunk_tokens": 2 * BLOCK}
    first, _, _, aborted, second, usage, metrics = engine(
        asked, {"settle": {}}, {"forget": {}}, {"abort_while_loading": {"prompt": many[2]}}, asked, {"usage": {}},
        {"metrics": {}}, tiers=slow, config=config, **little,
    )  # fmt: skip
    for found in (first, second):
        assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
        assert {one["reason"] for one in found} == {"length"}
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:external_prefix_cache_hits"] > 0, "or it tests nothing"
    assert aborted["left"] == 0 and usage == 0


def test_many_streams_with_aborts_while_the_cache_is_small(hybrid: Run, tmp_path: Path) -> None:
    """20 MiB of KV for 40 streams: preempted, aborted after any number of tokens, cold and from both tiers."""
    prompts = [tokens(1, 130 * (number % 4)) + tokens(10 + number, 100 + 4 * number) for number in range(40)]
    aborted = {str(number): 1 + 2 * number for number in range(0, 40, 3)}
    asked = {"streams": {"prompts": prompts, "max_tokens": 120, "aborted": aborted}}
    size = {"max_num_seqs": 40, "max_model_len": 1024}
    (expected,) = hybrid({"streams": {**asked["streams"], "aborted": {}}}, connector=False, **size)
    few = {**size, "kv_cache_memory_bytes": 20 << 20}
    config = {"save_decode_cache": True, "chunk_tokens": 2 * BLOCK}
    first, _, second, usage, metrics = hybrid(
        asked, {"forget": {}}, asked, {"usage": {}}, {"metrics": {}}, config=config, **few
    )
    third, _ = hybrid(asked, {"settle": {}}, config=config, **few)
    for found in (first, second, third):
        assert [one for one in found if one is not None] == [
            one for number, one in enumerate(expected) if str(number) not in aborted
        ]
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:external_prefix_cache_hits"] > 0, "or it tests nothing"
    assert usage == 0


def test_an_engine_that_is_killed_while_it_saves_leaves_nothing_wrong(hybrid: Run, tmp_path: Path) -> None:
    cold, control = hybrid(generate(PROMPTS), generate(PROMPTS), connector=False)
    dying = [memory(), faulty(tmp_path, {"put": {"dies": 5}})]
    hybrid(generate(PROMPTS), {"settle": {}}, tiers=dying, fails=True)
    there = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and "+tmp" in path.parts]
    assert there, "a blob of which a half was written"
    found, again, _ = hybrid(generate(PROMPTS), generate(PROMPTS), {"settle": {}})
    assert [one["tokens"] for one in found] == [one["tokens"] for one in cold]
    assert sum(one["cached"] for one in found) < sum(one["cached"] for one in control)
    same(again, control)
    (third,) = hybrid(generate(PROMPTS))
    same(third, control)


def test_ranks_keep_their_parts_and_agree(hybrid: Run, tmp_path: Path) -> None:
    prompts = [tokens(1, 900), tokens(2, 300)]
    ranks: dict[str, Any] = {
        "tensor_parallel_size": 2, "distributed_executor_backend": "mp", "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }  # fmt: skip
    _, control, _ = hybrid(generate(prompts), generate(prompts), {"settle": {}}, **ranks)
    blobs = [path for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.is_file()]
    fingerprints = sorted({path.parts[-4] for path in blobs})
    assert len(fingerprints) == 4, "one of each group and rank"
    for path in blobs:
        if path.parts[-4] == fingerprints[0] and path.name.startswith("1-"):
            data = bytearray(path.read_bytes())
            data[-len(data) // 2] ^= 0x10
            path.write_bytes(data)
    found, again = hybrid(generate(prompts), generate(prompts), **ranks)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    assert [one["cached"] for one in again] == [896, 256]
    same(again, control)


def test_what_a_window_rules_out_is_refused_at_start_up(windowed: Run) -> None:
    printed = windowed(generate([tokens(1, 300)]), fails=True, extra={"async_load": False})
    assert "kv_connector_extra_config.async_load" in printed and "remove it" in printed
