"""Attention of some rows of a batch over all of its keys, each row up to its own position.

transformers passes its mask to the configured attention function. Here the mask is a `Rows`, and the function is
`attend`. The rows are in ascending order, so a block of them needs no key behind its last one; a mask over rows and all
keys would also cost time for keys that are masked out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

NAME = "kvloom_blend"
"""The word under which transformers knows `attend`."""

_BLOCK_ROWS = 64
"""Shorter blocks waste less on keys that only their last rows see, and cost more calls."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one request that are attended together."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None
    """`[rows, keys]`, 0 or -inf, to be added; None where the rows are all of the keys: plainly causal."""


@dataclass
class Rows:
    """The tokens of a batch to compute; takes the place of an attention mask."""

    places: torch.Tensor
    """Places in the batch: int64, on CPU, ascending."""
    starts: Sequence[int]
    """The start of each request, and the end of the last one."""
    device: torch.device
    attention: torch.Tensor | None = None
    """The sum of each token's attention, times the length of its V: float32 `[tokens]`, if it is wanted."""
    _blocks: dict[tuple[int | None, torch.dtype], list[Block]] = field(default_factory=dict)

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """window: how many tokens back a row sees, itself included; None for all. dtype: of the masks."""
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = list(self._cut(window, dtype))
        return self._blocks[window, dtype]

    def _cut(self, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
        edges = torch.searchsorted(self.places, torch.tensor(list(self.starts))).tolist()
        for (first, last), begin in zip(pairwise(edges), self.starts, strict=False):
            if first == last:
                continue
            reach = int(self.places[last - 1]) + 1
            if last - first == reach - begin and (window is None or window >= reach - begin):
                yield Block(slice(first, last), slice(begin, reach), None)
                continue
            for at in range(first, last, _BLOCK_ROWS):
                rows = self.places[at : min(at + _BLOCK_ROWS, last)]
                low = begin if window is None else max(begin, int(rows[0]) + 1 - window)
                keys = torch.arange(low, int(rows[-1]) + 1)
                mask = keys <= rows[:, None]
                if window is not None:
                    mask &= keys > rows[:, None] - window
                # Added, not bool: else it would be made into this by every layer again.
                added = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf")).to(self.device)
                yield Block(slice(at, at + len(rows)), slice(low, len(keys) + low), added)


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The attention function that transformers calls. query: `[1, heads, rows, size]`, key, value: `[1, kv_heads,
    tokens, size]`.

    Returns `[1, rows, heads, size]`. Raises ValueError for attention that has more to it than a mask and a soft cap.
    Calls of the model from other threads meanwhile use the model's own attention.
    """
    if not isinstance(attention_mask, Rows):
        more = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap, **kwargs}
        given = {name: value for name, value in more.items() if value is not None}
        return _own_of(module)(module, query, key, value, attention_mask, **given)
    more_to_it = sorted(name for name, given in kwargs.items() if name in _MORE and given is not None)
    if more_to_it:
        raise ValueError(f"{type(module).__name__}: {', '.join(more_to_it)} cannot be blended")
    rows = attention_mask
    output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for block in rows.blocks(sliding_window, query.dtype):
        q, k, v = query[:, :, block.rows], key[:, :, block.keys], value[:, :, block.keys]
        if rows.attention is not None or softcap is not None:
            out = _plainly(q, k, v, block, scaling=scaling, softcap=softcap, summed=rows.attention)
        else:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=block.mask, is_causal=block.mask is None and q.shape[2] > 1, scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        output[:, block.rows] = out.transpose(1, 2)
    return output, None


_own: dict[int, str] = {}
"""The attention that a model was set to before a pass of it began, by the identity of its config."""


@contextmanager
def set_for(config: Any) -> Iterator[None]:
    """Have a model attend by `attend`. One at a time for each config."""
    settle(config)
    before = config._attn_implementation
    _own[id(config)] = before
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask)
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = before


def settle(config: Any) -> None:
    """Undo what a pass left that was interrupted at its very end. No pass may be under way."""
    if config._attn_implementation == NAME:
        config._attn_implementation = _own[id(config)]


def _own_of(module: Any) -> Any:
    own = _own[id(module.config)]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)


def _mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """The mask of a caller in another thread: a pass brings its own."""
    make = ALL_MASK_ATTENTION_FUNCTIONS[_own[id(config)]]
    return make(*args, config=config, **kwargs)


_MORE = ("s_aux", "position_bias", "alibi", "head_mask", "position_ids_bias")
"""Arguments of attention functions that `attend` would have to know about."""


def _plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, *, scaling: float | None, softcap: float | None,
    summed: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Plain attention, float32 inside. summed: each token's weights times the length (L2 norm) of its V are added: the
    part that the token has in the output."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
    scores = (q.float() @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if block.mask is None:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    else:
        scores = scores + block.mask
    weights = scores.softmax(-1)
    if summed is not None:
        summed[block.keys] += (weights.sum(2) * v.norm(dim=-1)).sum((0, 1))
    return (weights @ v).to(q.dtype)
