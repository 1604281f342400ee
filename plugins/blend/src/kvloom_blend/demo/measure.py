"""Measures every executor at several ratios, on the same prompts, beside a whole prefill."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from kvloom import BlendExecutor, Engine, KVSpec, Registry, check_folder, replace_file, text_of
from kvloom_connector_transformers import spec_of

from ..quality import Agreement, Reference, answered, executor_of, logits_of
from ..retrievers.separator import occurrences
from ..runner.model import BlendedModel
from ..screen import progress
from ..verify import LOGITS, ROUNDED_LOGITS
from .texts import beginning, tokenized

SEPARATOR = "\n\n* * *\n\n"
INTRODUCTION = "What parts of Python's standard library say of themselves."
RATIOS = (0.05, 0.15, 0.3, 0.5)
EXECUTORS = ("cacheblend", "hybrid", "question_attention", "epic", "random")
ANSWER_TOKENS = 16
_FIRST_LINE = "# Written by `kvloom blend demo`.\n"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One executor at one ratio."""

    executor: str
    ratio: float
    seconds: float
    """To the first token: the median over the prompts."""
    agreement: Agreement
    computed_share: float
    """Share of all rows in all layers."""


@dataclass(frozen=True, slots=True)
class Example:
    """The answers to the first prompt."""

    question: str
    whole: str
    """After a whole prefill."""
    blended: str
    """From what `blend.yaml` says."""


@dataclass(frozen=True, slots=True)
class Result:
    """All that was measured."""

    prompts: int
    prompt_tokens: int
    """The median."""
    document_tokens: tuple[int, ...]
    seconds: float
    """Time of a whole prefill: the median over the prompts."""
    rows: tuple[Row, ...]
    all_found: bool
    """Each document was found in every prompt."""
    off: float
    """Distance between the logits of `full` and those of a whole prefill."""
    limit: float
    """Maximum allowed distance."""
    example: Example | None = None


def measure(
    model: Any, tokenizer: Any, texts: Sequence[str], questions: Sequence[str], *, most_tokens: int, orders: int,
    out: Path,
) -> Result:  # fmt: skip
    """Also writes `blend.yaml` and `blend.json` to the directory `out`. Raises ValueError for texts that do not fit."""
    separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    lead = [*beginning(tokenizer), *tokenizer.encode(INTRODUCTION, add_special_tokens=False), *separator]
    documents = tokenized(tokenizer, texts, most_tokens=most_tokens)
    check_count(documents)
    if any(occurrences(one, separator) for one in documents):
        raise ValueError(_COUNTED)
    prompts = [
        torch.tensor([*lead, *_joined(order, separator), *tokenizer.encode(question, add_special_tokens=False)])
        for order, question in _asked(documents, questions, orders)
    ]
    _check_room(model, max(map(len, prompts)) + ANSWER_TOKENS)
    out.mkdir(parents=True, exist_ok=True)
    config = configuration(separator, lead)
    replace_file(out / "blend.yaml", _FIRST_LINE + yaml.safe_dump(config, sort_keys=False))
    with BlendedModel(model, Engine.open(config, spec_of(model)), owner=True) as ours:
        for document in documents:
            ours.remember(document)
        example = _example(ours, prompts[0], tokenizer, questions[0])
        result = replace(_measured(ours, documents, prompts), example=example)
    replace_file(out / "blend.json", json.dumps(asdict(result), indent=1))
    return result


_COUNTED = f"at least two documents are needed, and none may contain {SEPARATOR!r}"


def check_count(documents: Sequence[object]) -> None:
    """Raise ValueError for too few."""
    if len(documents) < 2:
        raise ValueError(_COUNTED)


def check_own(out: Path) -> None:
    """Check that files in `out` were made by an earlier demo, before they are overwritten, and that files can be
    written there. Raises ValueError."""
    there = [out / name for name in ("blend.yaml", "blend.json", "blend.png") if os.path.lexists(out / name)]
    try:
        own = all(path.is_file() for path in there)
        own = own and (not there or text_of(out / "blend.yaml", _MOST_BYTES).startswith(_FIRST_LINE))
    except (OSError, UnicodeDecodeError):
        own = False
    if not own:
        raise ValueError(f"{there[0]} exists and is not from a demo; name another directory")
    try:
        check_folder(out)
    except OSError as error:
        raise ValueError(f"{out} cannot be written to ({error.strerror}); name another directory") from None


