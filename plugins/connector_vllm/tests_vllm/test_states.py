"""Models with states, chunked local attention and latents: the answers of vLLM's own prefix cache, or its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Run, faulty, has_amx, memory, tokens
from kinds import STATES, run_by
from test_prefixes import same
from test_windows import AROUND, generate, while_blocks_are_few

MODELS = run_by(STATES)


@pytest.fixture
def convolutions(of_kind: Callable[[str], Run]) -> Run:
    return of_kind("convolutions")


def state_blobs(folder: Path) -> dict[int, Path]:
    """The blobs of the group that has the fewest, by their number in the sequence."""
    groups: dict[str, dict[int, Path]] = {}
    for path in (folder / "kv").rglob("[0-9]*-*"):
        if path.is_file():
            groups.setdefault(path.parts[-4], {})[int(path.name.split("-")[0])] = path
    assert len(groups) == 2
    return min(groups.values(), key=len)


@pytest.mark.parametrize("kind", MODELS)
def test_hits_answer_as_the_engines_own_prefix_cache(of_kind: Callable[[str], Run], kind: str) -> None:
    engine, limits = of_kind(kind), MODELS[kind].settings
    if MODELS[kind].needs == "AMX" and not has_amx():
        assert "latents (MLA) on a processor without AMX" in engine(generate([]), fails=True, **limits)
        return
    prompts = [tokens(number, length) for number, length in enumerate(AROUND, 2)]
    config = {"chunk_tokens": 4 * BLOCK}
    whole = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    cold, control = engine(generate(prompts), generate(prompts), connector=False, **limits)
    assert len({tuple(one["tokens"]) for one in cold}) == len(prompts), "or it tests nothing"
    first, _, _, warm = engine(
        generate(prompts), {"settle": {}}, {"forget": {}}, generate(prompts), config=config, **limits
    )
    same(first, cold)
    assert [one["cached"] for one in warm] == [one["cached"] for one in control] == whole
    same(warm, control)
    found, metrics = engine(generate(prompts), {"metrics": {}}, config=config, **limits)
    assert [one["cached"] for one in found] == whole
    same(found, control)
    assert metrics["vllm:external_prefix_cache_hits"] == sum(whole)


def test_a_shared_beginning_is_found_where_vllm_kept_its_state(convolutions: Run) -> None:
    """Once two prompts have parted there; behind a state that vLLM has itself; and the next turn of a chat, from a
    state that was generated."""
    stem = tokens(1, 900)
    prompts = [stem[:300], stem, stem[:512] + tokens(3, 200)]
    chat = {"chat": {"prompt": tokens(5, 200), "turns": [tokens(6, 60), tokens(7, 60)], "max_tokens": 140}}
    config = {"chunk_tokens": 4 * BLOCK, "save_decode_cache": True}
    third = stem[:512] + tokens(4, 30)
    _, _, control, talk = convolutions(generate(prompts), chat, generate([*prompts, third]), chat, connector=False)
    convolutions(generate(prompts), chat, {"settle": {}}, config=config)
    found, again = convolutions(generate([*prompts, third]), chat, config=config)
    assert [one["cached"] for one in found] == [one["cached"] for one in control] == [256, 896, 640, 512]
    same(found, control)
    assert [one["cached"] for one in again] == [one["cached"] for one in talk] == [256, 384]
    same(again, talk)


@pytest.mark.parametrize("fault", ["flipped", "gone", "raises"])
def test_a_request_whose_state_does_not_come_begins_anew(convolutions: Run, tmp_path: Path, fault: str) -> None:
    prompts = [tokens(1, 900), tokens(2, 300)]
    cold, control, _ = convolutions(generate(prompts), generate(prompts), {"settle": {}})
    states = state_blobs(tmp_path)
    assert sorted(states) == [1, 6], "of whole blocks, where a prompt ends"
    if fault == "gone":
        states[6].unlink()
    elif fault == "flipped":
        data = bytearray(states[6].read_bytes())
        data[-len(data) // 2] ^= 0x10
        states[6].write_bytes(data)
    tiers = [memory(), faulty(tmp_path, {"get": {"fail": True}} if fault == "raises" else {}, deadline="1s")]
    found, again, usage = convolutions(generate(prompts), generate(prompts), {"usage": {}}, tiers=tiers)
    same(found, cold)
    assert [one["cached"] for one in found] == [0, 0 if fault == "raises" else 256]
    assert {one["reason"] for one in found} == {"length"}
    assert [one["cached"] for one in again] == [896, 256]
    same(again, control)
    assert usage == 0


def test_requests_that_come_and_go_while_blocks_are_few(of_kind: Callable[[str], Run], tmp_path: Path) -> None:
    while_blocks_are_few(
        of_kind("mamba2"), tmp_path, {"num_gpu_blocks_override": 20}, max_tokens=80, **MODELS["mamba2"].settings
    )


@pytest.mark.parametrize("kind", ["convolutions", "local"])
def test_ranks_keep_their_parts(of_kind: Callable[[str], Run], kind: str) -> None:
    """Llama 4 changes its configuration while it loads, where vLLM's scheduler does not see it."""
    engine = of_kind(kind)
    prompts = [tokens(1, 900), tokens(2, 300)]
    ranks: dict[str, Any] = {
        "tensor_parallel_size": 2, "distributed_executor_backend": "mp", "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }  # fmt: skip
    _, control, _ = engine(generate(prompts), generate(prompts), {"settle": {}}, **ranks)
    (found,) = engine(generate(prompts), **ranks)
    assert [one["cached"] for one in found] == [896, 256]
    same(found, control)


@pytest.mark.parametrize(("setting", "said"), [
    ({"enable_prefix_caching": False}, "mamba_cache_mode none"), ({"prefix_match_unit": 64}, "hashes of 64"),
])  # fmt: skip
def test_states_that_cannot_be_kept_are_refused_at_start_up(
    convolutions: Run, setting: dict[str, Any], said: str
) -> None:
    assert said in convolutions(generate([tokens(1, 300)]), fails=True, **setting)
