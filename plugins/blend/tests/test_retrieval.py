"""What is found of a prompt, from which tier it comes, and what happens where it is lost on the way."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from blend_models import SEPARATOR, config, joined, model, text, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import BackendError, ConfigError, Engine
from kvloom_blend import BlendedModel, blended
from kvloom_blend.retrievers import FixedRetriever, PassageRetriever
from kvloom_blend.retrievers.landing import LandingTask
from kvloom_blend.retrievers.rolling import RollingHash
from kvloom_connector_transformers import spec_of

TEXTS = [text(seed) for seed in range(4)]
QUESTION = text(9, 12)
PROMPT = joined(*TEXTS, QUESTION)
ALL = {"executor": "full"}
NONE = {"executor": "none"}
DISK = {"type": "disk", "capacity": "1GiB"}


def valid(it: BlendedModel, prompt: torch.Tensor, **more: Any) -> torch.Tensor:
    assert isinstance(it.retriever, PassageRetriever)
    task = it.retriever.new_request(prompt, torch.tensor([0, len(prompt)]), **more)
    mask = task.result(0).valid_mask
    assert isinstance(task, LandingTask)
    task.close()
    return mask


@pytest.mark.parametrize("known", [(), (0,), (3,), (1, 2), (0, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("executor", ["full", "none", "cacheblend", "epic", "hybrid", "question_attention"])
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


@pytest.mark.parametrize(
    "prompt",
    [
        TEXTS[0], joined(TEXTS[0]), torch.tensor([SEPARATOR]), torch.tensor([11]), torch.tensor([SEPARATOR] * 7),
        torch.cat([torch.tensor([SEPARATOR]), TEXTS[1], torch.tensor([SEPARATOR])]), joined(TEXTS[0], TEXTS[0]),
        torch.cat([TEXTS[1], torch.tensor([11])]),
    ],
    ids=["a text", "and no more", "a separator", "one token", "separators", "edges", "a text twice", "nearly a text"],
)  # fmt: skip
@pytest.mark.parametrize("executor", ["none", "cacheblend", "hybrid"])
def test_odd_prompts(executor: str, prompt: torch.Tensor) -> None:
    with blended(model(), config({"executor": executor})) as it:
        for one in TEXTS:
            it.remember(one)
        done = it.prefill(prompt, store=False)
        assert done.logits[0].shape == (1, 500) and done.logits[0].isfinite().all()
        assert done.caches[0].get_seq_length() == len(prompt)
        if done.blended_tokens == 0:
            assert torch.allclose(done.logits[0], whole(model(), prompt), atol=1e-4)
        output = it.generate(prompt, max_new_tokens=2, do_sample=False, store=False)
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
        result, failed = LandingTask.result, []

        def losing(self: LandingTask, layer: int) -> Any:
            if layer == 2 and len(failed) < 5:
                failed.append(layer)
                raise BackendError("the store is gone")
            return result(self, layer)

        LandingTask.result = losing  # type: ignore[method-assign]
        try:
            done = it.prefill(PROMPT, store=False)
            assert len(failed) == 3 and done.exact and "lost" in done.note
            assert torch.allclose(done.logits[0], whole(model(), PROMPT), atol=1e-4)
            assert it.prefill(PROMPT, store=False).blended_tokens == 160  # twice more, then it is there
        finally:
            LandingTask.result = result  # type: ignore[method-assign]


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


# -- pieces at any offset ----------------------------------------------------------------------------------------------

FIXED = {"type": "fixed", "piece_tokens": 16, "prefix": False}


@pytest.fixture(scope="module")
def engine() -> Any:
    plan = config(NONE, FIXED)
    with Engine.open(plan, spec_of(model())) as engine:
        yield engine


@settings(max_examples=60, deadline=None)
@given(offset=st.integers(0, 60), begin=st.integers(0, 40), length=st.integers(32, 60), seed=st.integers(0, 5))
def test_runs_of_two_pieces_are_found_at_every_offset(
    engine: Any, offset: int, begin: int, length: int, seed: int
) -> None:
    """Of a run of known text, wherever it was cut out and is put, at least half is found, and each token is its own."""
    known = text(seed, 100)
    runner = _runner()
    retriever = engine.blending.retriever
    (cache,) = runner.prefill([known]).caches
    engine.save(retriever.in_context(known), cache=cache).result()
    retriever.learn(known)
    run = known[begin : begin + length]
    prompt = torch.cat([text(77, offset), run, text(78, 9)])
    found = retriever.new_request(prompt, torch.tensor([0, len(prompt)])).result(1)
    mask, stood = found.valid_mask, found.original_positions
    inside = mask[offset : offset + len(run)]
    assert inside.sum() >= 16 * max(1, (len(run) - 15) // 16)
    assert mask.sum() == inside.sum()
    assert torch.equal(known[stood[mask]], prompt[mask])
    truth = cache.layers[1].keys[0].transpose(0, 1).flatten(1)
    assert torch.equal(found.k[mask], truth[stood[mask]])


_RUNNERS: list[Any] = []


def _runner() -> Any:
    from kvloom_blend import Runner

    if not _RUNNERS:
        _RUNNERS.append(Runner(model(), spec_of(model())))
    return _RUNNERS[0]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 20))
def test_rolling_hashes_are_those_of_the_windows(tokens: list[int], width: int) -> None:
    import numpy as np

    rolling = RollingHash(width, bases=(1_000_003, 998_244_353 // 7))
    got = rolling.windows(np.array(tokens, dtype=np.int32)).tolist()
    alone = RollingHash(width, bases=(1_000_003, 998_244_353 // 7))
    windows = [tokens[at : at + width] for at in range(len(tokens) - width + 1)]
    assert got == [alone.windows(np.array(one, dtype=np.int32)).item() for one in windows]


def test_collisions_are_no_matches(engine: Any) -> None:
    """With base 1 a window's hash is the sum of its tokens: any order of a known piece looks known."""
    plan = config(NONE, FIXED)
    with Engine.open(plan, spec_of(model())) as engine:
        assert engine.blending is not None
        retriever = engine.blending.retriever
        assert isinstance(retriever, FixedRetriever)
        retriever._rolling = RollingHash(16, bases=(1, 1))
        known = text(3, 32)
        (cache,) = _runner().prefill([known]).caches
        engine.save(retriever.in_context(known), cache=cache).result()
        retriever.learn(known)
        shuffled = torch.cat([known[:16].flip(0), known[16:].flip(0)])
        assert retriever._candidates(shuffled, 0, ""), "the hashes were to collide"
        assert not retriever.new_request(shuffled, torch.tensor([0, 32])).result(0).valid_mask.any()
        prompt = torch.cat([known[:16].flip(0), known])
        mask = retriever.new_request(prompt, torch.tensor([0, 48])).result(0).valid_mask
        assert mask[16:].all() and not mask[:16].any()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"executor": "cachblend"}, "did you mean 'cacheblend'"),
        ({"executor": "cacheblend", "recompute_ratio": 1.5}, "blend.recompute_ratio"),
        ({"executor": "cacheblend", "recompute_ratio": -0.1}, "blend.recompute_ratio"),
        ({"executor": "cacheblend", "check_layers": [4]}, "blend.check_layers: names layer 4; the model has 4"),
        ({"executor": "cacheblend", "check_layers": [2, 1]}, "ascending"),
        ({"executor": "cacheblend", "check_layers": []}, "at least one layer"),
        ({"executor": "hybrid", "check_layers": [1, 2]}, "one layer"),
        ({"executor": "none", "recompute_ratio": 0.1}, "recompute_ratio"),
        ({"executor": "none", "retriever": "seperator"}, "did you mean 'separator'"),
        ({"executor": "none", "retriever": "separator"}, "separator"),
        ({"executor": "none", "retriever": {"type": "separator", "separator": 500}}, "the vocabulary has 500"),
        ({"executor": "none", "retriever": {"type": "separator", "separator": []}}, "separator"),
        ({"executor": "none", "retriever": {"type": "separator", "separator": 5, "lead": [501]}}, "501 is no token"),
        ({"executor": "none", "retriever": {"type": "fixed", "piece_tokens": 8}}, "piece_tokens"),
        ({"executor": "none", "min_tokens": -1}, "min_tokens"),
    ],
)
def test_settings_that_cannot_work(block: dict[str, Any], said: str) -> None:
    plan = config({})
    plan["blend"] = {"retriever": {"type": "separator", "separator": SEPARATOR}, **block}
    with pytest.raises(ConfigError, match=said.replace("'", ".")):
        blended(model(), plan)


