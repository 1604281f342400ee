"""Measures a codec's effect on a model: predictions from the original KV against those from KV after the codec.

The first tokens of each window are the context: the model reads them, and their KV is encoded and decoded in chunks, as
an engine stores it. The rest, the continuation, is predicted from each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch

from kvloom import Chunk, MemoryFormat, Serializer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_TOKENS = 256

Codec = Callable[[torch.Tensor, int], tuple[torch.Tensor, int]]
"""Encodes and decodes a chunk. From its KV, `[planes, layers, tokens, hidden]` in host memory, and the position of its
first token, to the decoded KV and the number of stored bytes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one window; or means, or standard errors over windows."""

    dnll: float
    """By how much the continuation's tokens got less likely, nats a token."""
    kl: float
    """Kullback-Leibler divergence of the next token's distribution from that with the original KV, nats a token."""
    top1: float
    """Share of tokens whose likeliest successor is the same."""
    bits_per_value: float
    k_error: float
    """Root mean square of the error of K, relative to that of K."""
    v_error: float


@dataclass(frozen=True, slots=True)
class Quality:
    """One codec on all windows."""

    windows: tuple[Figures, ...]
    tokens: int
    """Number of predicted tokens in all windows."""

    @property
    def mean(self) -> Figures:
        return Figures(*(math.fsum(each) / len(each) for each in self._columns()))

    @property
    def error(self) -> Figures:
        """Standard errors of the means; NaN of a single window."""
        return Figures(*(_standard_error(each) for each in self._columns()))

    def _columns(self) -> list[tuple[float, ...]]:
        return list(zip(*map(astuple, self.windows), strict=True))


def through(serializer: Serializer) -> Codec:
    """A serializer as a codec. The bytes are those of its buffers, without the envelope that a store puts around."""

    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        tokens, back = kv.shape[2], torch.empty_like(kv)
        blob = serializer.encode(Chunk(kv, MemoryFormat.KV_BLOB, tokens, start=start))
        serializer.decode(blob, Chunk(back, MemoryFormat.KV_BLOB, tokens))
        return back, sum(memoryview(each).nbytes for each in blob)

    return codec


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    windows: torch.Tensor,
    codecs: Mapping[str, Codec],
    *,
    context: int,
    chunk_tokens: int = CHUNK_TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Quality]:
    """Every codec on the same windows.

    model: a causal one that keeps plain K and V. windows: token ids `[windows, context + continuation]`; all tokens of
    the continuation but its first are predicted. dtype: of the KV, the original one too. progress: called with the
    number of finished windows and their total. ValueError if there is nothing to predict.
    """
    if windows.ndim != 2 or not len(windows) or not 0 < context < windows.shape[1] - 1:
        raise ValueError(f"windows {list(windows.shape)} with a context of {context} leave nothing to predict")
    found: dict[str, list[Figures]] = {name: [] for name in codecs}
    for done, window in enumerate(windows.to(model.device)):
        seen, continuation = window[:context], window[context:]
        kv = context_kv(model, seen, dtype)
        expected = predictions(model, continuation, kv)
        for name, codec in codecs.items():
            back, size = in_chunks(codec, kv.flatten(3), chunk_tokens)
            got = predictions(model, continuation, back.view(kv.shape))
            found[name].append(_compare(kv.flatten(3), back, size, expected, got, continuation[1:]))
        progress(done + 1, len(windows))
    predicted = len(windows) * (windows.shape[1] - context - 1)
    return {name: Quality(tuple(each), predicted) for name, each in found.items()}


def context_kv(model: PreTrainedModel, tokens: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The KV of a text `[tokens]`: `[2, layers, tokens, heads, head_size]` in host memory. ValueError if K, V or
    layers differ in shape."""
    layers = [(each.keys, each.values) for each in model(tokens[None], use_cache=True).past_key_values.layers]
    shapes = {tuple(plane.shape) for pair in layers for plane in pair}
    if len(shapes) != 1 or next(iter(shapes))[2] != len(tokens):
        raise ValueError(f"K and V of all layers should have one shape, with all tokens in it, not {sorted(shapes)}")
    planes = [torch.cat([pair[plane] for pair in layers]) for plane in (0, 1)]
    return torch.stack(planes).transpose(2, 3).to("cpu", dtype).contiguous()


def predictions(model: PreTrainedModel, tokens: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[tokens - 1, vocabulary]` of what follows each of `tokens` but the last, after the context
    whose KV this is, as `context_kv` gives it."""
    from transformers import DynamicCache

    cache = DynamicCache()
    keys, values = kv.to(model.device, model.dtype).transpose(2, 3)
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        cache.update(pair[0][None], pair[1][None], layer)
    logits = model(tokens[None, :-1], past_key_values=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def in_chunks(codec: Codec, kv: torch.Tensor, chunk_tokens: int) -> tuple[torch.Tensor, int]:
    """KV `[planes, layers, tokens, hidden]` after a codec that gets it in chunks, and the number of stored bytes."""
    parts, size = [], 0
    for start in range(0, kv.shape[2], chunk_tokens):
        part, kept = codec(kv[:, :, start : start + chunk_tokens].contiguous(), start)
        parts.append(part)
        size += kept
    return torch.cat(parts, dim=2), size


def _compare(
    kv: torch.Tensor, back: torch.Tensor, size: int, expected: torch.Tensor, got: torch.Tensor, targets: torch.Tensor
) -> Figures:
    gain = (expected - got).gather(1, targets[:, None])
    k_error, v_error = (_relative(*planes) for planes in zip(kv, back, strict=True))
    return Figures(
        dnll=gain.mean().item(),
        kl=(expected.exp() * (expected - got)).sum(dim=-1).mean().item(),
        top1=(expected.argmax(dim=-1) == got.argmax(dim=-1)).float().mean().item(),
        bits_per_value=8 * size / kv.numel(),
        k_error=k_error,
        v_error=v_error,
    )


def _relative(was: torch.Tensor, is_now: torch.Tensor) -> float:
    was, is_now = was.double(), is_now.double()
    return ((is_now - was).square().sum() / was.square().sum()).sqrt().item()


def _standard_error(values: tuple[float, ...]) -> float:
    if len(values) < 2:
        return math.nan
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1) / len(values))
