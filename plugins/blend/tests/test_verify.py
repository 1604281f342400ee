"""`kvloom blend verify`: a model that is fit passes, and whatever is wrong is seen."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blend_models import model
from blend_texts import TEXTS, Letters

from kvloom_blend import rotations_of, verify
from kvloom_blend.demo.texts import beginning, module_texts, read_texts, tokenized
from kvloom_blend.quality import Agreement, Reference, logits_of
from kvloom_blend.rotation import Rotation, Rotations

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def subject(request: pytest.FixtureRequest) -> Iterator[verify.Subject]:
    found = verify.Subject(model("llama", request.param), Letters(), TEXTS, most_tokens=40)
    found.remember()
    yield found
    found.close()


def all_again(subject: verify.Subject) -> Any:
    return subject.executor("cacheblend", recompute_ratio=1.0)


def test_prompts_have_passages_in_other_orders_and_a_question_of_their_own() -> None:
    documents = [torch.full((30,), number) for number in range(10, 14)]
    prompts = verify.prompts_of(documents, [1])
    assert [one.tokens[one.question_start :].tolist() for one in prompts] == [[number] * 24 for number in range(10, 14)]
    assert all(one.boundaries == [1, 31, 61, 91] for one in prompts)
    assert [[int(one.tokens[at]) for at in one.boundaries[:-1]] for one in prompts] == [
        [11, 12, 13], [12, 13, 10], [13, 10, 11], [10, 11, 12],
    ]  # fmt: skip


def test_a_model_that_is_fit_passes(subject: verify.Subject) -> None:
    found = list(verify.rotations_hold(subject.model, subject.blended.runner.rotations))
    assert len(found) == len(verify.DELTAS) and all(one.holds for one in found)
    assert all(one.measured > 0 for one in found), "nothing was turned"
    found = list(verify.identities_hold(subject, all_again(subject)))
    assert len(found) == 4 and all(one.holds for one in found)
    assert {one.limit for one in found} == {1e-4 if subject.dtype == torch.float32 else 2e-2}


def test_passages_are_found_in_every_prompt(subject: verify.Subject) -> None:
    for prompt in subject.prompts:
        done = subject.blended.prefill(prompt.tokens, boundaries=[prompt.boundaries], store=False)
        assert done.blended_tokens == prompt.question_start - 1, "all but the token that begins a prompt"


def test_a_wrong_frequency_is_seen() -> None:
    subject = model("llama")
    right = rotations_of(subject)
    assert right[0] is not None
    wrong = Rotation(right[0].inv_freq * (1 + 1e-3), head_size=right[0].head_size)
    found = list(verify.rotations_hold(subject, Rotations([*right[:3], wrong])))  # type: ignore[misc]
    assert not any(one.holds for one in found)


def test_no_position_is_tried_that_frequencies_are_not_for() -> None:
    subject = model("llama")
    rotations = Rotations(list(rotations_of(subject)), max_length=5000)
    assert [one.what for one in verify.rotations_hold(subject, rotations)] == [
        "rotation by 16 tokens", "rotation by 512 tokens", "rotation by 4,096 tokens",
    ]  # fmt: skip


def test_an_executor_that_does_not_compute_again_is_seen(subject: verify.Subject) -> None:
    lazy = subject.executor("none")
    found = [one.holds for one in verify.identities_hold(subject, lazy)]
    assert found == [True, False, False, True]


def test_kv_in_a_wrong_place_is_seen(subject: verify.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    if subject.dtype != torch.float32:
        pytest.skip("random weights attend so evenly that it is lost in rounding")

    class Shifted(verify.GivenTask):
        def __init__(self, kv: torch.Tensor, valid: torch.Tensor, stood: torch.Tensor) -> None:
            super().__init__(kv, valid, torch.where(valid, stood + 400, 0))

    monkeypatch.setattr(verify, "GivenTask", Shifted)
    assert not list(verify.identities_hold(subject, all_again(subject)))[-1].holds


@pytest.mark.parametrize("measured", [math.nan, math.inf, 1.01])
def test_what_is_not_within_the_limit_does_not_hold(measured: float) -> None:
    assert not verify.Finding("it", measured, 1.0).holds
    assert verify.Finding("it", 1.0, 1.0).holds


def test_quality_rises_with_what_is_computed_again() -> None:
    subject = verify.Subject(model("llama"), Letters(), TEXTS, most_tokens=40)
    subject.remember()
    found = list(verify.qualities(subject, "cacheblend", ratios=(0.0, 0.5, 1.0)))
    subject.close()
    kl, shares = [one.agreement.kl for one in found], [one.computed_share for one in found]
    assert kl[0] > kl[1] > kl[2] >= 0 and kl[2] < 1e-9
    assert found[2].agreement.top1 == 1.0
    assert 0 < shares[0] < shares[1] < shares[2] <= 1


def test_two_documents_are_too_few() -> None:
    with pytest.raises(ValueError, match="2 documents are too few"):
        verify.Subject(model(), Letters(), TEXTS[:2])


def test_a_reference_is_what_the_model_says_by_itself(subject: verify.Subject) -> None:
    if subject.dtype != torch.float32:
        pytest.skip("the likeliest token hangs on rounding")
    prompt, runner = subject.prompts[0].tokens, subject.blended.runner
    found = Reference.of(runner, prompt, answer_tokens=5)
    with torch.inference_mode():
        for place, token in enumerate(found.answer):
            said = torch.cat([prompt, found.answer[:place]])
            logits = subject.model(said[None]).logits[0, -1]
            assert int(logits.argmax()) == int(token)
            assert torch.allclose(logits, found.logits[place], atol=1e-4)
    one = Reference.of(runner, prompt, answer_tokens=1)
    assert torch.equal(one.answer, found.answer[:1]) and one.logits.shape[0] == 1
    assert torch.equal(logits_of(runner, runner.prefill([prompt]), one.answer), one.logits)


def test_agreement_is_the_divergence_from_the_whole_prefill() -> None:
    expected, found = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log()
    agreement = Agreement.of(found, expected)
    first = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    second = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert agreement.kl == pytest.approx((first + second) / 2)
    assert Agreement.of(expected + 3, expected) == Agreement(pytest.approx(0, abs=1e-12), 1.0)
    assert Agreement.of(found.flip(1), expected[:1].expand(2, 2)).top1 == 1.0
    assert Agreement.mean([Agreement(1.0, 0.0), Agreement(3.0, 1.0)]) == Agreement(2.0, 0.5)


def test_texts(tmp_path: Any) -> None:
    file = tmp_path / "texts"
    file.write_bytes(b"one\nmore\r\n\r\ntwo\n\n\n\nthree\n")
    assert read_texts(file) == ["one\nmore", "two", "three"]
    os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match=r"texts has more than .* characters; give a part"):
        read_texts(file)
    assert len(module_texts()) >= 5 and all(len(text) > 500 for text in module_texts())
    assert [one.tolist() for one in tokenized(Letters(), ["ab", ""], most_tokens=1)] == [[107]]
    assert beginning(Letters()) == [1] and beginning(Letters(begins=False)) == []


def test_no_more_of_a_file_is_read_than_anybody_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom_blend.demo.texts._MOST_CHARACTERS", 1000)
    (tmp_path / "long").write_text("x" * 1000)
    assert read_texts(tmp_path / "long") == ["x" * 1000]
    for file in (tmp_path / "long", Path("/dev/zero")):
        monkeypatch.setattr("kvloom_blend.demo.texts._MOST_CHARACTERS", 999)
        with pytest.raises(ValueError, match="has more than 999 characters; give a part of it"):
            read_texts(file)
