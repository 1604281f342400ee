"""Task scores for the verdicts of `kvloom calibrate --verify` and `kvloom blend verify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvloom import KVLoomError
from kvloom_eval import scoring
from kvloom_eval.blending import Blender
from kvloom_eval.prompts import longest_context
from kvloom_eval.running import Plan, Run
from kvloom_eval.scores import results
from kvloom_eval.scores.results import Results
from kvloom_eval.scores.rows import Rows
from kvloom_eval.tasks import TASKS
from kvloom_serde_cachegen import measuring

CONTEXT, SHORTEST = 1024, 512
Step = Callable[[], None]


def judge(
    model: Any, tokenizer: Any, codecs: Mapping[str, measuring.Codec], *, items: int,
    dtype: torch.dtype = torch.bfloat16, step: Step = lambda: None,
) -> dict[str, dict[str, dict[str, float]]]:  # fmt: skip
    """The scores of each codec in each task that the model can do and needs its context for.

    items: of each task, two or more. dtype: of the KV that codecs get. step: called `steps(items)` times. A score has
    the shares of questions that are answered right with `exact` KV and after the `codec`, and the 95 % interval of
    their difference, `low` to `high`. Contexts have 1,024 tokens, or as many as the model takes. Raises KVLoomError for
    a model that cannot be evaluated.
    """
    rows, names = _measured(model, tokenizer, items, step, codecs=codecs, dtype=dtype)
    found = results.of_codecs(rows, names, list(codecs))
    return {name: _scores(found, name, "codec") for name in codecs}


def judge_blending(
    model: Any, tokenizer: Any, executors: Sequence[str], *, items: int, step: Step = lambda: None
) -> dict[str, dict[str, Any]]:
    """The verdict on each executor, `epic/0.15`: its `scores`, and the reasons why it `failed`, empty if it did not.

    Scores, items and errors are those of `judge`, with `blended` in place of `codec`, and `exact` is a whole prefill's.
    An executor fails in a task whose score is below that by more than the interval, and if there is no task to score.
    """
    blender = Blender(model, tuple(executors))
    rows, names = _measured(model, tokenizer, items, step, codecs={}, blender=blender)
    found = results.of_blending(rows, names, blender.names())
    return {each.name: _verdict(found, each.name, rows, names) for each in blender.blends}


def steps(items: int) -> int:
    """The number of steps that `judge` and `judge_blending` take."""
    return _plan(items, CONTEXT).steps


# -- inside ------------------------------------------------------------------------------------------------------------


def _measured(model: Any, tokenizer: Any, items: int, step: Step, **more: Any) -> tuple[Rows, list[str]]:
    """The rows of a run, and the names of its tasks, `needle/1024`. more: arguments of `Run`."""
    context = min(CONTEXT, longest_context(model))
    if context < SHORTEST:
        raise KVLoomError(f"the model takes contexts of {max(0, context)} tokens; tasks need {SHORTEST}")
    scoring.check(model)
    with TemporaryDirectory() as folder:
        rows = Rows(Path(folder) / "rows.jsonl", {})
        plain = not getattr(tokenizer, "chat_template", None)
        Run(model, tokenizer, _plan(items, context), rows, plain=plain, **more).run(step)
    return rows, [f"{task}/{context}" for task in TASKS]


def _plan(items: int, context: int) -> Plan:
    return Plan(list(TASKS), [context], items, seed=0)


def _scores(found: Results, name: str, word: str) -> dict[str, dict[str, float]]:
    """By task that counts. word: the key of the score of `name`."""
    (ours,) = (each for each in found.scores if each.name == name)
    return {
        task.name: {
            "exact": task.exact.mean, word: ours.tasks[task.name].mean,
            "low": ours.losses[task.name].low, "high": ours.losses[task.name].high,
        }
        for task in found.tasks if not task.dropped
    }  # fmt: skip


def _verdict(found: Results, name: str, rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    scores = _scores(found, name, "blended")
    (worse,) = (each.worse for each in found.scores if each.name == name)
    failed = [
        f"{task} {scores[task]['blended']:.1%} of right answers, {scores[task]['exact']:.1%} with a whole prefill"
        for task in worse
    ]
    if not scores:
        tasks = found.tasks or results.of_codecs(rows, names, []).tasks
        failed = ["no task counts", *(f"{each.name}: {each.dropped}" for each in tasks if each.dropped)]
    return {"failed": failed, "scores": scores}
