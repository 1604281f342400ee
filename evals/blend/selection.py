"""Compares rules of selection that use the question's attention.

    python evals/blend/selection.py NAME [--prompts N] [--tokens N]

NAME is a model of this folder (facts_0, facts_1), asked as quality.py asks it with KV of chunks alone, or a folder of a
transformers model, asked as `kvloom blend demo` asks it. Writes the results of each prompt to selection.json, and
selection.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm

from kvloom import BlendExecutor, BlendRequest, BlendSession, Engine
from kvloom_blend import BlendedModel
from kvloom_blend.demo import measure as demo
from kvloom_blend.demo.texts import QUESTIONS, beginning, module_texts, tokenized
from kvloom_blend.executors import CacheBlendExecutor, HybridExecutor, QuestionAttentionExecutor
from kvloom_blend.executors.deviation import HybridSession, deviation
from kvloom_blend.executors.session import Layer
from kvloom_blend.loading import loaded
from kvloom_blend.quality import Reference
from kvloom_blend.runner import attention
from kvloom_connector_transformers import spec_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
Result = tuple[float, float, float]
"""A prompt's share of right answers or of equal likeliest tokens, its KL, and the share of rows computed."""


class HalvesSession(HybridSession):
    """Half of the budget by deviation, half by the question's attention."""

    def choose(self, layer: Layer) -> torch.Tensor | None:
        if layer.number != self._config.check_layers[0]:
            return super().choose(layer)
        assert self._attention is not None
        half = self._config.recompute_ratio / 2
        chosen = self.largest(deviation(layer, self.candidates, self._config.metric), half)
        return chosen | self.largest(self._attention, half, among=~chosen)


class HalvesExecutor(HybridExecutor):
    type = "halves"

    def begin(self, request: BlendRequest) -> BlendSession:
        return HalvesSession(request, self.config)  # type: ignore[arg-type]


def alone(cls: type[BlendExecutor]) -> type[BlendExecutor]:
    """The executor, with attention that is not multiplied by the length of V."""

    class Alone(cls):  # type: ignore[misc, valid-type]
        def begin(self, request: BlendRequest) -> BlendSession:
            with patch.object(attention, "_plainly", _without_lengths(attention._plainly)):
                session: BlendSession = super().begin(request)
            return session

    return Alone