def test_a_config_without_blending_and_another_connector() -> None:
    with pytest.raises(ConfigError, match="blend"):
        blended(model(), {"connector": "transformers", "tiers": ["memory"]})
    with pytest.raises(ConfigError, match="connector"):
        blended(model(), {**config(NONE), "connector": "plain"})


def test_an_engine_of_another_model_is_refused() -> None:
    with (
        Engine.open(config(NONE), spec_of(model("qwen2"))) as engine,
        pytest.raises(ValueError, match="opened for other KV"),
    ):
        BlendedModel(model("llama"), engine)


@pytest.mark.parametrize("starts", [[0, 20], [1, 32], [0, 40, 32], [0], []], ids=str)
def test_a_query_start_loc_that_does_not_fit(starts: list[int]) -> None:
    with blended(model(), config(NONE)) as it, pytest.raises(ValueError, match="query_start_loc"):
        it.retriever.new_request(text(1, 32), torch.tensor(starts, dtype=torch.long))


def test_boundaries_that_do_not_fit() -> None:
    with blended(model(), config(NONE, {"type": "explicit"})) as it:
        for bounds in ([[30, 20]], [[0, 33]], [[-1]]):
            with pytest.raises(ValueError, match="boundaries"):
                it.prefill(text(1, 32), boundaries=bounds)
        with pytest.raises(ValueError, match="boundaries: of 2 requests"):
            it.prefill(text(1, 32), boundaries=[[1], [2]])


