"""Profiles of no model, for tests."""

from __future__ import annotations

import torch

from kvloom_serde_cachegen.profile import RANK_UNIT, Profile, Transform, quantised, rotations_of


def profile_for(
    kv: torch.Tensor,
    *,
    heads: int = 1,
    rotary: float = 1.0,
    interleaved: bool = False,
    sigma: float = 1.0,
    seed: int = 0,
) -> Profile:
    """Of random directions, as many as there may be of KV like `kv`, `[planes, layers, tokens, hidden]`."""
    planes, layers, _, hidden = kv.shape
    generator = torch.Generator().manual_seed(seed)
    rank = hidden // RANK_UNIT * RANK_UNIT

    def directions() -> torch.Tensor:
        return torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64))[0][:rank]

    rows = [[quantised(directions()) for _ in range(layers)] for _ in range(planes)]
    head_size = hidden // heads
    rotary_size = int(head_size * rotary) // 2 * 2
    like = (planes, layers, hidden)
    return Profile(
        model="none", identity="none", planes=planes, layers=layers, hidden=hidden, head_size=head_size,
        calibrated_tokens=0, weights=torch.ones(layers, hidden), rotary_size=rotary_size, interleaved=interleaved,
        rotations=rotations_of(10_000.0 ** -(torch.arange(rotary_size // 2) / max(rotary_size // 2, 1))),
        transform=Transform(
            means=torch.randn(like, generator=generator),
            scales=torch.rand(like, generator=generator) + 0.5,
            sigmas=torch.full((planes, layers), sigma),
            bases=tuple(tuple(each[0] for each in row) for row in rows),
            exponents=tuple(tuple(each[1] for each in row) for row in rows),
        ),
    )  # fmt: skip
