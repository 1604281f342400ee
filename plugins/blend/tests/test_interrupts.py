"""A pass interrupted by Ctrl-C leaves the model unchanged: it computes as before, and can be blended."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from blend_models import config, joined, model, text, whole
from torch.utils.hooks import RemovableHandle

from kvloom_blend import blended
from kvloom_blend.runner.attention import set_for
from kvloom_blend.runner.blend_pass import _narrow_queries

PROMPT = joined(text(1), text(0), text(2))


@pytest.fixture
def mine() -> Any:
    return copy.deepcopy(model())


def test_hooks_that_are_left_behind_do_nothing(mine: Any) -> None:
    before = whole(mine, PROMPT)
    narrowed = _narrow_queries(mine.model.layers[2])
    context = narrowed.__enter__()
    assert torch.equal(whole(mine, PROMPT), before)
    assert not torch.equal(context.run(whole, mine, PROMPT), before), "they do something to whom they are for"


def test_attention_that_is_left_behind_is_undone(mine: Any) -> None:
    before, own = whole(mine, PROMPT), mine.config._attn_implementation
    with blended(mine, config({"executor": "none"})) as it:
        it.remember(text(0))
        left = set_for(mine.config)
        left.__enter__()
        assert torch.equal(whole(mine, PROMPT), before)
        assert it.prefill(PROMPT, store=False).blended_tokens, "and is no change of the model"
        assert mine.config._attn_implementation == own
        left = set_for(mine.config)
        left.__enter__()
        with set_for(mine.config):
            assert torch.equal(whole(mine, PROMPT), before)
        assert mine.config._attn_implementation == own


def test_a_hook_that_is_left_behind_holds_nothing_of_its_pass(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pass:
        def before_layer(self, *_: Any) -> Any:
            raise AssertionError("nobody calls it any more")

    with blended(mine, config({"executor": "none"})) as it:
        done: Any = Pass()
        with monkeypatch.context() as patch, it.runner._hooked(done):
            patch.setattr(RemovableHandle, "remove", lambda handle: None)
        assert all(layer._forward_pre_hooks for layer in mine.model.layers)
        gone = weakref.ref(done)
        del done
        assert gone() is None
        assert torch.equal(whole(mine, PROMPT), whole(model(), PROMPT))
