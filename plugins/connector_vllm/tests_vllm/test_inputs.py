"""Speculative decoding, and prompts that are not tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run, tokens
from test_prefixes import FOUND, PROMPTS
from test_windows import generate


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_fresh_process_goes_on_guessing(run: Run, tiny: Path, method: str) -> None:
    """The draft model is the model itself: unless its KV is loaded, too, and right, its guesses are wrong."""
    about: dict[str, Any] = {
        "ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}, "draft_model": {"model": str(tiny)},
    }[method]  # fmt: skip
    settings: dict[str, Any] = {"speculative_config": {"method": method, "num_speculative_tokens": 3, **about}}
    asked = generate(PROMPTS, max_tokens=40)
    _, control, _ = run(asked, asked, {"settle": {}}, **settings)
    found, metrics = run(asked, {"metrics": {}}, enable_prefix_caching=False, **settings)
    assert [one["cached"] for one in found] == FOUND
    assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    guessed, right = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert right > (0.9 * guessed if method == "draft_model" else 0)


def test_embeddings_are_told_apart(run: Run) -> None:
    """A client sends them in place of tokens, and vLLM's hashes cover them."""
    settings: dict[str, Any] = {"enable_prompt_embeds": True}
    asked = {"embedded": {"seeds": [1, 2], "length": 300, "size": 256}}
    first, control, _ = run(asked, asked, {"settle": {}}, **settings)
    assert first[0]["tokens"] != first[1]["tokens"], "or it tests nothing"
    assert [one["cached"] for one in first] == [0, 0]
    (found,) = run({"embedded": {"seeds": [2, 1, 3], "length": 300, "size": 256}}, **settings)
    assert [one["cached"] for one in found] == [256, 256, 0]
    assert [one["tokens"] for one in found[:2]] == [control[1]["tokens"], control[0]["tokens"]]


def test_drafts_whose_kv_depends_on_the_token_behind_them_are_refused(run: Run, tiny: Path) -> None:
    speculative = {"method": "medusa", "model": str(tiny), "num_speculative_tokens": 2}
    printed = run(generate([tokens(1, 300)]), fails=True, speculative_config=speculative)
    assert "speculative_config.method medusa" in printed or "medusa" in printed
