"""The parts of a prompt that are found, the tiers they come from, and losses on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blend_models import ALL, DISK, NONE, PROMPT, QUESTION, SEPARATOR, TEXTS, config, joined, model, valid, whole

from kvloom import BackendError
from kvloom_blend import BlendedModel, blended
from kvloom_blend.retrievers.load_task import LoadTask
from kvloom_connector_transformers import spec_of

KNOWN: list[tuple[int, ...]] = [(), (0,), (3,), (1, 2), (0, 2), (0, 1, 2, 3)]
KNOWN_TO = [
    *(("cacheblend", known) for known in KNOWN),
    *(
        pytest.param(executor, known, marks=[] if known == (0, 2) else [pytest.mark.slow])
        for executor in ("full", "none", "epic", "hybrid", "question_attention")
        for known in ((), (0, 2), (0, 1, 2, 3))
    ),
]


@pytest.mark.parametrize(("executor", "known"), KNOWN_TO, ids=str)
def test_whatever_is_known_of_a_prompt(executor: str, known: tuple[int, ...]) -> None:
    """Places that are valid are those of the texts that are known; all computed again, it is a whole prefill."""
    ratio = {} if executor in ("full", "none") else {"recompute_ratio": 1.0}
    with blended(model(), config({"executor": executor, **ratio})) as it:
        for number in known:
            it.remember(TEXTS[number])
        mask = valid(it, PROMPT)
        expected = torch.zeros(len(PROMPT), dtype=torch.bool)
        for number in known:
            expected[41 * number : 41 * number + 40] = True
        assert torch.equal(mask, expected)
        done = it.prefill(PROMPT, store=False)
    assert done.blended_tokens == 40 * len(known)
    if executor != "none":
        assert torch.allclose(done.logits[0], whole(model(), PROMPT), atol=1e-4)


@pytest.fixture(scope="module", params=["none", "cacheblend", "hybrid"])
def knowing(request: pytest.FixtureRequest) -> Iterator[BlendedModel]:
    """All texts are remembered; nothing else is to be."""
    with blended(model(), config({"executor": request.param})) as it:
        for one in TEXTS:
            it.remember(one)
        yield it


@pytest.mark.parametrize(
    "prompt",
    [
        TEXTS[0], joined(TEXTS[0]), torch.tensor([SEPARATOR]), torch.tensor([11]), torch.tensor([SEPARATOR] * 7),
        torch.cat([torch.tensor([SEPARATOR]), TEXTS[1], torch.tensor([SEPARATOR])]), joined(TEXTS[0], TEXTS[0]),
        torch.cat([TEXTS[1], torch.tensor([11])]),
    ],
    ids=["a text", "and no more", "a separator", "one token", "separators", "edges", "a text twice", "nearly a text"],
)  # fmt: skip
def test_odd_prompts(knowing: BlendedModel, prompt: torch.Tensor) -> None:
    done = knowing.prefill(prompt, store=False)
    assert done.logits[0].shape == (1, 500) and done.logits[0].isfinite().all()
    assert done.caches[0].get_seq_length() == len(prompt)
    if done.blended_tokens == 0:
        assert torch.allclose(done.logits[0], whole(model(), prompt), atol=1e-4)
    output = knowing.generate(prompt, max_new_tokens=2, do_sample=False, store=False)
    assert output.shape == (1, len(prompt) + 2)


@pytest.mark.parametrize("serializer", ["raw", {"type": "cachegen", "mode": "lossless"}, "cachegen"], ids=str)
def test_through_every_tier(serializer: Any, tmp_path: Path) -> None:
    """From disk comes what comes from memory, bit for bit; a lossy codec loses little."""
    with blended(model(), config(NONE)) as it:
        for one in TEXTS:
            it.remember(one)
        expected = it.prefill(PROMPT, store=False)
    tiers = [{**DISK, "path": str(tmp_path), "serializer": serializer}]
    for _ in range(2):  # the second engine finds what the first has stored
        with blended(model(), config(NONE, tiers=tiers)) as it:
            for one in TEXTS:
                it.remember(one)
            assert it.engine.flush(30)
            done = it.prefill(PROMPT, store=False)
        assert done.blended_tokens == 160
        if serializer == "cachegen":
            assert torch.allclose(done.logits[0], expected.logits[0], atol=0.1)
        else:
            assert torch.equal(done.logits[0], expected.logits[0])


def test_a_text_that_is_remembered_is_not_computed_twice() -> None:
    with blended(model(), config(NONE)) as it:
        assert it.remember(TEXTS[0]) == 40
        assert it.remember(TEXTS[0]) == 0
        assert it.remember(TEXTS[0], salt="another tenant") == 40


def test_salts_keep_tenants_apart() -> None:
    with blended(model(), config(NONE)) as it:
        it.remember(TEXTS[0], salt="a")
        assert valid(it, PROMPT, salt="a").sum() == 40
        assert valid(it, PROMPT, salt="b").sum() == 0
        assert valid(it, PROMPT).sum() == 0


def test_blended_kv_is_stored_nowhere() -> None:
    with blended(model(), config({"executor": "cacheblend"})) as it:
        for one in TEXTS:
            it.remember(one)
        before = it.engine.health().tiers[0].blobs
        done = it.prefill(PROMPT)
        assert done.blended_tokens == 160 and not done.exact
        assert it.engine.lookup(PROMPT).tokens == 0
        assert it.engine.health().tiers[0].blobs == before


def test_passages_answer_no_prompt_even_at_its_beginning() -> None:
    """A passage computed alone, without a lead, has the KV of a prompt that begins with it; and yet another key."""
    with blended(model(), config(NONE)) as it:
        it.remember(TEXTS[0])
        assert it.engine.lookup(TEXTS[0]).tokens == 0
        assert not it.engine.find(it.engine.segments(TEXTS[0])).any()


def test_what_was_computed_whole_is_kept_as_a_prefix_and_by_its_passages() -> None:
    with blended(model(), config(NONE)) as it:
        assert it.prefill(PROMPT).exact
        again = it.prefill(PROMPT)
        assert again.exact and again.exact_tokens > 0
        assert torch.allclose(again.logits[0], whole(model(), PROMPT), atol=1e-4)
        other = joined(TEXTS[2], TEXTS[0], QUESTION)
        assert valid(it, other)[:81].sum() == 80


def test_kv_of_the_same_context_comes_before_kv_of_another() -> None:
    """Text 1 was seen behind text 3, then behind text 0: each is given back where it stands so again."""
    with blended(model(), config(NONE, {"type": "separator", "separator": SEPARATOR, "prefix": False})) as it:
        for first in (3, 0):
            it.prefill(joined(TEXTS[first], TEXTS[1], QUESTION), blend=False)
        it.remember(TEXTS[1])
        for first, before in ((3, 41), (0, 41)):
            prompt = joined(TEXTS[first], TEXTS[1])
            task = it.retriever.new_request(prompt, torch.tensor([0, len(prompt)]))
            found = task.result(3)
            truth = it.runner.prefill([prompt]).caches[0].layers[3].values[0].transpose(0, 1).flatten(1)
            assert found.v is not None
            assert torch.allclose(found.v[before:], truth[before:], atol=1e-5), f"behind text {first}"
        prompt = joined(TEXTS[2], TEXTS[1])
        found = it.retriever.new_request(prompt, torch.tensor([0, len(prompt)])).result(3)
        assert found.original_positions[41:].tolist() == list(range(41, 81))  # of a prompt, not alone at 0


def test_a_lead_stands_before_passages_that_are_computed_alone() -> None:
    settings_ = {"type": "separator", "separator": SEPARATOR, "lead": [1, 3]}
    with blended(model(), config(NONE, settings_)) as it:
        it.remember(TEXTS[0])
        prompt = joined(TEXTS[1], TEXTS[0])
        found = it.retriever.new_request(prompt, torch.tensor([0, len(prompt)])).result(2)
        assert found.original_positions[41:].tolist() == list(range(2, 42))
        alone = it.runner.prefill([torch.cat([torch.tensor([1, 3]), TEXTS[0]])]).caches[0].layers[2].values[0]
        assert found.v is not None
        assert torch.equal(found.v[41:], alone.transpose(0, 1).flatten(1)[2:])


def test_a_chunk_that_is_lost_between_finding_and_loading_is_computed(tmp_path: Path) -> None:
    tiers = [{**DISK, "path": str(tmp_path)}]
    with blended(model(), config(ALL, tiers=tiers)) as it:
        for one in TEXTS:
            it.remember(one)
        assert it.engine.flush(30)
        load, lost = it.engine.load_layers, it.engine.passage(TEXTS[1])[1].key

        def losing(segments: Any, **more: Any) -> Any:
            it.engine._stack.stored[0].backend.delete(str(lost))
            return load(segments, **more)

        it.engine.load_layers = losing  # type: ignore[method-assign]
        mask = valid(it, PROMPT)
        # 16 of the 40 tokens of one text: what comes after them is found all the same.
        assert (~mask[41 + 16 : 41 + 32]).all() and mask.sum() == 160 - 16
        done = it.prefill(PROMPT, store=False)
        assert torch.allclose(done.logits[0], whole(model(), PROMPT), atol=1e-4)


def test_kv_that_is_lost_in_the_middle_of_a_pass_begins_it_anew() -> None:
    with blended(model(), config(NONE)) as it:
        for one in TEXTS:
            it.remember(one)
        result, failed = LoadTask.result, []

        def losing(self: LoadTask, layer: int) -> Any:
            if layer == 2 and len(failed) < 5:
                failed.append(layer)
                raise BackendError("the store is gone")
            return result(self, layer)

        LoadTask.result = losing  # type: ignore[method-assign]
        try:
            done = it.prefill(PROMPT, store=False)
            assert len(failed) == 3 and done.exact and "lost" in done.note
            assert torch.allclose(done.logits[0], whole(model(), PROMPT), atol=1e-4)
            assert it.prefill(PROMPT, store=False).blended_tokens == 160  # twice more, then it is there
        finally:
            LoadTask.result = result  # type: ignore[method-assign]


def test_prompts_on_several_threads() -> None:
    with blended(model(), config({"executor": "cacheblend"})) as it:
        for one in TEXTS:
            it.remember(one)
        prompts = [joined(TEXTS[a], TEXTS[b], QUESTION) for a, b in ((0, 1), (1, 2), (3, 0), (2, 3))]
        expected = [it.prefill(prompt, store=False).logits[0] for prompt in prompts]
        got: dict[int, torch.Tensor] = {}

        def run(number: int) -> None:
            got[number] = it.prefill(prompts[number], store=False).logits[0]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(got[number], one) for number, one in enumerate(expected))


def test_the_model_is_left_as_it_was() -> None:
    subject = model()
    before = spec_of(subject), subject.config._attn_implementation, whole(subject, PROMPT)
    with blended(subject, config({"executor": "hybrid"})) as it:
        for one in TEXTS:
            it.remember(one)
        it.prefill(PROMPT)
        assert not any(layer._forward_pre_hooks for layer in subject.model.layers)
    assert (spec_of(subject), subject.config._attn_implementation) == before[:2]
    assert torch.equal(whole(subject, PROMPT), before[2])


def test_a_pass_that_blended_is_an_event() -> None:
    with blended(model(), config({"executor": "cacheblend", "recompute_ratio": 0.5})) as it:
        for one in TEXTS:
            it.remember(one)
        assert not any(key.name == "blended" for key in it.engine.counters())
        done = it.prefill(PROMPT)
        told = {key.reason: sums for key, sums in it.engine.counters().items() if key.name == "blended"}
    assert told["reused"].tokens + told["computed"].tokens == done.prompt_tokens == len(PROMPT)
    assert told["computed"].tokens == round(done.computed_share * len(PROMPT)) and told["reused"].seconds > 0
