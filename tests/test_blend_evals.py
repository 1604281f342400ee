"""The tools that measure blending: prompts whose answers follow from them, and a reference that blends exactly."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
import transformers
from blend import chunking, measure, task
from blend.task import IGNORED, Shape

MODELS = Path(task.__file__).parent / "models"
SMALL = Shape(dictionaries=1, chunks=3, length=(8, 14), keys=3, facts=5, questions=5)


def shapes() -> st.SearchStrategy[Shape]:
    return st.builds(
        lambda dictionaries, more, shortest, longer, keys, facts, questions: Shape(
            dictionaries, dictionaries + more, (shortest, shortest + longer), keys, facts, min(questions, facts)
        ),
        *(st.integers(1, 4), st.integers(1, 6), st.integers(2, 60), st.integers(0, 30)),
        *(st.integers(1, task.KEYS), st.integers(1, task.NAMES), st.integers(1, task.NAMES)),
    )


def read(chunks: list[list[int]]) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """Meanings of keys, and of each name its key and code, from the tokens alone."""
    meanings, facts = {}, {}
    for token, after in ((a, b) for chunk in chunks for a, b in zip(chunk, [*chunk[1:], task.PAD], strict=True)):
        if task.D <= token < task.F:
            meanings[(token - task.D) // task.VALUES] = (token - task.D) % task.VALUES
        if task.N <= token < task.V:
            assert task.F <= after < task.X
            facts[token - task.N] = divmod(after - task.F, task.VALUES)
    return meanings, facts


@settings(max_examples=80, deadline=None)
@given(shapes(), st.integers(0, 2**32), st.booleans())
def test_answers_follow_from_the_chunks(shape: Shape, seed: int, bos: bool) -> None:
    drawn = task.sample(random.Random(seed), shape=shape, bos=bos)
    assert drawn.prefix == [task.BOS] * bos
    assert len(drawn.chunks) == shape.chunks and all(chunk[-1] == task.SEP for chunk in drawn.chunks)
    meanings, facts = read(drawn.chunks)
    assert (len(meanings), len(facts)) == (shape.keys, shape.facts)
    assert read(drawn.chunks[: shape.dictionaries]) == (meanings, {}), "what defines comes first"

    values = {name: (code + meanings[key]) % task.VALUES for name, (key, code) in facts.items()}
    kinds = iter(drawn.kinds)
    for at in range(0, len(drawn.question), 2):
        (ask, about), (nothing, answer), kind = drawn.question[at : at + 2], drawn.answers[at : at + 2], next(kinds)
        assert nothing == IGNORED
        if kind == "name":
            group, value = divmod(about - task.R, task.VALUES)
            found = [name for name in values if (name // task.VALUES, values[name]) == (group, value)]
            assert ask == task.ASK_NAME and [answer] == [task.N + name for name in found], "there is one such name"
        elif kind == "value":
            assert ask == task.ASK_VALUE and answer == task.V + values[about - task.N]
        else:
            assert ask == task.ASK_CODE and answer == task.C + facts[about - task.N][1]
    assert len(drawn.kinds) * 2 == len(drawn.question) == len(drawn.answers) == 2 * shape.questions


@settings(max_examples=40, deadline=None)
@given(shapes(), st.integers(0, 2**32))
def test_labels_stand_where_they_are_to_be_predicted(shape: Shape, seed: int) -> None:
    drawn = task.sample(random.Random(seed), shape=shape)
    meanings, _ = read(drawn.chunks)
    tokens, labels = drawn.tokens, drawn.labels
    assert len(tokens) == len(labels) and labels[len(tokens) - len(drawn.question) :] == drawn.answers
    for at, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if task.F <= token < task.X:
            key, code = divmod(token - task.F, task.VALUES)
            assert label == task.V + (code + meanings[key]) % task.VALUES
        elif token >= task.X and label != IGNORED:
            assert label == tokens[at + 1] >= task.X
        elif at < len(tokens) - len(drawn.question):
            assert label == IGNORED


def test_without_dictionaries_nothing_is_known() -> None:
    drawn = task.sample(random.Random(0), shape=SMALL, defined=False)
    meanings, facts = read(drawn.chunks)
    assert meanings == {} and len(facts) == SMALL.facts and "name" not in drawn.kinds
    of_facts = {label for token, label in zip(drawn.tokens, drawn.labels, strict=True) if task.F <= token < task.X}
    assert of_facts == {task.UNKNOWN}
    given_answers = [answer for answer in drawn.answers if answer != IGNORED]
    assert [answer == task.UNKNOWN for answer in given_answers] == [kind == "value" for kind in drawn.kinds]


def test_prompts_of_a_seed_stay_what_they_were() -> None:
    """Figures that were measured earlier are of these prompts."""
    rng, tokens = random.Random(1), []
    for _ in range(20):
        tokens += task.sample(rng).labels
    assert hashlib.sha256(str(tokens).encode()).hexdigest()[:16] == "06d9b5faeae637b4"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Prompts are short: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reader() -> measure.Reader:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=task.VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        initializer_range=0.3,
    )
    return measure.Reader(transformers.LlamaForCausalLM(config).eval())


@pytest.fixture
def prompt(reader: measure.Reader) -> tuple[task.Sample, measure.Prompt]:
    drawn = task.sample(random.Random(5), shape=SMALL)
    return drawn, reader.prompt(drawn)


def test_the_reference_is_the_model(reader: measure.Reader, prompt: tuple[task.Sample, measure.Prompt]) -> None:
    drawn, blended = prompt
    with torch.no_grad():
        expected = reader.model(torch.tensor([drawn.tokens]))
    found = measure.answers(reader, blended, row=measure.ROWS[0])
    asked = [answer != IGNORED for answer in [IGNORED] * (len(drawn.tokens) - len(drawn.answers)) + drawn.answers]
    torch.testing.assert_close(found, expected.logits[0][torch.tensor(asked)].log_softmax(-1), atol=1e-4, rtol=1e-4)
    for (k, v), layer in zip(reader.prefill(drawn.tokens), expected.past_key_values or [], strict=False):
        torch.testing.assert_close(k, layer[0][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(v, layer[1][0], atol=1e-4, rtol=1e-4)


def test_true_kv_gives_true_answers_whatever_is_computed(
    reader: measure.Reader, prompt: tuple[task.Sample, measure.Prompt]
) -> None:
    drawn, blended = prompt
    blended.kv = reader.prefill(drawn.tokens)
    everything, _ = reader.run(blended.tokens, torch.ones(len(drawn.tokens), dtype=torch.bool), blended.kv)
    for ratio in (0.0, 0.3, 0.7):
        computed = measure.at_random(reader, blended, ratio)
        stale = [tuple(each.masked_fill(computed[:, None], 7.0) for each in layer) for layer in blended.kv]
        found, _ = reader.run(blended.tokens, computed, stale)
        torch.testing.assert_close(found, everything[computed], atol=1e-4, rtol=1e-4)


def test_the_first_layers_kv_is_exact_where_chunks_are_put(
    reader: measure.Reader, prompt: tuple[task.Sample, measure.Prompt]
) -> None:
    drawn, blended = prompt
    cached = int(blended.cached.sum())
    for lead in (False, True):
        k, v = reader.prompt(drawn, bos=lead).kv[0]
        true_k, true_v = reader.prefill(drawn.tokens)[0]
        torch.testing.assert_close(k[:, :cached], true_k[:, :cached], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(v[:, :cached], true_v[:, :cached], atol=1e-4, rtol=1e-4)
    first = len(drawn.prefix) + len(drawn.chunks[0])
    for (k, _), (true_k, _) in zip(blended.kv, reader.prefill(drawn.tokens), strict=True):
        torch.testing.assert_close(k[:, :first], true_k[:, :first], atol=1e-4, rtol=1e-4)
        assert k is blended.kv[0][0] or (k - true_k)[:, first:cached].abs().max() > 0.01, "later ones saw less"


def test_a_share_is_so_many_cached_tokens_and_all_that_are_not(prompt: tuple[task.Sample, measure.Prompt]) -> None:
    _, blended = prompt
    score = torch.arange(len(blended.tokens)).float()
    cached = int(blended.cached.sum())
    for ratio in (0.0, 0.15, 1.0):
        computed = blended.share(score, ratio)
        count = round(ratio * cached)
        assert computed[cached:].all() and int(computed[:cached].sum()) == count
        assert computed[cached - count : cached].all(), "those that score highest"


def test_weights_are_those_that_were_measured() -> None:
    found = sorted(MODELS.glob("*/SHA256SUMS"))
    assert [sums.parent.name for sums in found] == sorted(model.name for model in MODELS.iterdir())
    for sums in found:
        for digest, name in (line.split() for line in sums.read_text().splitlines()):
            assert hashlib.sha256((sums.parent / name).read_bytes()).hexdigest() == digest, f"{sums.parent.name}/{name}"


def test_the_model_needs_what_blending_recomputes() -> None:
    """The reason for this model: stale KV costs it answers, and recomputing the right tokens brings them back."""
    reader = measure.Reader(
        transformers.AutoModelForCausalLM.from_pretrained(MODELS / "facts_0", dtype=torch.float32).eval()
    )
    torch.manual_seed(0)
    rng = random.Random(2)
    samples = [task.sample(rng, kinds=("name", "value")) for _ in range(4)]
    wanted = torch.tensor([answer for sample in samples for answer in sample.answers if answer != IGNORED])

    def right(name: str) -> float:
        row = next(each for each in measure.ROWS if each.name == name)
        prompts = [reader.prompt(sample, bos=row.bos, rotate=row.rotate) for sample in samples]
        found = torch.cat([measure.answers(reader, prompt, row=row).argmax(-1) for prompt in prompts])
        return (found == wanted).float().mean().item()

    assert right("full prefill") > 0.97
    assert right("reuse") < 0.3
    assert right("random 15%") < 0.5
    assert right("EPIC 15%") < 0.5
    assert right("deviation of V, second layer, 15%") > 0.97
    assert right("the same, not rotated, 15%") < 0.7


@pytest.mark.parametrize("setup", ["fixed 32", "content 32"])
def test_pieces_of_a_text_that_was_edited_are_counted(setup: str) -> None:
    text = torch.randint(0, 5000, (1000,), generator=torch.Generator().manual_seed(1))
    edited = torch.cat([text[:400], text[410:]])
    once, again = (chunking.measured(setup, prompts) for prompts in ([text], [text, edited]))
    assert once.reused == 0 < once.stored <= 1000
    assert 600 < again.reused <= 990 and again.runs >= 2
    assert chunking.possible([text, edited]) == 990
    alone = chunking.measured(setup, [text, edited], servers=2)
    assert alone.reused == (again.reused if setup == "content 32" else 0)
