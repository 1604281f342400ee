"""Profiles for tests: nothing in them is wrong, and nothing was measured."""

from __future__ import annotations

from typing import Any

import torch

from kvloom_serde_cachegen.profile import RANK_UNIT, Profile, Transform, Verdict, quantised, rotations_of


def transform_of(planes: int, layers: int, hidden: int, seed: int = 0) -> Transform:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for plane in range(planes):
        of_plane = []
        for layer in range(layers):
            rank = 32 * (1 + (plane + layer) % (hidden // 32))
            square = torch.randn(hidden, hidden, generator=generator, dtype=torch.float64)
            of_plane.append(quantised(torch.linalg.qr(square).Q.T[:rank]))
        rows.append(of_plane)
    bases, exponents = (tuple(tuple(pair[which] for pair in row) for row in rows) for which in (0, 1))
    return Transform(
        torch.randn(planes, layers, hidden, generator=generator),
        torch.rand(planes, layers, hidden, generator=generator) + 0.1,
        torch.rand(planes, layers, generator=generator) + 0.1,
        bases,
        exponents,
    )


def profile_of(planes: int = 2, layers: int = 2, hidden: int = 64, *, klt: bool = True, **change: Any) -> Profile:
    settings: dict[str, Any] = {
        "model": "a model",
        "identity": "weights 1, config 2",
        "planes": planes,
        "layers": layers,
        "hidden": hidden,
        "head_size": hidden // 2,
        "calibrated_tokens": 1000,
        "weights": torch.rand(planes, layers, hidden) + 0.5,
        "rotary_size": hidden // 2,
        "interleaved": False,
        "rotations": rotations_of(torch.rand(hidden // 4, dtype=torch.float64)),
        "transform": transform_of(planes, layers, hidden) if klt else None,
        "verdicts": {"step/0.75": Verdict(1e-3, 2e-4, 1e-5, 0.99, 2.5, 4096, True, {"kl": 1e-3})},
    }
    return Profile(**{**settings, **change})


def profile_like(
    kv: torch.Tensor,
    *,
    heads: int = 1,
    rotary: float = 1.0,
    interleaved: bool = False,
    sigma: float = 1.0,
    seed: int = 0,
) -> Profile:
    """A profile with random directions, as many as KV like `kv`, `[planes, layers, tokens, hidden]`, may have."""
    planes, layers, _, hidden = kv.shape
    generator = torch.Generator().manual_seed(seed)
    rank = hidden // RANK_UNIT * RANK_UNIT or hidden

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
