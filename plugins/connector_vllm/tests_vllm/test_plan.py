"""`kvloom plan --vllm` says of each group what a server then stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BLOCK, Run, tokens

KINDS = {"hybrid": {"full attention", "window of 256 tokens"}, "convolutions": {"full attention", "states"}}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_by_group_are_those_that_are_stored(
    request: pytest.FixtureRequest, of_kind: Callable[[str], Run], tmp_path: Path, kind: str
) -> None:
    engine = request.getfixturevalue(kind) if kind == "hybrid" else of_kind(kind)
    engine({"generate": {"prompts": [tokens(1, 3 * BLOCK + 1)]}}, {"settle": {}})
    sizes: dict[str, set[int]] = {}
    for path in (tmp_path / "kv").rglob("[0-9]*-*"):
        if path.is_file():
            sizes.setdefault(path.parts[-4], set()).add(path.stat().st_size)
    groups = engine.footprint()["groups"]
    assert {group["kind"] for group in groups} == KINDS[kind]
    assert {group["chunk_tokens"] for group in groups} == {BLOCK}
    assert not any("_config." in group["spec"]["revision"] for group in groups), "vLLM's defaults are not named"
    stored = sorted(size for some in sizes.values() for size in some)
    planned = sorted(group["page_bytes"] * group["layers"] for group in groups)
    assert len(stored) == len(planned) == 2
    for size, expected in zip(stored, planned, strict=True):
        assert 0 < size - expected <= 4096, "the rest is what every blob begins with"
    refused = engine.footprint(chunk_tokens=100)
    assert refused == {"error": "chunk_tokens: 100 is no multiple of vLLM's block size, 128; write 128"}


def test_a_model_of_states_alone_is_taken_with_a_prefix_cache(of_kind: Callable[[str], Run]) -> None:
    assert [group["kind"] for group in of_kind("mamba2_alone").footprint()["groups"]] == ["states"]