def _without_lengths(plainly: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def inner(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Any, **more: Any) -> torch.Tensor:
        unit = torch.full_like(v, v.shape[-1] ** -0.5)
        plainly(q, k, unit, block, **more)
        return plainly(q, k, v, block, **{**more, "summed": None})

    return inner


RULES: dict[str, tuple[type[BlendExecutor], dict[str, float]]] = {
    "deviation: `cacheblend`": (CacheBlendExecutor, {}),
    "attention": (alone(QuestionAttentionExecutor), {}),
    "attention x V: `question_attention`": (QuestionAttentionExecutor, {}),
    "half by deviation, half by attention": (alone(HalvesExecutor), {}),
    "half by deviation, half by attention x V": (HalvesExecutor, {}),
    "root of deviation x attention": (alone(HybridExecutor), {}),
    "root of deviation x attention x V: `hybrid`": (HybridExecutor, {}),
    "the same, attention counted twice": (HybridExecutor, {"attention_share": 2 / 3}),
}


def executors() -> Iterator[tuple[str, float, BlendExecutor]]:
    for rule, (cls, more) in RULES.items():
        for ratio in RATIOS:
            yield rule, ratio, cls(cls.Config(recompute_ratio=ratio, **more))


def of_facts(name: str, count: int) -> Iterator[tuple[str, float, Result]]:
    import quality

    (subject,) = (one for one in quality.SUBJECTS if one.name == name)
    model = quality.AutoModelForCausalLM.from_pretrained(subject.path, dtype=torch.float32).eval()
    runner, chance = quality.Runner(model, spec_of(model)), random.Random(1)
    for prompt in tqdm(list(subject.prompts(count)), desc=name, unit="prompt"):
        encoded, answers = quality.Encoded(runner, prompt, chance), torch.tensor(prompt.answers)
        asked, keep, task = answers >= 0, len(prompt.question), encoded.task("alone")
        truth = runner.prefill([encoded.tokens], keep_logits=keep).logits[0][asked].log_softmax(-1)
        for rule, ratio, executor in executors():
            done = runner.blend([encoded.tokens], task, executor, keep_logits=keep)
            got = done.logits[0][asked].log_softmax(-1)
            right = float((got.argmax(-1) == answers[asked]).float().mean())
            yield rule, ratio, (right, float((truth.exp() * (truth - got)).sum(-1).mean()), done.computed_share)


def of_texts(folder: str, count: int, tokens: int) -> Iterator[tuple[str, float, Result]]:
    model, tokenizer = loaded(folder, None)
    separator = tokenizer.encode(demo.SEPARATOR, add_special_tokens=False)
    lead = [*beginning(tokenizer), *tokenizer.encode(demo.INTRODUCTION, add_special_tokens=False), *separator]
    documents = tokenized(tokenizer, module_texts(), most_tokens=tokens)
    asked = demo._asked(documents, QUESTIONS, count)
    with BlendedModel(model, Engine.open(demo.configuration(separator, lead), spec_of(model)), owner=True) as ours:
        for document in documents:
            ours.remember(document)
        for order, question in tqdm(asked, desc=Path(folder).name, unit="prompt"):
            ids = tokenizer.encode(question, add_special_tokens=False)
            prompt = torch.tensor([*lead, *demo._joined(order, separator), *ids])
            expected = Reference.of(ours.runner, prompt, answer_tokens=demo.ANSWER_TOKENS)
            for rule, ratio, ours.executor in executors():
                run = demo._run(ours, expected)
                yield rule, ratio, (run.agreement.top1, run.agreement.kl, run.computed_share)


@contextmanager
def stored(file: Path) -> Iterator[dict[str, Any]]:
    found = json.loads(file.read_text()) if file.exists() else {}
    yield found
    file.write_text(json.dumps(found) + "\n")


def page(found: dict[str, Any]) -> str:
    lines = ["# Rules of selection by the question's attention", "", *INTRODUCTION]
    for name, one in sorted(found.items()):
        lines += ["", f"## {name}: {one['prompts']} prompts, {one['about']}", ""]
        ratios = [ratio for ratio in RATIOS if any(row["ratio"] == ratio for row in one["rows"])]
        lines += ["| | " + " | ".join(f"KL, {ratio:.0%}" for ratio in ratios) + f" | {one['measure']}, % |"]
        lines += ["|---|" + "---:|" * (len(ratios) + 1)]
        for rule in RULES:
            rows = {row["ratio"]: row["results"] for row in one["rows"] if row["rule"] == rule}
            if rows:
                kl = [f"{_mean(rows[ratio], 1):.2g}" if ratio in rows else "-" for ratio in ratios]
                share = ", ".join(f"{100 * _mean(rows[ratio], 0):.1f}" for ratio in ratios if ratio in rows)
                lines.append(f"| {rule} | {' | '.join(kl)} | {share} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = (
    "`python evals/blend/selection.py` compares rules on the same prompts. x V: times the length of the token's V. KL",
    "is to a whole prefill, in nats a token; the last column has the ratios from left to right. Rules with deviation",
    "and attention compute as many rows as each other, those with one of the two fewer. Results of each prompt are in",
    "[selection.json](selection.json).",
)


def _mean(results: list[Result], which: int) -> float:
    return sum(one[which] for one in results) / len(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("name")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=400, help="maximum tokens of a document of the demo")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = (HERE / "models" / arguments.name).is_dir()
    if facts:
        results, about = of_facts(arguments.name, arguments.prompts), "questions of [the task](README.md#the-task)"
    else:
        results = of_texts(arguments.name, arguments.prompts, arguments.tokens)
        about = f"documents of up to {arguments.tokens} tokens"
    every: dict[tuple[str, float], list[Result]] = {}
    for rule, ratio, result in results:
        every.setdefault((rule, ratio), []).append(tuple(round(one, 6) for one in result))  # type: ignore[arg-type]
    rows = [{"rule": rule, "ratio": ratio, "results": some} for (rule, ratio), some in every.items()]
    measure = "right answers" if facts else "equal likeliest token"
    with stored(HERE / "selection.json") as found:
        found[Path(arguments.name).name] = {
            "prompts": arguments.prompts, "about": about, "measure": measure, "rows": rows,
        }  # fmt: skip
    (HERE / "selection.md").write_text(page(found))


if __name__ == "__main__":
    main()
