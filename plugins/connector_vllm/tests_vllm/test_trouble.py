"""Stores that fail, and settings that cannot work: no wrong token, no request lost, no hang."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, faulty, memory, tokens
from test_prefixes import FOUND, PROMPTS, same
from warm import Warm


def generate(prompts: Any = PROMPTS, **more: Any) -> dict[str, Any]:
    return {"generate": {"prompts": prompts, **more}}


@pytest.fixture(scope="module")
def stored(warm: Warm, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A directory with the KV of the prompts, and what they are answered from vLLM's own prefix cache, and without."""
    folder = tmp_path_factory.mktemp("stored")
    run = Run(warm, tiny, folder)
    _, control, _ = run(generate(), generate(), {"settle": {}})
    (cold,) = run(generate(), connector=False, enable_prefix_caching=False)
    return folder / "kv", control, cold


@pytest.mark.parametrize("fault", ["raises", "hangs", "not to be asked"])
def test_a_store_that_fails_costs_time_and_nothing_else(
    run: Run, tmp_path: Path, stored: tuple[Path, Any, Any], fault: str
) -> None:
    kv, control, cold = stored
    shutil.copytree(kv, tmp_path / "kv")
    faults: dict[str, Any] = {
        "raises": {"get": {"fail": True}},
        "hangs": {"get": {"hang": 20}},
        "not to be asked": {"contains": {"hang": 20}},
    }
    tiers = [memory(), faulty(tmp_path, faults[fault], deadline="1s")]
    found, again, usage = run(generate(), generate(), {"usage": {}}, tiers=tiers)
    for one, hit, miss in zip(found, control, cold, strict=True):
        # Which blocks are computed at once decides the last bits; the tokens of this model are far from ties.
        assert one["tokens"] == hit["tokens"] == miss["tokens"]
        assert one["reason"] == "length"
    assert [one["cached"] for one in again] == FOUND
    same(again, control)
    assert usage == 0


def test_nothing_is_kept_of_a_step_that_failed(run: Run, stored: tuple[Path, Any, Any]) -> None:
    """vLLM tells connectors to save on its way out of such a step, too."""
    _, control, _ = stored
    others = [tokens(90, len(prompt)) for prompt in PROMPTS]  # blocks that are used again hold something
    _, _, error = run(
        {"generate_again": {"prompts": others}}, {"settle": {}}, {"fail": {"prompt": PROMPTS[0], "layer": 2}}
    )
    assert error == "OutOfMemoryError"
    found, again, (before, *_) = run(generate(), generate(), generate(others[:1]))
    assert found[0]["cached"] == 0 and before["cached"] == 256, "an error of the caller's is another matter"
    assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    same(again, control)


def test_adapters_do_not_meet(run: Run, tiny: Path, tmp_path: Path) -> None:
    import make_model

    one, other = tmp_path / "adapter", tmp_path / "retrained" / "adapter"
    make_model.make_adapter(tiny, one, seed=1)
    make_model.make_adapter(tiny, other, seed=2)
    settings = {"enable_lora": True, "max_lora_rank": 8}
    prompts = [tokens(2, 300)]
    plain, adapted, _ = run(generate(prompts), generate(prompts, lora=str(one)), {"settle": {}}, **settings)
    assert adapted[0]["tokens"] != plain[0]["tokens"] and adapted[0]["cached"] == 0
    found, base = run(generate(prompts, lora=str(one)), generate(prompts), **settings)
    assert found[0]["cached"] == 256 and found[0]["tokens"] == adapted[0]["tokens"]
    assert base[0]["cached"] == 256 and base[0]["tokens"] == plain[0]["tokens"]
    # Of the same name, which is all that vLLM's own hashes cover.
    (retrained,) = run(generate(prompts, lora=str(other)), **settings)
    assert retrained[0]["cached"] == 0 and retrained[0]["tokens"] != adapted[0]["tokens"]
    # vLLM evicts it and loads other weights from the same files.
    prompt, file = tokens(3, 300), one / "adapter_model.safetensors"
    kept = shutil.copyfile(file, tmp_path / "kept")
    changes = {"prompt": prompt, "lora": str(one), "other": str(other), "file": file.name}
    changed, _ = run({"changed_adapter": changes}, {"settle": {}}, max_loras=1, max_cpu_loras=1, **settings)
    shutil.copyfile(kept, file)
    (before,) = run(generate([prompt], lora=str(one)), **settings)
    assert before[0]["cached"] == 0 and before[0]["tokens"] != changed


@pytest.mark.parametrize(("change", "said"), [
    ({"extra": {"config": "/nowhere/kvloom.yaml"}}, "/nowhere/kvloom.yaml"),
    ({"config": {"chunk_tokens": 100}}, "chunk_tokens: 100 is no multiple of vLLM's block size, 128; write 128"),
    ({"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo xxhash"),
    ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16"),
    ({"tiers": [{"type": "disk"}]}, "tiers"),
])  # fmt: skip
def test_what_cannot_work_is_refused_at_start_up(run: Run, change: dict[str, Any], said: str) -> None:
    printed = run(generate(), fails=True, **change)
    assert said in printed
    if not any(words in said for words in ("block size", "xxhash", "bfloat16")):  # it takes no model to see it
        assert said in printed.strip().splitlines()[-1] and "Starting to load model" not in printed
