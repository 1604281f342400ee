"""A run: every item by every codec and executor that has no row of it yet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvloom import KVLoomError
from kvloom_eval import scoring, tasks, text
from kvloom_eval.blending import QUESTIONS, Blender
from kvloom_eval.codecs import through_chunks
from kvloom_eval.prompts import Prompt, Prompts
from kvloom_eval.scores import statistics
from kvloom_eval.scores.rows import EXACT, TEXT, WITHOUT, Rows
from kvloom_eval.scoring import Answer
from kvloom_serde_cachegen import measuring

SCREENED = 8
"""Items of each task by which it is decided whether codecs are measured with it."""
_WINDOWS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The items of a run."""

    tasks: Sequence[str]
    """Of `tasks.TASKS`, and `text`."""
    contexts: Sequence[int]
    items: int
    """Number of each task and context. Text has a third as many: a window has 256 predictions."""
    seed: int

    def names(self) -> Iterator[tuple[str, int, int]]:
        """Task, context and number of each item: first the first of every task, so that a run that is interrupted has
        as much of each."""
        for number in range(self.items):
            for context in self.contexts:
                for task in self.tasks:
                    if task != TEXT or number < max(2, self.items // 3):
                        yield task, context, number

    def screened(self) -> Iterator[tuple[str, int, int]]:
        """The first items of each task, by which it is decided whether more is measured with it."""
        return (each for each in self.names() if each[0] != TEXT and each[2] < SCREENED)

    @property
    def steps(self) -> int:
        """The number of calls of `step` in a run."""
        return sum(1 for _ in (*self.screened(), *self.names()))


class Run:
    """Measures a model."""

    def __init__(
        self, model: Any, tokenizer: Any, plan: Plan, rows: Rows, *, plain: bool = False,
        codecs: Mapping[str, measuring.Codec], blender: Blender | None = None, dtype: torch.dtype = torch.bfloat16,
        profiles: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """dtype: of the KV that codecs get. profiles: digests of the profiles that codecs read. Raises KVLoomError if
        there are rows of such a codec with another profile."""
        self._model = model
        self._tokenizer = tokenizer
        self._plan = plan
        self._rows = rows
        self._codecs = codecs
        self._more = {by: {"profile": digest} for by, digest in (profiles or {}).items()}
        for by, more in self._more.items():
            rows.check(by, more)
        self._blender = blender
        self._dtype = dtype
        self._prompts = Prompts(tokenizer, plain=plain)
        self._windows: dict[int, torch.Tensor] = {}

    def run(self, step: Callable[[], None] = lambda: None) -> None:
        """Measure what has no row yet. step: called `Plan.steps` times. Raises KVLoomError if an item cannot be made.

        First come a few items of each task with exact KV and without the context. Those that the model cannot do, or
        does without the context, are left at that.
        """
        for task, context, number in self._plan.screened():
            self._answers(task, context, number, {})
            step()
        for task, context, number in self._plan.names():
            if task == TEXT:
                self._text(context, number)
            elif not self._dropped(task, context):
                if self._codecs:
                    self._answers(task, context, number, self._codecs)
                if self._blender is not None:
                    self._blends(self._blender, task, context, number)
            step()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _missing(self, name: str, by: Sequence[str]) -> list[str]:
        return [each for each in by if (name, each) not in self._rows]

    def _dropped(self, task: str, context: int) -> bool:
        found = [dict(self._rows.of(by, f"{task}/{context}")) for by in (EXACT, WITHOUT)]
        first = [f"{task}/{context}/{number}" for number in range(min(SCREENED, self._plan.items))]
        exact, without = ([sum(some[each]["right"]) / len(some[each]["right"]) for each in first] for some in found)
        chance = sum(found[0][each]["chance"] for each in first) / len(first)
        return bool(statistics.dropped(exact, without, chance))

    def _prompt(self, task: str, context: int, number: int) -> Prompt:
        room = tasks.Room(context - self._prompts.overhead(), self._prompts.count)
        try:
            return self._prompts.of(tasks.item(task, number, room, seed=self._plan.seed))
        except ValueError as error:
            raise KVLoomError(f"--context {context}: {error}; give more") from None

    @torch.inference_mode()
    def _answers(self, task: str, context: int, number: int, codecs: Mapping[str, measuring.Codec]) -> None:
        name, per_token = f"{task}/{context}/{number}", task == "summary"
        missing = self._missing(name, [EXACT, WITHOUT, *codecs])
        if not missing:
            return
        prompt = self._prompt(task, context, number)
        kv = scoring.context_kv(self._model, prompt.context, self._dtype)
        exact = scoring.answers(self._model, kv, prompt.asked, per_token=per_token)
        chance = sum(1 / len(each.choices) for each in prompt.asked) / len(prompt.asked)
        for by in missing:
            more: dict[str, Any] = dict(self._more.get(by, {}))
            if by == EXACT:
                found, more = exact, {"tokens": len(prompt.context), "chance": chance}
            elif by == WITHOUT:
                alone = scoring.context_kv(self._model, prompt.without)
                found = scoring.answers(self._model, alone, prompt.asked, per_token=per_token)
            else:
                back, more["bits"] = through_chunks(codecs[by], kv)
                found = scoring.answers(self._model, back, prompt.asked, per_token=per_token)
            self._rows.add([_row(name, by, found, exact) | more])

    def _blends(self, blender: Blender, task: str, context: int, number: int) -> None:
        # They ask fewer questions than codecs do, so their rows of a prefill and of no context are their own.
        name = f"{task}/{context}/{number}"
        missing = self._missing(name, blender.names())
        if not missing:
            return
        prompt = self._prompt(task, context, number)
        if len(prompt.pieces) < 2:
            return
        found = blender.run(prompt, list(dict.fromkeys([blender.names()[0], *missing])))
        exact = found[blender.names()[0]].answers
        made = [
            _row(name, by, found[by].answers, exact) | {"share": found[by].share, "seconds": found[by].seconds}
            for by in missing
        ]
        if blender.names()[0] in missing:
            alone = scoring.context_kv(self._model, prompt.without)
            answers = scoring.answers(self._model, alone, prompt.asked[:QUESTIONS])
            chance = sum(1 / len(each.choices) for each in prompt.asked[:QUESTIONS]) / len(exact)
            made[0] |= {"tokens": len(prompt.context), "chance": chance}
            made.insert(0, _row(name, f"{WITHOUT}, blend", answers, exact))  # first: a cut loses the last rows
        self._rows.add(made)

    @torch.inference_mode()
    def _text(self, context: int, number: int) -> None:
        name = f"{TEXT}/{context}/{number}"
        missing = self._missing(name, [EXACT, WITHOUT, *self._codecs])
        if not missing:
            return
        window = self._window(context, number)
        seen, rest = window[:context], window[context:]
        kv = scoring.context_kv(self._model, seen.tolist(), self._dtype)
        exact = scoring.continuation(self._model, kv, rest.tolist())
        for by in missing:
            more: dict[str, Any] = dict(self._more.get(by, {}))
            if by == EXACT:
                found = exact
            elif by == WITHOUT:
                alone = scoring.context_kv(self._model, rest[:1].tolist())
                first = torch.full_like(exact[:1], 0.0).log_softmax(-1)
                found = torch.cat([first, scoring.continuation(self._model, alone, rest[1:].tolist())])
            else:
                back, more["bits"] = through_chunks(self._codecs[by], kv)
                found = scoring.continuation(self._model, back, rest.tolist())
            self._rows.add([{
                "item": name, "by": by, "nll": -float(found.gather(1, rest[1:, None]).mean()),
                "kl": _divergence(exact, found), "same": float((exact.argmax(-1) == found.argmax(-1)).float().mean()),
                **more,
            }])  # fmt: skip

    def _window(self, context: int, number: int) -> torch.Tensor:
        if context not in self._windows:
            every = text.windows(self._tokenizer, context=context, most=_WINDOWS)
            order = random.Random(self._plan.seed).sample(range(len(every)), len(every))
            self._windows[context] = every[order]
        if number >= len(self._windows[context]):
            raise KVLoomError(
                f"the text has {len(self._windows[context])} windows of {context:,} tokens; fewer --items"
            )
        return self._windows[context][number]


def _row(name: str, by: str, found: Sequence[Answer], exact: Sequence[Answer]) -> dict[str, Any]:
    return {
        "item": name,
        "by": by,
        "right": [int(each.right) for each in found],
        "exact": [int(each.exact) for each in found],
        "probability": [round(each.probability, 6) for each in found],
        "nll": [round(each.nll, 6) for each in found],
        "kl": [_divergence(one.logprobs, other.logprobs) for one, other in zip(exact, found, strict=True)],
    }


def _divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean())
