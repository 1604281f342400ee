"""Predictions from given KV: all questions about a context, with all their choices, in one pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvloom import KVLoomError
from kvloom_eval.prompts import Asked

_TRIED = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """The predictions for one question."""

    right: bool
    """The right choice is the likeliest of all."""
    exact: bool
    """Greedy decoding gives the right choice, token for token."""
    probability: float
    """The right choice's share of the likelihood of all choices."""
    nll: float
    """Nats per token of the right choice."""
    logprobs: torch.Tensor
    """The predictions at the tokens of the right choice, `[tokens, vocabulary]`."""


@torch.inference_mode()
def context_kv(model: Any, tokens: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The KV of a context: `[2, layers, tokens, heads, head_size]` in host memory. Raises KVLoomError if K, V or
    layers differ in shape."""
    ids = torch.tensor([list(tokens)], device=model.device)
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    return kv_of(cache, len(tokens), dtype)


def kv_of(cache: Any, tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The KV in a cache of one sequence, as `context_kv` gives it."""
    layers = [(each.keys, each.values) for each in cache.layers]
    shapes = {tuple(plane.shape) for pair in layers for plane in pair}
    if len(shapes) != 1 or next(iter(shapes))[2] != tokens:
        raise KVLoomError(
            "the model keeps KV of several shapes, or not of all tokens (windows, states): it cannot be evaluated"
        )
    planes = [torch.cat([pair[plane] for pair in layers]) for plane in (0, 1)]
    return torch.stack(planes).transpose(2, 3).to("cpu", dtype).contiguous()


@torch.inference_mode()
def answers(model: Any, kv: torch.Tensor, asked: Sequence[Asked], *, per_token: bool = False) -> list[Answer]:
    """All questions, answered from the KV of their context, `[2, layers, tokens, heads, head_size]`.

    per_token: compare choices by the likelihood of a token, for choices of different lengths.
    """
    tokens, positions, mask, places = _packed(asked, kv.shape[2])
    output = model(
        torch.tensor([tokens], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        past_key_values=_cache(model, kv),
        attention_mask=torch.where(mask, 0.0, torch.finfo(model.dtype).min).to(model.device, model.dtype)[None, None],
        use_cache=True,
    )
    logprobs = torch.log_softmax(output.logits[0].float(), dim=-1).cpu()
    return [_answer(logprobs, one, where, per_token) for one, where in zip(asked, places, strict=True)]


@torch.inference_mode()
def continuation(model: Any, kv: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities `[tokens - 1, vocabulary]` of what follows each token but the last, from a context's KV."""
    ids = torch.tensor([list(tokens[:-1])], device=model.device)
    logits = model(ids, past_key_values=_cache(model, kv), use_cache=True).logits[0]
    return torch.log_softmax(logits.float(), dim=-1).cpu()


def check(model: Any) -> None:
    """Raise KVLoomError unless several questions in one pass are answered as each is alone."""
    if any(DynamicCache(config=model.config).is_sliding):
        raise KVLoomError(f"{type(model).__name__} has layers with a window; every layer must see the whole context")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = [each % vocabulary for each in range(1, _TRIED)]
    asked = [Asked(ids[8:12], [ids[12:14], ids[15:18]], 0), Asked(ids[3:9], [ids[5:7], ids[10:11]], 1)]
    try:
        kv = context_kv(model, ids[:8], model.dtype)
        together = answers(model, kv, asked)
    except KVLoomError:
        raise
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise KVLoomError(f"the model cannot answer from given KV: {error}") from error
    for one, found in zip(asked, together, strict=True):
        choice = one.choices[one.right]
        expected = continuation(model, kv, [*one.question, *choice])[len(one.question) - 1 :]
        off = float((found.logprobs - expected).abs().max())
        if not off <= 0.05 * float(expected.abs().max()):
            raise KVLoomError(
                f"{type(model).__name__} answers several questions in one pass in another way than each alone (by "
                f"{off:.2g} nats): it does not take masks and positions as they are given"
            )


# -- inside ------------------------------------------------------------------------------------------------------------


def _cache(model: Any, kv: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    keys, values = kv.to(model.device, model.dtype).transpose(2, 3)
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key[None], value[None], layer)
    return cache


def _packed(asked: Sequence[Asked], context: int) -> tuple[list[int], list[int], torch.Tensor, list[list[list[int]]]]:
    """Token ids, positions, a mask `[tokens, context + tokens]`, and for each question and choice the places of the
    tokens that predict it.

    Every question sees the context and itself, every choice its question and itself. The last token of a choice
    predicts nothing and is left out.
    """
    total = sum(len(one.question) + sum(len(choice) - 1 for choice in one.choices) for one in asked)
    mask = torch.zeros(total, context + total, dtype=torch.bool)
    mask[:, :context] = True
    tokens: list[int] = []
    positions: list[int] = []
    places: list[list[list[int]]] = []
    for one in asked:
        begin, end = len(tokens), len(tokens) + len(one.question)
        tokens += one.question
        positions += range(context, context + len(one.question))
        mask[begin:end, context + begin : context + end] = _causal(len(one.question))
        places.append([])
        for choice in one.choices:
            at, rest = len(tokens), choice[:-1]
            tokens += rest
            positions += range(context + len(one.question), context + len(one.question) + len(rest))
            mask[at : at + len(rest), context + begin : context + end] = True
            mask[at : at + len(rest), context + at : context + at + len(rest)] = _causal(len(rest))
            places[-1].append([end - 1, *range(at, at + len(rest))])
    return tokens, positions, mask, places


def _causal(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def _answer(logprobs: torch.Tensor, one: Asked, places: list[list[int]], per_token: bool) -> Answer:
    scores = []
    for choice, where in zip(one.choices, places, strict=True):
        each = logprobs[where].gather(1, torch.tensor(choice)[:, None])
        scores.append(each.mean() if per_token else each.sum())
    likelihoods = torch.stack(scores)
    choice, predictions = one.choices[one.right], logprobs[places[one.right]]
    own = predictions.gather(1, torch.tensor(choice)[:, None])
    return Answer(
        right=int(likelihoods.argmax()) == one.right,
        exact=predictions.argmax(-1).tolist() == choice,
        probability=float(torch.softmax(likelihoods, 0)[one.right]),
        nll=-float(own.mean()),
        logprobs=predictions,
    )
