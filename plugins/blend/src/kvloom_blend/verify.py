"""Checks whether a model can be blended: exact cases must be exact, and approximate ones are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvloom import BlendExecutor, ConfigError, PluginError, Registry

from .demo.texts import beginning, tokenized
from .quality import Agreement, Reference, executor_of, logits_of
from .rotation.models import Rotations, unwrapped
from .rotation.probe import errors, probe, tolerance
from .runner.given import GivenTask, kv_of
from .runner.model import BlendedModel, blended
from .runner.runner import Prefilled

DELTAS = (16, 512, 4_096, 32_768, 131_071)
"""From position 0, in tokens."""
RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
LOGITS = {torch.float32: 1e-4}
ROUNDED_LOGITS = 2e-2
"""Maximum distance between logits that should be the same, in float32 and in types that round more."""
TURNED = {torch.float32: 2e-6}
"""Maximum error of rotated K, relative to the length of a pair; in other types the model's own rounding."""
_QUESTION_TOKENS = 24
_ANSWER_TOKENS = 12
_PASSAGES = 4
_PROMPTS = 4
_KEPT = 4
"""Number of last tokens whose logits are compared."""

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure and its limit."""

    what: str
    measured: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit


@dataclass(frozen=True, slots=True)
class Quality:
    """The cost of blending at one ratio."""

    ratio: float
    agreement: Agreement
    computed_share: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """Passages behind what every prompt begins with, and a question."""

    tokens: torch.Tensor
    boundaries: list[int]

    @property
    def question_start(self) -> int:
        return self.boundaries[-1]


class Subject:
    """A model, and prompts whose passages are kept, each computed alone. Raises ValueError if it cannot be blended."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str], *, most_tokens: int = 200) -> None:
        lead = beginning(tokenizer)
        documents = tokenized(tokenizer, texts, most_tokens=most_tokens)
        check_count(documents)
        self.model = model
        self.prompts = prompts_of(documents, lead)
        room = 2 * most_tokens * len(documents)
        self.blended: BlendedModel = blended(model, _configuration(model, lead, room))
        self._documents = documents
        self.spec = self.blended.engine.spec
        self.dtype = self.spec.torch_dtype
        self._registry = Registry.discover()

    @property
    def limit(self) -> float:
        """Maximum distance between logits that should be the same."""
        return LOGITS.get(self.dtype, ROUNDED_LOGITS)

    def remember(self) -> None:
        for document in self._documents:
            self.blended.remember(document)

    def executor(self, word: str, **settings: Any) -> BlendExecutor:
        """Raises ConfigError for one that is not there, or does not take these settings."""
        return executor_of(self.spec, word, registry=self._registry, **settings)

    def budgeted(self, word: str, *, recompute_ratio: float) -> BlendExecutor:
        """Raises ConfigError too for one without a budget."""
        return self.executor(word, recompute_ratio=recompute_ratio)

    def blend(self, prompt: Prompt, executor: BlendExecutor, *, keep_logits: int = 1) -> Prefilled:
        """One pass over a prompt whose passages are kept."""
        self.blended.executor = executor
        return self.blended.prefill(prompt.tokens, boundaries=[prompt.boundaries], keep_logits=keep_logits, store=False)

    def close(self) -> None:
        self.blended.close()


def check_count(documents: Sequence[object]) -> None:
    """Raise ValueError for too few."""
    if len(documents) < 3:
        raise ValueError(f"{len(documents)} documents are too few: a prompt has two or more, and a question")


def check_budgeted(word: str) -> None:
    """Raise ConfigError for an executor that is not there, or has no budget."""
    try:
        settings = Registry.discover().settings("blend executor", word)
    except PluginError as error:
        raise ConfigError("--executor", str(error)) from None
    if "recompute_ratio" not in settings.model_fields:
        raise ConfigError("--executor", f"{word!r} has no recompute_ratio to try; name one that has")


def prompts_of(documents: Sequence[torch.Tensor], lead: Sequence[int]) -> list[Prompt]:
    """Each takes the beginning of one document for its question, and up to four of the others, in another order."""
    prompts = []
    for turn in range(min(_PROMPTS, len(documents))):
        others = [*documents[turn + 1 :], *documents[:turn]][:_PASSAGES]
        parts = [torch.tensor(list(lead), dtype=torch.long), *others]
        edges = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
        prompts.append(Prompt(torch.cat([*parts, documents[turn][:_QUESTION_TOKENS]]), edges))
    return prompts


