"""Prefixes found in a fresh process: tokens, logprobs and bytes are those of vLLM's own prefix cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Run, disk, has_amx, memory, tokens

SHARED = tokens(1, 700)
PROMPTS = [tokens(2, 300), SHARED, SHARED[:512] + tokens(3, 100), SHARED[:640] + tokens(4, 3)]
FOUND = [256, 640, 512, 640]
"""Number of tokens of each prompt in whole blocks that an earlier prompt had."""


def same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["logprobs"] == other["logprobs"]


def alike(found: list[Any], expected: list[Any]) -> None:
    """Compare answers from KV that was computed in steps of other lengths: on some processors the last bits differ."""
    for one, other in zip(found, expected, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "extra"),
    [
        ("bfloat16", {"async_load": True}),
        ("bfloat16", {"async_load": False}),
        ("float32", {"async_load": False}),
        ("float32", {"async_load": False, "by_layer": True}),
    ],
)
def test_a_fresh_process_answers_as_the_engines_own_prefix_cache(run: Run, dtype: str, extra: dict[str, bool]) -> None:
    settings: dict[str, Any] = {"extra": extra, "dtype": dtype}
    _, control, _ = run(
        {"generate": {"prompts": PROMPTS}}, {"generate": {"prompts": PROMPTS}}, {"settle": {}}, **settings
    )
    assert [one["cached"] for one in control] == FOUND
    found, metrics = run({"generate": {"prompts": PROMPTS}}, {"metrics": {}}, **settings)
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    # Of the third and fourth prompt the engine's own cache has most.
    assert metrics["vllm:external_prefix_cache_hits"] == 256 + 640
    assert metrics["vllm:prefix_cache_hits"] == 512 + 640


def test_without_the_engines_own_cache_all_comes_from_here(run: Run) -> None:
    _, control, _ = run({"generate": {"prompts": PROMPTS}}, {"generate": {"prompts": PROMPTS}}, {"settle": {}})
    found, metrics = run({"generate": {"prompts": PROMPTS}}, {"metrics": {}}, enable_prefix_caching=False)
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    assert metrics["vllm:external_prefix_cache_hits"] == sum(FOUND)


def test_layer_by_layer_from_memory(run: Run, tmp_path: Path) -> None:
    """Beside requests that have nothing to wait for, and of one whose prompt was not seen before."""
    one = {"generate": {"prompts": [*PROMPTS, tokens(9, 90)]}}
    extra = {"async_load": False, "by_layer": True}
    _, control, _, _, found = run(one, one, {"settle": {}}, {"forget": {}}, one, tiers=[memory()], extra=extra)
    assert [one["cached"] for one in found] == [*FOUND, 0]
    same(found, control)
    assert "without a wait" not in (tmp_path / "log-1").read_text(), "vLLM waits for every layer"


def test_chunks_of_several_blocks(run: Run) -> None:
    config = {"chunk_tokens": 2 * BLOCK, "save_tails": False}
    _, control, _ = run(
        {"generate": {"prompts": PROMPTS}}, {"generate": {"prompts": PROMPTS}}, {"settle": {}}, config=config
    )
    (found,) = run({"generate": {"prompts": PROMPTS}}, config=config)
    assert [one["cached"] for one in found] == [256, 512, 512, 640], "the last finds a block more in the engine's own"
    same([found[0], found[2]], [control[0], control[2]])


def test_the_tail_of_a_prompt_is_found_by_itself_and_by_longer_ones(run: Run) -> None:
    """As much as the engine's own prefix cache finds, block by block."""
    stem = tokens(3, 7 * BLOCK + 5)
    prompts = [stem, stem + tokens(4, 40), stem + tokens(5, 3 * BLOCK)]
    config = {"chunk_tokens": 4 * BLOCK}
    one = {"generate": {"prompts": [stem]}}
    _, control = run(one, {"generate": {"prompts": prompts}}, connector=False)
    run(one, {"settle": {}}, config=config)
    reads = {"config": config, "kv": {"kv_role": "kv_consumer"}, "enable_prefix_caching": False}
    (found,) = run({"generate": {"prompts": prompts}}, **reads)
    assert [one["cached"] for one in found] == [one["cached"] for one in control] == [7 * BLOCK] * 3
    same(found, control)


