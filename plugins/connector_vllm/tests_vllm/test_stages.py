"""Pipeline parallelism: each stage keeps its layers, and a chunk is there when every stage's part is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run, tokens
from test_prefixes import FOUND, PROMPTS, alike, same
from test_windows import generate

TWO: dict[str, Any] = {
    "pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}  # fmt: skip


def blobs(folder: Path) -> dict[str, list[Path]]:
    """By fingerprint."""
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / "kv").rglob("[0-9]*-*")):
        if path.is_file():
            found.setdefault(path.parts[-4], []).append(path)
    return found


def test_stages_keep_their_layers_and_one_that_lacks_a_chunk_makes_it_a_miss(run: Run, tmp_path: Path) -> None:
    asked = generate(PROMPTS)
    _, control, _ = run(asked, asked, {"settle": {}}, **TWO)
    first, second = blobs(tmp_path).values()
    assert len(first) == len(second) == 7
    (found,) = run(asked, **TWO)
    assert [one["cached"] for one in found] == FOUND
    same(found, control)
    for path in second:
        if path.name.startswith("0-"):
            path.unlink()
    lacking, _, again = run(asked, {"settle": {}}, asked, **TWO)
    assert lacking[0]["cached"] == 0
    assert [one["tokens"] for one in lacking] == [one["tokens"] for one in control]
    same(again, control)


@pytest.mark.parametrize("model", ["run", "hybrid"])
def test_a_stage_whose_loads_fail_has_the_request_computed(
    request: pytest.FixtureRequest, tmp_path: Path, model: str
) -> None:
    """With windows beside full attention from its beginning, because vLLM has no blocks before the windows."""
    engine = request.getfixturevalue(model)
    prompts = [tokens(1, 900), tokens(2, 300)]
    _, control, _ = engine(generate(prompts), generate(prompts), {"settle": {}}, **TWO)
    damaged = sorted(blobs(tmp_path).items())[-1][1]
    for path in damaged:
        if path.name.startswith(("1-", "3-")):
            data = bytearray(path.read_bytes())
            data[-len(data) // 2] ^= 0x10
            path.write_bytes(data)
    found, again, usage = engine(generate(prompts), generate(prompts), {"usage": {}}, **TWO)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    assert {one["reason"] for one in found} == {"length"}
    assert [one["cached"] for one in again] == [896, 256]
    (alike if model == "run" else same)(again, control)  # the one goes on behind what came, the other begins anew
    assert usage == 0
