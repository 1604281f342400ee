"""Documents are put together where they stand: what has to be exact is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom import KVLoomError
from kvloom_eval.blending import FULL, Blender
from kvloom_eval.prompts import Asked, Prompt

HEAD, QUESTION = list(range(5, 25)), [3, 4, 5]
DOCUMENTS = [list(range(40, 70)), list(range(90, 110)), list(range(200, 240))]


def prompt(documents: list[list[int]]) -> Prompt:
    return Prompt(HEAD, documents, [Asked(QUESTION, [[6, 7], [9]], 0), Asked([30, 31], [[12], [10, 11]], 1)])


def apart(found: dict[str, Any], name: str) -> float:
    pairs = zip(found[name].answers, found[FULL].answers, strict=True)
    return max(float((one.logprobs - other.logprobs).abs().max()) for one, other in pairs)


def test_all_computed_again_is_a_prefill_and_nothing_is_not(model: Any) -> None:
    blender = Blender(model, ("full", "none", "epic/0.3"))
    found = blender.run(prompt(DOCUMENTS), blender.names())
    assert apart(found, "full") < 1e-3 < 0.05 < apart(found, "none")
    assert found["none"].share < found["epic/0.3"].share < found["full"].share <= 1.0
    with torch.no_grad():
        ids = [*HEAD, *(token for each in DOCUMENTS for token in each), *QUESTION, 6, 7]
        whole = model(torch.tensor([ids])).logits[0].log_softmax(-1)[-3:-1]
    torch.testing.assert_close(found[FULL].answers[0].logprobs, whole, atol=1e-4, rtol=1e-4)


def test_the_first_document_stands_where_it_was_computed(model: Any) -> None:
    blender = Blender(model, ("none",))
    assert apart(blender.run(prompt(DOCUMENTS[:1]), blender.names()), "none") < 1e-3


def test_executors_have_shares(model: Any) -> None:
    assert Blender(model, ("none", "epic")).names() == [
        FULL,
        "none",
        *(f"epic/{each}" for each in (0.05, 0.1, 0.15, 0.2, 0.3)),
    ]
    for wrong in ("magic", "epic/2", "epic/x"):
        with pytest.raises(KVLoomError, match=f"--blend {wrong}"):
            Blender(model, (wrong,))