# -- what must be exact ------------------------------------------------------------------------------------------------


def rotations_hold(model: Any, rotations: Rotations, *, step: Step = lambda: None) -> Iterator[Finding]:
    """K of single tokens at position 0, turned, beside K that the model's own code computes there.

    Measured is the largest error in any layer, as a part of the length of the pair that is turned.
    """
    model, decoder = unwrapped(model)
    for delta in DELTAS:
        if rotations.max_length is not None and delta >= rotations.max_length:
            continue
        found = probe(model, decoder, longest=delta + 1)
        worst, bound = 0.0, 0.0
        for layer, rotation in zip(found.layers, rotations, strict=True):
            rows = layer.rows()
            turned = rows[:1].expand_as(rows[1:]) if rotation is None else found.turned(rows, rotation)
            worst = max(worst, float(errors(turned, rows[1:], rotation).max()))
            bound = TURNED.get(rows.dtype, tolerance(rows.dtype))
        step()
        yield Finding(f"rotation by {delta:,} tokens", worst, bound)


def identities_hold(
    subject: Subject, executor: BlendExecutor, *, step: Step = lambda: None
) -> Iterator[Finding]:  # fmt: skip
    """Check that logits are the model's own where nothing is approximate. executor: with a ratio of 1."""
    runner = subject.blended.runner
    full, none = subject.executor("full"), subject.executor("none")

    def stored(prompt: Prompt, chosen: BlendExecutor) -> torch.Tensor:
        return subject.blend(prompt, chosen, keep_logits=_KEPT).logits[0]

    def given(prompt: Prompt, chosen: BlendExecutor, kv: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(prompt.tokens))
        valid = places < prompt.question_start
        task = GivenTask(kv, valid, torch.where(valid, places, 0))
        return runner.blend([prompt.tokens], task, chosen, keep_logits=_KEPT).logits[0]

    checks: dict[str, Callable[[Prompt, torch.Tensor], torch.Tensor]] = {
        "all computed again, full": lambda prompt, kv: stored(prompt, full),
        f"all computed again, {executor.type} at 100 %": lambda prompt, kv: stored(prompt, executor),
        "garbage that is computed again": lambda prompt, kv: given(prompt, executor, torch.full_like(kv, 1e4)),
        "nothing computed again over true KV": lambda prompt, kv: given(prompt, none, kv),
    }
    worst = dict.fromkeys(checks, 0.0)
    for prompt in subject.prompts:
        whole = runner.prefill([prompt.tokens], keep_logits=_KEPT)
        for what, logits in checks.items():
            apart = logits(prompt, kv_of(whole.caches[0])).float() - whole.logits[0].float()
            worst[what] = max(worst[what], float(apart.nan_to_num(nan=torch.inf).abs().max()))
            step()
    for what, measured in worst.items():
        yield Finding(what, measured, subject.limit)


# -- what is approximate -----------------------------------------------------------------------------------------------


def qualities(
    subject: Subject, executor: str, *, ratios: Sequence[float] = RATIOS, step: Step = lambda: None
) -> Iterator[Quality]:
    """The cost of the executor at each ratio, the mean over the prompts."""
    runner = subject.blended.runner
    references = [Reference.of(runner, one.tokens, answer_tokens=_ANSWER_TOKENS) for one in subject.prompts]
    for ratio in ratios:
        chosen = subject.executor(executor, recompute_ratio=ratio)
        found, shares = [], []
        for prompt, expected in zip(subject.prompts, references, strict=True):
            done = subject.blend(prompt, chosen)
            found.append(Agreement.of(logits_of(runner, done, expected.answer), expected.logits))
            shares.append(done.computed_share)
            step()
        yield Quality(ratio, Agreement.mean(found), sum(shares) / len(shares))


# -- inside ------------------------------------------------------------------------------------------------------------


def _configuration(model: Any, lead: Sequence[int], num_tokens: int) -> dict[str, Any]:
    from kvloom_connector_transformers import spec_of

    spec = spec_of(model)
    capacity = torch.Size(spec.blob_shape(num_tokens)).numel() * spec.torch_dtype.itemsize
    return {
        "connector": "transformers",
        "tiers": [{"type": "memory", "capacity": capacity + (64 << 20)}],
        "blend": {
            "executor": "full",
            "retriever": {"type": "explicit", "lead": list(lead), "prefix": False, "in_context": False},
            "min_tokens": 0,
        },
    }