def test_boundaries_say_where_passages_are() -> None:
    with blended(model(), config(NONE, {"type": "explicit"})) as it:
        it.remember(TEXTS[0])
        prompt = torch.cat([TEXTS[1][:7], TEXTS[0], QUESTION])
        assert it.prefill(prompt, boundaries=[[7, 47]], store=False).blended_tokens == 40
        assert it.prefill(prompt, boundaries=[[8, 47]], store=False).blended_tokens == 0


def test_of_several_prompts_the_short_ones_are_computed() -> None:
    plan = config(NONE)
    plan["blend"]["min_tokens"] = 100
    with blended(model(), plan) as it:
        for one in TEXTS:
            it.remember(one)
        short = joined(TEXTS[0], QUESTION)
        both = it.prefill([short, PROMPT], store=False)
        assert both.blended_tokens == 160
        assert torch.allclose(both.logits[0], whole(model(), short), atol=1e-4)


def test_a_model_that_has_changed_takes_and_leaves_nothing() -> None:
    subject = copy.deepcopy(model())
    with blended(subject, config(NONE)) as it:
        for one in TEXTS:
            it.remember(one)
        with torch.no_grad():
            subject.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        blobs = it.engine.health().tiers[0].blobs
        done = it.prefill(PROMPT)
        assert done.exact and "other weights" in done.note
        assert torch.allclose(done.logits[0], whole(subject, PROMPT), atol=1e-4)
        with pytest.raises(ValueError, match="other weights"):
            it.remember(text(50))
        assert it.engine.health().tiers[0].blobs == blobs
        with torch.no_grad():
            subject.model.layers[0].mlp.down_proj.weight.div_(1.5)
        if spec_of(subject) == it.engine.spec:  # rounding may have left its trace
            assert it.prefill(PROMPT, store=False).blended_tokens == 160


def test_the_model_may_be_called_while_it_blends() -> None:
    """By its own `generate`, by another wrapper, by anybody: nobody gets another's rows, mask or cache."""
    subject = model()
    expected = whole(subject, PROMPT)
    first = blended(subject, config({"executor": "hybrid"}))
    second = blended(subject, config({"executor": "cacheblend"}))
    with first, second:
        for it in (first, second):
            for one in TEXTS:
                it.remember(one)
        tokens = [it.generate(PROMPT, max_new_tokens=4, do_sample=False, store=False) for it in (first, second)]
        wrong: list[object] = []

        def generating(number: int) -> None:
            try:
                for _ in range(4):
                    it = (first, second)[number]
                    got = it.generate(PROMPT, max_new_tokens=4, do_sample=False, store=False)
                    if not torch.equal(got, tokens[number]):
                        wrong.append(got)
            except Exception as error:
                wrong.append(error)

        def calling() -> None:
            try:
                wrong.extend(n for n in range(30) if not torch.allclose(whole(subject, PROMPT), expected, atol=1e-5))
            except Exception as error:
                wrong.append(error)

        jobs = [lambda: generating(0), lambda: generating(1), lambda: generating(0), calling]
        threads = [threading.Thread(target=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_model_that_cannot_be_run_on_some_tokens_is_refused_when_it_is_opened() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = GptOssConfig(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    odd = GptOssForCausalLM(shape).eval()
    with pytest.raises(ValueError, match=r"cannot be run on some of its tokens.*s_aux"):
        blended(odd, config(NONE))


@pytest.mark.parametrize("asked", [{"num_beams": 2}, {"num_return_sequences": 3}, {"use_cache": False}], ids=str)
def test_generate_refuses_what_kv_cannot_serve(asked: dict[str, Any]) -> None:
    with blended(model(), config(NONE)) as it, pytest.raises(ValueError, match=next(iter(asked))):
        it.generate(PROMPT, max_new_tokens=2, **asked)


def test_generate_takes_what_tokenizers_give() -> None:
    with blended(model(), config(NONE)) as it:
        output = it.generate(input_ids=PROMPT[None], attention_mask=torch.ones_like(PROMPT[None]), max_new_tokens=2)
        assert output.shape == (1, len(PROMPT) + 2)


def test_short_prompts_are_computed() -> None:
    plan = config(NONE)
    plan["blend"]["min_tokens"] = len(PROMPT) + 1
    with blended(model(), plan) as it:
        it.remember(TEXTS[0])
        done = it.prefill(PROMPT, store=False)
        assert done.blended_tokens == 0 and "min_tokens" in done.note
        assert it.prefill(torch.cat([PROMPT, QUESTION]), store=False).blended_tokens == 40


@pytest.mark.parametrize("prompt", [torch.zeros(0, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)], ids=str)
def test_what_is_no_prompt(prompt: torch.Tensor) -> None:
    with blended(model(), config(NONE)) as it, pytest.raises(ValueError, match="prompts"):
        it.prefill([prompt])
