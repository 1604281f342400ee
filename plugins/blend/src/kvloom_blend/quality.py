"""Compares predictions from blended KV with those from a whole prefill."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch.nn.functional import kl_div

from kvloom import BlendExecutor, ConfigError, KVSpec, PluginError, Registry

from .runner.runner import Prefilled, Runner


@dataclass(frozen=True, slots=True)
class Reference:
    """The model's own predictions for a prompt."""

    prompt: torch.Tensor
    """1-D token ids."""
    answer: torch.Tensor
    """The tokens that follow, each the likeliest: 1-D."""
    logits: torch.Tensor
    """From which the answer was taken: float32 `[answer, vocabulary]`."""
    seconds: float
    """Time of the prefill."""

    @classmethod
    def of(cls, runner: Runner, prompt: torch.Tensor, *, answer_tokens: int) -> Reference:
        began = time.perf_counter()
        done = runner.prefill([prompt])
        seconds = time.perf_counter() - began
        tokens = answered(runner, done, answer_tokens)
        if answer_tokens > 1:
            done.caches[0].crop(1 - answer_tokens)
        return cls(prompt, tokens, logits_of(runner, done, tokens), seconds)


def answered(runner: Runner, done: Prefilled, answer_tokens: int) -> torch.Tensor:
    """Generate greedily from the KV of one prompt: 1-D tokens. The KV grows by all but the last."""
    token = done.logits[0][-1:].argmax(-1)
    answer = [token]
    with torch.inference_mode():
        for _ in range(answer_tokens - 1):
            output = runner.model(input_ids=token[None], past_key_values=done.caches[0], use_cache=True)
            token = output.logits[0].argmax(-1)
            answer.append(token)
    return torch.cat(answer)


def logits_of(runner: Runner, done: Prefilled, answer: torch.Tensor) -> torch.Tensor:
    """The predictions from the KV of one prompt at each token of an answer: float32 `[answer, vocabulary]`."""
    if len(answer) == 1:
        return done.logits[0][-1:].float()
    with torch.inference_mode():
        rest = runner.model(input_ids=answer[None, :-1], past_key_values=done.caches[0], use_cache=True).logits[0]
    return torch.cat([done.logits[0][-1:], rest]).float()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement with the predictions of a whole prefill, the mean over the tokens of answers."""

    kl: float
    """Kullback-Leibler divergence of the whole prefill's distribution from the other one, in nats a token."""
    top1: float
    """Share of tokens whose likeliest prediction is the same, 0 to 1."""

    @classmethod
    def of(cls, found: torch.Tensor, expected: torch.Tensor) -> Agreement:
        """found, expected: logits, float32 `[tokens, vocabulary]`."""
        ours, theirs = found.double().log_softmax(-1), expected.double().log_softmax(-1)
        divergence = kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
        same = found.argmax(-1) == expected.argmax(-1)
        return cls(max(0.0, float(divergence.mean())), float(same.float().mean()))

    @classmethod
    def mean(cls, several: list[Agreement]) -> Agreement:
        count = len(several)
        return cls(sum(one.kl for one in several) / count, sum(one.top1 for one in several) / count)


def executor_of(
    spec: KVSpec, executor: str, *, registry: Registry | None = None, **settings: Any
) -> BlendExecutor:  # fmt: skip
    """The executor of a `blend` block. Raises ConfigError, with the YAML path, if it cannot work."""
    try:
        cls = (registry or Registry.discover()).get("blend executor", executor)
    except PluginError as error:
        raise ConfigError("blend.executor", str(error)) from None
    try:
        config = cls.Config(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, ("blend", *first["loc"])))
        raise ConfigError(path, f"{executor} does not take it: {first['msg']}") from None
    made: BlendExecutor = cls(config, spec)
    return made
