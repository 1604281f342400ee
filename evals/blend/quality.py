"""Measures the loss from blending: executors and ratios on prompts whose answers need what chunks know of each other.

    python evals/blend/quality.py [--prompts 100] [--only NAME]

Each chunk's KV is computed alone, put together in a prompt, and blended by kvloom's own executors, one pass for each.
The results, beside a whole prefill, are the accuracy of answers with its 95 % interval (bootstrap over prompts), the
Kullback-Leibler divergence of the predictions at the answers, how often the first choice is the same, and the share of
rows that was computed: executors with equal shares take about equal time. Writes quality.json, quality.md, quality.png.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from kvloom import BlendExecutor, BlendRequest, BlendSession
from kvloom_blend.executors import (
    CacheBlendExecutor,
    EpicExecutor,
    HybridExecutor,
    NoneExecutor,
    QuestionAttentionExecutor,
)
from kvloom_blend.executors.static import StaticSession
from kvloom_blend.runner.given import GivenTask, kv_of
from kvloom_blend.runner.runner import Runner
from kvloom_blend.settings import RatioConfig
from kvloom_connector_transformers import spec_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

RATIOS = (0.05, 0.10, 0.15, 0.30, 0.50, 1.0)
BOOTSTRAPS = 2000


class RandomExecutor(BlendExecutor):
    """`random`: what any other choice is to be better than."""

    type = "random"
    Config = RatioConfig

    def begin(self, request: BlendRequest) -> BlendSession:
        chance = torch.Generator().manual_seed(int(request.input_tokens.sum()))
        session = StaticSession(request)
        scores = torch.rand(len(session.valid), generator=chance)
        session.chosen = session.largest(scores, self.config.recompute_ratio)  # type: ignore[attr-defined]
        return session


@dataclass(frozen=True)
class Prompt:
    prefix: list[int]
    chunks: list[list[int]]
    question: list[int]
    answers: list[int]
    kinds: list[str]

    @property
    def tokens(self) -> torch.Tensor:
        return torch.tensor([*self.prefix, *(token for chunk in self.chunks for token in chunk), *self.question])


@dataclass(frozen=True)
class Subject:
    """A model, and prompts that it was trained on the like of."""

    name: str
    path: Path
    prompts: Callable[[int], Iterator[Prompt]]
    gradual: tuple[int, ...] = (1, 2, 3)


def contextual(count: int) -> Iterator[Prompt]:
    from blend import task

    chance = random.Random(20261122)
    for _ in range(count):
        one = task.sample(chance)
        yield Prompt(one.prefix, one.chunks, one.question, one.answers, one.kinds)


SUBJECTS = tuple(Subject(path.name, path, contextual) for path in sorted((HERE / "models").glob("*")))


def policies(gradual: tuple[int, ...]) -> Iterator[tuple[str, float, str, BlendExecutor]]:
    """(name, ratio, how chunks were computed, executor)"""
    for encoding in ("alone", "behind BOS", "in another prompt"):
        yield "none", 0.0, encoding, NoneExecutor(NoneExecutor.Config())
    makers: dict[str, Callable[[float], BlendExecutor]] = {
        "random": lambda r: RandomExecutor(RatioConfig(recompute_ratio=r)),
        "epic": lambda r: EpicExecutor(EpicExecutor.Config(recompute_ratio=r)),
        "question_attention": lambda r: QuestionAttentionExecutor(RatioConfig(recompute_ratio=r)),
        "hybrid": lambda r: HybridExecutor(HybridExecutor.Config(recompute_ratio=r)),
        "cacheblend": lambda r: CacheBlendExecutor(CacheBlendExecutor.Config(recompute_ratio=r)),
        "cacheblend, K": lambda r: CacheBlendExecutor(CacheBlendExecutor.Config(recompute_ratio=r, metric="k")),
        "cacheblend, K and V": lambda r: CacheBlendExecutor(CacheBlendExecutor.Config(recompute_ratio=r, metric="kv")),
        "cacheblend, gradual": lambda r: CacheBlendExecutor(
            CacheBlendExecutor.Config(recompute_ratio=r, check_layers=gradual)
        ),
    }
    for name, make in makers.items():
        for ratio in RATIOS:
            yield name, ratio, "alone", make(ratio)
    for encoding in ("behind BOS", "in another prompt"):
        for name in ("random", "cacheblend", "hybrid"):
            for ratio in (0.05, 0.15, 0.30):
                yield name, ratio, encoding, makers[name](ratio)


class Encoded:
    """One prompt, and the KV of its chunks, computed in each of three ways."""

    def __init__(self, runner: Runner, prompt: Prompt, chance: random.Random) -> None:
        self.tokens = prompt.tokens
        self._runner = runner
        self.places: list[tuple[int, int]] = []
        at = len(prompt.prefix)
        for chunk in prompt.chunks:
            self.places.append((at, at + len(chunk)))
            at += len(chunk)
        self.places[0] = (0, self.places[0][1])  # the first one stands where it always stands, prefix and all
        self._prefix = prompt.prefix
        order = list(range(1, len(self.places)))
        chance.shuffle(order)
        self._order = [0, *order]

    def task(self, encoding: str) -> GivenTask:
        """KV of all chunks."""
        texts = [self.tokens[begin:end] for begin, end in self.places]
        spec = self._runner.spec
        kv = torch.zeros(2, spec.num_layers, len(self.tokens), spec.hidden_dim)
        valid = torch.zeros(len(self.tokens), dtype=torch.bool)
        stood = torch.zeros(len(self.tokens), dtype=torch.long)
        starts = [0] * len(texts)
        if encoding == "in another prompt":
            sizes = [len(texts[number]) for number in self._order]
            other = kv_of(self._runner.prefill([torch.cat([texts[n] for n in self._order])]).caches[0])
            for place, number in enumerate(self._order):
                starts[number] = sum(sizes[:place])
        for number, (text, (begin, end)) in enumerate(zip(texts, self.places, strict=True)):
            lead = torch.tensor(self._prefix[:1] if encoding == "behind BOS" and number else [], dtype=torch.long)
            if encoding == "in another prompt":
                own = other[:, :, starts[number] : starts[number] + len(text)]
            else:
                own = kv_of(self._runner.prefill([torch.cat([lead, text])]).caches[0])[:, :, len(lead) :]
                starts[number] = len(lead)
            kv[:, :, begin:end], valid[begin:end] = own, True
            stood[begin:end] = torch.arange(starts[number], starts[number] + len(text))
        return GivenTask(kv, valid, stood)


@dataclass
class Tally:
    """Results of one policy: a number for each prompt."""

    right: list[tuple[int, int]]
    kl: list[float]
    same: list[float]
    share: list[float]
    by_kind: dict[str, list[int]]


def measure(subject: Subject, count: int) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(subject.path, dtype=torch.float32).eval()
    runner = Runner(model, spec_of(model))
    chance = random.Random(1)
    tallies: dict[tuple[str, float, str], Tally] = {}
    todo = list(policies(subject.gradual))
    full = Tally([], [], [], [], {})
    for prompt in tqdm(list(subject.prompts(count)), desc=subject.name, unit="prompt"):
        encoded = Encoded(runner, prompt, chance)
        answers = torch.tensor(prompt.answers)
        asked = answers >= 0
        keep = len(prompt.question)
        truth = runner.prefill([encoded.tokens], keep_logits=keep).logits[0][asked].log_softmax(-1)
        _count(full, truth, truth, answers[asked], prompt.kinds, 1.0)
        tasks = {encoding: encoded.task(encoding) for encoding in ("alone", "behind BOS", "in another prompt")}
        for name, ratio, encoding, executor in todo:
            done = runner.blend([encoded.tokens], tasks[encoding], executor, keep_logits=keep)
            tally = tallies.setdefault((name, ratio, encoding), Tally([], [], [], [], {}))
            got = done.logits[0][asked].log_softmax(-1)
            _count(tally, got, truth, answers[asked], prompt.kinds, done.computed_share)
    rows = [_row("a whole prefill", 1.0, "-", full, full)]
    rows += [_row(*key, tally, full) for key, tally in tallies.items()]
    return {"model": subject.name, "prompts": count, "layers": runner.spec.num_layers, "rows": rows}


def _count(
    tally: Tally, got: torch.Tensor, truth: torch.Tensor, answers: torch.Tensor, kinds: list[str], share: float
) -> None:
    right = got.argmax(-1) == answers
    tally.right.append((int(right.sum()), len(answers)))
    tally.kl.append(float((truth.exp() * (truth - got)).sum(-1).mean()))
    tally.same.append(float((got.argmax(-1) == truth.argmax(-1)).float().mean()))
    tally.share.append(share)
    for kind, one in zip(kinds, right.tolist(), strict=True):
        counts = tally.by_kind.setdefault(kind, [0, 0])
        counts[0] += one
        counts[1] += 1


def _row(name: str, ratio: float, encoding: str, tally: Tally, full: Tally) -> dict[str, Any]:
    right = torch.tensor(tally.right, dtype=torch.float64)
    whole = torch.tensor(full.right, dtype=torch.float64)
    picks = torch.randint(len(right), (BOOTSTRAPS, len(right)), generator=torch.Generator().manual_seed(0))
    accuracy = right[picks, 0].sum(1) / right[picks, 1].sum(1)
    relative = right[picks, 0].sum(1) / whole[picks, 0].sum(1)
    low, high = (float(accuracy.quantile(q)) for q in (0.025, 0.975))
    return {
        "executor": name, "ratio": ratio, "computed": encoding,
        "accuracy": float(right[:, 0].sum() / right[:, 1].sum()), "accuracy_low": low, "accuracy_high": high,
        "of_full": float(right[:, 0].sum() / whole[:, 0].sum()),
        "of_full_low": float(relative.quantile(0.025)), "of_full_high": float(relative.quantile(0.975)),
        "kl": sum(tally.kl) / len(tally.kl), "same_first_choice": sum(tally.same) / len(tally.same),
        "computed_share": sum(tally.share) / len(tally.share),
        "by_kind": {kind: counts[0] / counts[1] for kind, counts in sorted(tally.by_kind.items())},
    }  # fmt: skip


def page(results: list[dict[str, Any]]) -> str:
    lines = [
        "# What blending costs in quality",
        "",
        "`python evals/blend/quality.py`; see README.md for the models.",
        "",
    ]
    for result in results:
        kinds = list(result["rows"][0]["by_kind"])
        several = len(kinds) > 1
        lines += [f"## {result['model']}: {result['prompts']} prompts, {result['layers']} layers", ""]
        head = ["executor", "ratio", "chunks computed", "rows computed", "accuracy (95 %)", "of a whole prefill (95 %)"]
        head += ["KL", "same first choice", *(kinds if several else [])]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for row in result["rows"]:
            cells = [
                row["executor"], f"{row['ratio']:.0%}", row["computed"], f"{row['computed_share']:.1%}",
                f"{row['accuracy']:.3f} ({row['accuracy_low']:.3f} to {row['accuracy_high']:.3f})",
                f"{row['of_full']:.1%} ({row['of_full_low']:.1%} to {row['of_full_high']:.1%})",
                f"{row['kl']:.4f}", f"{row['same_first_choice']:.3f}",
                *([f"{row['by_kind'][kind]:.3f}" for kind in kinds] if several else []),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def chart(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(results), figsize=(5 * len(results), 8), squeeze=False)
    for column, result in enumerate(results):
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in result["rows"][1:]:
            if row["computed"] == "alone":
                by_name.setdefault(row["executor"], []).append(row)
        start = by_name.pop("none")[0]
        for name, rows in by_name.items():
            shares = [100 * one["computed_share"] for one in (start, *rows)]
            axes[0][column].plot(shares, [max(one["kl"], 1e-5) for one in (start, *rows)], marker="o", label=name)
            axes[1][column].plot(shares, [100 * one["accuracy"] for one in (start, *rows)], marker="o", label=name)
        axes[0][column].set(yscale="log", title=result["model"], ylabel="KL from a whole prefill")
        axes[1][column].set(xlabel="rows computed, % of a whole prefill", ylabel="right answers, %")
        axes[1][column].axhline(100 * result["rows"][0]["accuracy"], color="grey", linestyle=":")
        for row_ in (0, 1):
            axes[row_][column].grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--only", help="one model by name; nothing is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    subjects = [one for one in SUBJECTS if arguments.only in (None, one.name)]
    results = [measure(subject, arguments.prompts) for subject in subjects]
    print(page(results))
    if arguments.only is None:
        (HERE / "quality.json").write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "quality.md").write_text(page(results))
        chart(results, HERE / "quality.png")


if __name__ == "__main__":
    main()
