"""Speculative decoding, and prompts that are not tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run, memory, tokens
from test_prefixes import FOUND, PROMPTS
from test_windows import generate


def test_guesses_that_were_wrong_are_not_stored(run: Run) -> None:
    """Of an answer that is found again, every token is as without speculation."""
    turns = {"chat": {"prompt": tokens(5, 200), "turns": [[5, 6], tokens(6, 30), tokens(7, 20)], "max_tokens": 100}}
    (control,) = run(turns, connector=False)
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    first, _, _, again, metrics = run(
        turns, {"settle": {}}, {"forget": {}}, turns, {"metrics": {}}, tiers=[memory()],
        config={"save_decode_cache": True}, speculative_config=lookup,
        env={"NUMBA_DISABLE_JIT": "1"},  # vLLM compiles its lookup of guesses in each process
    )  # fmt: skip
    for found in (first, again):
        assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    assert [one["cached"] for one in again] == [128, 256, 384]
    guessed, right = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert right < guessed, "or it tests nothing"


def test_a_draft_model_goes_on_from_its_own_kv(run: Run, tiny: Path) -> None:
    """It is the model itself: unless its KV was loaded, too, and right, its guesses are wrong."""
    speculative = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(tiny)}
    settings: dict[str, Any] = {"speculative_config": speculative}
    asked = generate(PROMPTS, max_tokens=40)
    _, control, _ = run(asked, asked, {"settle": {}}, **settings)
    found, metrics = run(asked, {"metrics": {}}, enable_prefix_caching=False, **settings)
    assert [one["cached"] for one in found] == FOUND
    assert [one["tokens"] for one in found] == [one["tokens"] for one in control]
    guessed, right = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert right > 0.9 * guessed > 0


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


def test_vllms_hashes_cover_images_from_where_they_are_on() -> None:
    """Its names are those of chunks; models with images do not run without torchvision, which processors have not."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def hashes(image: str) -> list[bytes]:
        place = PlaceholderRange(offset=20, length=4)
        seen = MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)
        request = Request(
            image, [7] * 64, SamplingParams(max_tokens=1), None, mm_features=[seen],
            block_hasher=get_request_block_hasher(16, sha256),
        )  # fmt: skip
        return [bytes(one) for one in request.block_hashes]

    one, other = hashes("one"), hashes("other")
    assert one == hashes("one") and len(one) == 4
    assert one[0] == other[0] and not set(one[1:]) & set(other[1:])
