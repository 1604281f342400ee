"""Texts for blend retrievers, their KV, and texts that are nearly the same."""

from __future__ import annotations

import torch

from kvloom_testkit.subjects import SPEC

LAYERS, HIDDEN = SPEC.num_layers, SPEC.hidden_dim
LENGTH = 128
"""Tokens of a text in the tests."""
_MORE = (1, 1_000, 32_000, 50_257, *(1 << bits for bits in (7, 8, 15, 16, 17, 18, 20, 24)))
"""By how much ids differ that are the same to who cuts them to a vocabulary or to some bits."""


def text(seed: int, length: int = LENGTH) -> torch.Tensor:
    """Tokens; those of different seeds have none in common."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1_000, (length,), generator=random) + 1_000 * (seed + 1)


def kv_of(tokens: torch.Tensor) -> torch.Tensor:
    """KV that says whose it is: each value depends on the token, its position, the layer, and whether it is K or V."""
    random = torch.Generator().manual_seed(int(tokens.sum()))
    return torch.randn(2, LAYERS, len(tokens), HIDDEN, generator=random).to(SPEC.torch_dtype)


def starts_of(*texts: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor([len(one) for one in texts]).cumsum(0).tolist()], dtype=torch.int32)


def near_texts(known: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Texts that differ little from a known one, by the difference."""
    changed, moved, swapped = ([known.clone() for _ in known] for _ in range(3))
    for at in range(len(known)):
        changed[at][at] += 1
        moved[at][[at - 1, at]] += torch.tensor([-1, 1])
        swapped[at][[at - 1, at]] = known[[at, at - 1]]
    return {
        "one token changed": changed,
        "two tokens changed, and the sum the same": moved[::3],
        "two tokens swapped": swapped[::3],
        "in reverse": [known.flip(0)],
        **{f"all ids larger by {more:,}": [known + more] for more in _MORE},
    }