def configuration(separator: Sequence[int], lead: Sequence[int]) -> dict[str, Any]:
    """The demo's configuration without the executor, which varies."""
    return {
        "connector": "transformers",
        "tiers": [{"type": "memory", "capacity": "2GiB"}],
        "blend": {
            "executor": "cacheblend",
            "recompute_ratio": 0.15,
            "retriever": {"type": "separator", "separator": list(separator), "lead": list(lead)},
            "min_tokens": 0,
        },
    }


def _asked(
    documents: Sequence[torch.Tensor], questions: Sequence[str], orders: int
) -> list[tuple[list[torch.Tensor], str]]:
    """Each question over the documents in an order of its own."""
    draw = random.Random(1)
    return [
        (draw.sample(list(documents), len(documents)), questions[number % len(questions)]) for number in range(orders)
    ]


def _joined(documents: Sequence[torch.Tensor], separator: Sequence[int]) -> list[int]:
    return [token for one in documents for token in [*one.tolist(), *separator]]


def _check_room(model: Any, needed: int) -> None:
    room = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    if needed > room:
        raise ValueError(f"{needed:,} tokens with question and answer; the model allows {room:,}; pass fewer --tokens")


def _example(ours: BlendedModel, prompt: torch.Tensor, tokenizer: Any, question: str) -> Example:
    whole, blended = ours.runner.prefill([prompt]), ours.prefill(prompt, store=False)
    texts = [tokenizer.decode(answered(ours.runner, done, ANSWER_TOKENS)) for done in (whole, blended)]
    return Example(question, *texts)


def _measured(ours: BlendedModel, documents: Sequence[torch.Tensor], prompts: Sequence[torch.Tensor]) -> Result:
    rungs = [("none", 0.0), *((word, ratio) for word in EXECUTORS for ratio in RATIOS), ("full", 1.0)]
    executors = _executors(ours.engine.spec, rungs)
    runs: list[list[_Run]] = [[] for _ in rungs]
    seconds = []
    with progress("asking", (1 + len(rungs)) * len(prompts)) as step:
        for prompt in prompts:
            expected = Reference.of(ours.runner, prompt, answer_tokens=ANSWER_TOKENS)
            seconds.append(expected.seconds)
            step()
            # One after the other for each prompt, so that a machine that is busy for a while is so for all of them.
            for some, executor in zip(runs, executors, strict=True):
                ours.executor = executor
                some.append(_run(ours, expected))
                step()
    total = sum(map(len, documents))
    limit = LOGITS.get(ours.engine.spec.torch_dtype, ROUNDED_LOGITS)
    return Result(
        prompts=len(prompts),
        prompt_tokens=int(median(map(len, prompts))),
        document_tokens=tuple(map(len, documents)),
        seconds=median(seconds),
        rows=tuple(_row(word, ratio, some) for (word, ratio), some in zip(rungs, runs, strict=True)),
        all_found=all(run.blended_tokens == total for some in runs for run in some),
        off=max(run.off for run in runs[-1]),
        limit=limit,
    )


def _executors(spec: KVSpec, rungs: Sequence[tuple[str, float]]) -> list[BlendExecutor]:
    # The baseline is loaded like a third-party plugin.
    baseline = EntryPoint("blend_demo", "kvloom_blend.demo.random_choice", "kvloom.v1")
    registry = Registry.discover(entry_points=[*entry_points(group="kvloom.v1"), baseline])
    return [
        executor_of(spec, word, registry=registry, **({} if word in ("none", "full") else {"recompute_ratio": ratio}))
        for word, ratio in rungs
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    agreement: Agreement
    computed_share: float
    blended_tokens: int
    off: float


def _run(ours: BlendedModel, expected: Reference) -> _Run:
    began = time.perf_counter()
    done = ours.prefill(expected.prompt, store=False)
    seconds = time.perf_counter() - began
    off = float((done.logits[0][-1].float() - expected.logits[0]).abs().max())
    agreement = Agreement.of(logits_of(ours.runner, done, expected.answer), expected.logits)
    return _Run(seconds, agreement, done.computed_share, done.blended_tokens, off)


def _row(executor: str, ratio: float, runs: Sequence[_Run]) -> Row:
    share = sum(run.computed_share for run in runs) / len(runs)
    agreement = Agreement.mean([run.agreement for run in runs])
    return Row(executor, ratio, median(run.seconds for run in runs), agreement, share)
