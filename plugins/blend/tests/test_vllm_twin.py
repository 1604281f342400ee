"""The twin, where vLLM need not be."""

from __future__ import annotations

from typing import Any

import pytest
from blend_models import NONE, SEPARATOR, config, model

from kvloom_blend.vllm.orders import Prompt
from kvloom_blend.vllm.twin import Twin


@pytest.mark.parametrize(("retriever", "tokens", "boundaries"), [
    ({"type": "explicit"}, [7] * 1000, list(range(1000))),
    ({"type": "separator", "separator": SEPARATOR}, [7, SEPARATOR] * 500, None),
])  # fmt: skip
def test_a_prompt_of_crumbs_is_not_looked_up(
    retriever: Any, tokens: list[int], boundaries: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client would have the worker hash and ask for each of them."""
    plan = config(NONE)
    plan["blend"] = {**plan["blend"], "retriever": retriever}
    twin = Twin(model(), plan)
    asked: list[int] = []

    def stored(tokens: Any, *args: Any, **settings: Any) -> Any:
        asked.append(len(tokens))
        return [], []

    monkeypatch.setattr(twin._retriever, "stored", stored)
    assert twin.stored(Prompt("a", tokens, None, boundaries)) == 0 and not asked
    few = None if boundaries is None else boundaries[:50]
    assert twin.stored(Prompt("b", tokens[:100], None, few)) == 0 and asked == [100]
    twin.close()
