"""Questions in one pass are answered as each would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom import KVLoomError
from kvloom_eval import scoring
from kvloom_eval.prompts import Asked, Prompts
from kvloom_eval.tasks import Room, item

CONTEXT = list(range(40, 90))
ASKED = [Asked([3, 4, 5], [[6, 7, 8], [9], [10, 11]], 0), Asked([12, 13], [[14, 15], [16, 17]], 1)]


def alone(model: Any, one: Asked, choice: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*CONTEXT, *one.question, *choice]])
    with torch.no_grad():
        logprobs = model(ids).logits[0].float().log_softmax(-1)
    at = len(CONTEXT) + len(one.question) - 1
    return logprobs[at : at + len(choice)]


def test_answers_are_those_of_separate_prompts(model: Any) -> None:
    kv = scoring.context_kv(model, CONTEXT, torch.float32)
    for one, found in zip(ASKED, scoring.answers(model, kv, ASKED), strict=True):
        sums = []
        for choice in one.choices:
            own = alone(model, one, choice).gather(1, torch.tensor(choice)[:, None])
            sums.append(own.sum())
        whole = alone(model, one, one.choices[one.right])
        torch.testing.assert_close(found.logprobs, whole, atol=1e-4, rtol=1e-4)
        assert found.probability == pytest.approx(float(torch.stack(sums).softmax(0)[one.right]), abs=1e-5)
        assert found.right == (int(torch.stack(sums).argmax()) == one.right)
        assert found.exact == (whole.argmax(-1).tolist() == one.choices[one.right])


def test_choices_of_different_lengths_can_be_compared_by_token(model: Any) -> None:
    kv = scoring.context_kv(model, CONTEXT, torch.float32)
    one = ASKED[0]
    found = scoring.answers(model, kv, [one], per_token=True)[0]
    means = [alone(model, one, each).gather(1, torch.tensor(each)[:, None]).mean() for each in one.choices]
    assert found.probability == pytest.approx(float(torch.stack(means).softmax(0)[0]), abs=1e-5)
    assert found.probability != pytest.approx(scoring.answers(model, kv, [one])[0].probability, abs=1e-3)


def test_greedy_decoding_is_what_exact_means(model: Any) -> None:
    with torch.no_grad():
        ids = model.generate(torch.tensor([[*CONTEXT, 3, 4, 5]]), max_new_tokens=3, do_sample=False)[0, -3:].tolist()
    kv = scoring.context_kv(model, CONTEXT, torch.float32)
    right, wrong = Asked([3, 4, 5], [ids, [1]], 0), Asked([3, 4, 5], [[*ids[:2], ids[2] ^ 1], [1]], 0)
    assert [each.exact for each in scoring.answers(model, kv, [right, wrong])] == [True, False]


def test_a_model_that_takes_no_masks_is_refused(model: Any) -> None:
    scoring.check(model)
    forward = model.forward
    try:
        model.forward = lambda *args, **more: forward(*args, **{**more, "attention_mask": None})
        with pytest.raises(KVLoomError, match="several questions"):
            scoring.check(model)
    finally:
        del model.forward


def test_a_model_with_windows_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.config, "layer_types", ["sliding_attention"] * model.config.num_hidden_layers, False)
    monkeypatch.setattr(model.config, "sliding_window", 4096, False)
    with pytest.raises(KVLoomError, match="has layers with a window"):
        scoring.check(model)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("task", ["multi-needle", "recall"])
def test_prompts_are_cut_between_context_and_question(characters: Any, task: str, plain: bool) -> None:
    prompts = Prompts(characters, plain=plain)
    made = item(task, 0, Room(3000, prompts.count))
    found = prompts.of(made)
    text = "".join(map(chr, [*found.context, *found.asked[0].question]))
    facts = made.documents or [said for said, _ in made.turns]
    assert all(each in text for each in facts)
    assert not any(each in "".join(map(chr, found.without)) for each in facts)
    assert text.endswith(made.questions[0].lead) and made.questions[0].ask in text
    if not plain:
        assert text.startswith("<system>Answer.</><user>") and text.count("<system>") == 1
        assert f"{made.questions[0].ask}</><assistant>" in text
    assert found.asked[0].choices == [[ord(each) for each in choice] for choice in made.questions[0].choices]


def test_a_template_is_asked_for(characters: Any) -> None:
    characters.chat_template = None
    with pytest.raises(KVLoomError, match=r"no chat template.*--plain"):
        Prompts(characters)
    Prompts(characters, plain=True)
