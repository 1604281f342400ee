"""Task scores for the verdicts of `kvloom calibrate --verify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvloom import KVLoomError
from kvloom_eval import scoring
from kvloom_eval.prompts import longest_context
from kvloom_eval.running import Plan, Run
from kvloom_eval.scores import results
from kvloom_eval.scores.rows import Rows
from kvloom_eval.tasks import TASKS
from kvloom_serde_cachegen import measuring

CONTEXT, SHORTEST = 1024, 512


def judge(
    model: Any, tokenizer: Any, codecs: Mapping[str, measuring.Codec], *, items: int,
    dtype: torch.dtype = torch.bfloat16, step: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, dict[str, float]]]:  # fmt: skip
    """The scores of each codec in each task that the model can do and needs its context for.

    items: of each task, two or more. dtype: of the KV that codecs get. step: called after each of
    `len(TASKS) * items`. A score has the shares of questions that are answered right with `exact` KV and after the
    `codec`, and the 95 % interval of their difference, `low` to `high`. Contexts have 1,024 tokens, or as many as the
    model takes. Raises KVLoomError for a model that cannot be evaluated.
    """
    context = min(CONTEXT, longest_context(model))
    if context < SHORTEST:
        raise KVLoomError(f"the model takes contexts of {max(0, context)} tokens; tasks need {SHORTEST}")
    scoring.check(model)
    with TemporaryDirectory() as folder:
        rows = Rows(Path(folder) / "rows.jsonl", {})
        plain = not getattr(tokenizer, "chat_template", None)
        plan = Plan(list(TASKS), [context], items, seed=0)
        Run(model, tokenizer, plan, rows, plain=plain, codecs=codecs, dtype=dtype).run(step)
        found = results.of_codecs(rows, [f"{task}/{context}" for task in TASKS], list(codecs))
    exact = {each.name: each.exact.mean for each in found.tasks}
    return {
        each.name: {
            task: {
                "exact": exact[task], "codec": each.tasks[task].mean,
                "low": each.losses[task].low, "high": each.losses[task].high,
            }
            for task in found.kept
        }
        for each in found.scores if each.name in codecs
    }  # fmt: skip