def test_two_engines_store_the_same_bytes(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run({"generate": {"prompts": PROMPTS[:2]}}, {"settle": {}}, tiers=[disk(tmp_path, path=str(tmp_path / name))])
    one, two = (
        {path.name: path for path in (tmp_path / name).rglob("[0-9]*-*") if path.is_file()} for name in ("one", "two")
    )
    assert len(one) == 2 + 5 and set(one) == set(two)
    size = 4 * BLOCK * 2 * 32 * 2 * 4  # layers, tokens, heads, elements of a head, K and V, bytes
    for name, path in one.items():
        assert path.read_bytes()[-size:] == two[name].read_bytes()[-size:]
        assert len(set(path.read_bytes()[-size:])) > 200, "these are numbers, not padding"


def test_a_codec_on_pages(run: Run, tmp_path: Path) -> None:
    tiers = [disk(tmp_path, serializer={"type": "cachegen", "mode": "lossless"})]
    _, control, _ = run(
        {"generate": {"prompts": PROMPTS}},
        {"generate": {"prompts": PROMPTS}},
        {"settle": {}},
        tiers=tiers,
        dtype="bfloat16",
    )
    (found,) = run({"generate": {"prompts": PROMPTS}}, tiers=tiers, dtype="bfloat16")
    assert [one["cached"] for one in found] == FOUND
    same(found, control)


def test_generated_tokens_are_there_for_the_next_turn(run: Run) -> None:
    turns = {"chat": {"prompt": tokens(5, 200), "turns": [[5, 6], tokens(6, 30), tokens(7, 20)], "max_tokens": 100}}
    control, _ = run(turns, {"settle": {}}, config={"save_decode_cache": True})
    (found,) = run(turns, config={"save_decode_cache": True}, enable_prefix_caching=False)
    same(found[1:], control[1:])
    # The second turn's prompt is 332 tokens: 128 of them have been generated or follow what was.
    assert [one["cached"] for one in found] == [128, 256, 384]
    assert [(one["length"] - 1) // BLOCK * BLOCK for one in found] == [128, 256, 384]


def test_the_last_generated_tokens_are_there_for_the_next_turn(run: Run) -> None:
    turns = {"chat": {"prompt": tokens(5, 200), "turns": [[5, 6], tokens(6, 30), tokens(7, 20)], "max_tokens": 100}}
    config = {"chunk_tokens": 4 * BLOCK, "save_decode_cache": True}
    control, _ = run(turns, {"settle": {}}, config=config)
    (found,) = run(turns, config=config, enable_prefix_caching=False)
    same(found[1:], control[1:])
    assert [one["cached"] for one in found] == [128, 256, 384]
    assert [one["cached"] for one in control] == [0, 256, 384]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k_and_v_through_a_codec_that_reads_them(run: Run, tmp_path: Path, dtype: str) -> None:
    """The order in the engine's pages is found by its own writing; what it is, the answers say."""
    settings: dict[str, Any] = {"dtype": dtype, "config": {"connector": "vllm_blob"}}
    _, control, _ = run(
        {"generate": {"prompts": PROMPTS}}, {"generate": {"prompts": PROMPTS}}, {"settle": {}}, **settings
    )
    (found,) = run({"generate": {"prompts": PROMPTS}}, **settings)
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    if dtype == "bfloat16":
        tiers = [disk(tmp_path, path=str(tmp_path / "lossy"), serializer={"type": "cachegen", "quality": "high"})]
        run({"generate": {"prompts": PROMPTS}}, {"settle": {}}, tiers=tiers, **settings)
        (lossy,) = run({"generate": {"prompts": PROMPTS[:2]}}, tiers=tiers, **settings)
        assert [one["cached"] for one in lossy] == FOUND[:2]
        for one, exact in zip(lossy, control, strict=False):
            assert one["logprobs"] != exact["logprobs"], "it went through the codec"
            assert abs(one["logprobs"][0] - exact["logprobs"][0]) < 1.0


def test_k_and_v_of_two_ranks_are_loaded_by_one_and_the_other_way_round(run: Run, tmp_path: Path) -> None:
    """Sums over two ranks have other last bits; with wrong heads the answers would be others."""
    config = {"connector": {"type": "vllm_blob", "shards": 2}}
    two: dict[str, Any] = {
        "tensor_parallel_size": 2, "distributed_executor_backend": "mp", "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }  # fmt: skip
    more = [tokens(11, 400), tokens(12, 300)]
    asked, others = {"generate": {"prompts": PROMPTS}}, {"generate": {"prompts": more}}
    _, by_two, _ = run(asked, asked, {"settle": {}}, config=config, **two)
    by_one, _, control, _ = run(asked, others, others, {"settle": {}}, config=config)
    back, metrics = run(others, {"metrics": {}}, config=config, **two)
    assert len({path.parts[-4] for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.is_file()}) == 2
    for found, expected, cached in ((by_one, by_two, FOUND), (back, control, [384, 256])):
        assert [one["cached"] for one in found] == cached
        for one, other in zip(found, expected, strict=True):
            assert one["tokens"] == other["tokens"]
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
    assert metrics["vllm:external_prefix_cache_hits"] == 384 + 256


@pytest.mark.skipif(not has_amx(), reason="without AMX vLLM's kernel for latents has no prefix cache")
def test_latent_kv_is_kept_once_for_all_ranks(of_kind: Callable[[str], Run], tmp_path: Path) -> None:
    latent = of_kind("latents")
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "dtype": "bfloat16"}
    settings["env"] = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    asked = {"generate": {"prompts": PROMPTS}}
    _, control, _ = latent(asked, asked, {"settle": {}}, **settings)
    blobs = [path for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.is_file()]
    assert len({path.parts[-4] for path in blobs}) == 1, "one fingerprint for both ranks"
    (found,) = latent(asked, **settings)
    # Not FOUND: the size of latents' blocks depends on the processor.
    assert [one["cached"] for one in found] == [one["cached"] for one in control] >= FOUND
    same(found, control)


def test_what_vllm_asked_for_is_recorded_and_replayed(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "requests.jsonl"
    asked = {"generate": {"prompts": PROMPTS}}
    again = tokens(2, 300)[:256] + tokens(5, 400)  # longer than what is there
    _, _, _, found, _, _, metrics = run(
        asked, {"settle": {}}, {"forget": {}}, asked, {"generate": {"prompts": [again]}}, {"settle": {}},
        {"metrics": {}}, tiers=[memory()], env={"KVLOOM_TRACE": str(trace)},
    )  # fmt: skip
    assert [one["cached"] for one in found] == FOUND
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(sum(line.get("served", {}).values()) for line in lines) == metrics["vllm:external_prefix_cache_hits"]
    # Of the third and fourth prompt vLLM's own cache had what it could, each time, and of the last one its beginning.
    hits, rate = replayed(trace, "64MiB")
    assert hits == 256 + 640 == metrics["vllm:external_prefix_cache_hits"]
    assert rate == hits / ((256 + 640) * 2 + 384)
    assert 0 < replayed(trace, "1MiB")[0] < hits, "four chunks are not enough"


def replayed(trace: Path, capacity: str) -> tuple[int, float]:
    """Tokens that a memory tier of this capacity gives, and their share of those that were asked for."""
    config = trace.with_suffix(".yaml")
    config.write_text(json.dumps({"chunk_tokens": BLOCK, "tiers": [memory(capacity)]}))
    command = ["trace", "replay", str(trace), str(config), "--bytes-per-token", "2048", "--json"]
    main = "from kvloom.cli.main import main; main()"
    (run, *_) = json.loads(subprocess.check_output([sys.executable, "-c", main, *command], text=True))["runs"]
    return run["tiers"][0]["hit_tokens"], run["hit_rate"]
