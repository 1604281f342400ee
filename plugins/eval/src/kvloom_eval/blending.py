"""Blending of an item: its documents' KV, each computed behind the prompt's beginning alone, put together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError

from kvloom import BlendExecutor, ConfigError, KVLoomError, PluginError, Registry
from kvloom_blend import GivenTask, Runner, executor_of, kv_of
from kvloom_connector_transformers import spec_of
from kvloom_eval import scoring
from kvloom_eval.prompts import Prompt
from kvloom_eval.scores.rows import FULL
from kvloom_eval.scoring import Answer

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3)
DEFAULT = ("none", "epic", "question_attention", "cacheblend", "hybrid")
QUESTIONS = 2
"""Questions of an item that are asked: each is a pass of its own."""


@dataclass(frozen=True, slots=True)
class Blend:
    """One executor at one ratio."""

    name: str
    executor: BlendExecutor


@dataclass(frozen=True, slots=True)
class Blended:
    """The answers to an item's questions."""

    answers: list[Answer]
    share: float
    """Rows computed, as a share of those of a whole prefill."""
    seconds: float
    """Time to the first token, the mean over the questions."""


def check(words: Sequence[str]) -> None:
    """Raise KVLoomError for a word that names no executor, or a share that it does not take."""
    registry = Registry.discover()
    for word in words:
        try:
            for _, executor, settings in _settings(word):
                registry.settings("blend executor", executor)(**settings)
        except ValidationError as error:
            raise _refusal(word, error.errors()[0]["msg"]) from None
        except (PluginError, ValueError) as error:
            raise _refusal(word, error) from None


class Blender:
    """A model that blends, and the executors to try. Raises KVLoomError for one that cannot, or an unknown executor."""

    def __init__(self, model: Any, words: tuple[str, ...]) -> None:
        try:
            self._spec = spec_of(model)
            self._runner = Runner(model, self._spec)
        except ValueError as error:
            raise KVLoomError(f"--blend: the model cannot be blended: {error}") from error
        self.blends = list({each.name: each for word in words for each in self._parsed(word)}.values())

    def names(self) -> list[str]:
        """All that is measured: a whole prefill, and each executor at each ratio."""
        return [FULL, *(each.name for each in self.blends)]

    @torch.inference_mode()
    def run(self, prompt: Prompt, names: list[str]) -> dict[str, Blended]:
        """Each of `names` on the first questions of an item."""
        task = self._task(prompt)
        found: dict[str, list[tuple[Answer, float, float]]] = {name: [] for name in names}
        for asked in prompt.asked[:QUESTIONS]:
            tokens = torch.tensor([*prompt.context, *asked.question])
            last = [replace(asked, question=asked.question[-1:])]
            whole = GivenTask(*(_padded(each, len(asked.question)) for each in task))
            for name, run in self._runs(names, tokens, whole):
                began = time.perf_counter()
                done = run()
                seconds = time.perf_counter() - began
                kv = scoring.kv_of(done.caches[0], len(tokens), done.logits[0].dtype)[:, :, :-1]
                found[name].append((scoring.answers(self._runner.model, kv, last)[0], done.computed_share, seconds))
        return {name: _blended(each) for name, each in found.items()}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _parsed(self, word: str) -> Iterator[Blend]:
        try:
            for name, executor, settings in _settings(word):
                yield Blend(name, executor_of(self._spec, executor, **settings))
        except (ConfigError, ValueError) as error:
            raise _refusal(word, error) from None

    def _runs(self, names: list[str], tokens: torch.Tensor, task: GivenTask) -> Iterator[tuple[str, Any]]:
        executors = {each.name: each.executor for each in self.blends}
        for name in names:
            if name == FULL:
                yield name, lambda: self._runner.prefill([tokens])
            else:
                yield name, lambda chosen=executors[name]: self._runner.blend([tokens], task, chosen)

    def _task(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """KV of the context, which of it is valid, and where its tokens stood."""
        head = len(prompt.head)
        planes, stood = [], [torch.arange(head)]
        for number, piece in enumerate(prompt.pieces):
            kv = kv_of(self._runner.prefill([torch.tensor([*prompt.head, *piece])]).caches[0])
            planes.append(kv if not number else kv[:, :, head:])
            stood.append(torch.arange(head, head + len(piece)))
        kv, where = torch.cat(planes, dim=2), torch.cat(stood)
        return kv, torch.ones(len(where), dtype=torch.bool), where


def _settings(word: str) -> Iterator[tuple[str, str, dict[str, float]]]:
    """The executors that a word stands for, each as its name in the tables, its type and its settings."""
    executor, slash, ratio = word.partition("/")
    if executor in ("none", "full"):
        yield executor, executor, {}
    else:
        for each in [float(ratio)] if slash else RATIOS:
            yield f"{executor}/{each:g}", executor, {"recompute_ratio": each}


def _refusal(word: str, why: object) -> KVLoomError:
    return KVLoomError(f"--blend {word}: {why}; name an executor, or one with its share: epic/0.1")


def _padded(values: torch.Tensor, more: int) -> torch.Tensor:
    """Zeros for `more` tokens behind those of the context."""
    axis = 2 if values.dim() > 1 else 0
    shape = list(values.shape)
    shape[axis] = more
    return torch.cat([values, values.new_zeros(shape)], dim=axis)


def _blended(found: list[tuple[Answer, float, float]]) -> Blended:
    answers, shares, seconds = zip(*found, strict=True)
    return Blended(list(answers), sum(shares) / len(shares), sum(seconds) / len(seconds))
