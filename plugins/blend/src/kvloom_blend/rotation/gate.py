"""At load: do these rotations move K as this model's own code does?"""

from __future__ import annotations

from torch import nn

from .models import Rotations, unwrapped
from .probe import Layer, Probe, errors, probe, tolerance
from .rotation import Rotation


def gate(model: nn.Module, rotations: Rotations) -> None:
    """Compute K of single tokens at four positions, in every layer, and rotate the first to the other three.

    ValueError, with the layer and the error, unless each equals the model's own K. K is taken from the model's cache,
    so that everything between its rope and the stored KV is part of the test.
    """
    model, decoder = unwrapped(model)
    check(probe(model, decoder, longest=rotations.max_length), rotations)


def check(found: Probe, rotations: Rotations) -> None:
    """`gate`, of K that was computed before."""
    if len(rotations) != len(found.layers):
        raise ValueError(f"rotations: of {len(rotations)} layers; the model keeps KV of {len(found.layers)}")
    for number, (layer, rotation) in enumerate(zip(found.layers, rotations, strict=True)):
        _check(found, number, layer, rotation)


def _check(found: Probe, number: int, layer: Layer, rotation: Rotation | None) -> None:
    try:
        rows = layer.rows()
    except ValueError as error:
        raise ValueError(f"layer {number}: {error}") from None
    if rotation is not None and rotation.head_size != rows.shape[-1]:
        raise ValueError(f"layer {number}: K has heads of {rows.shape[-1]}, not {rotation.head_size}")
    turned = rows[:1].expand_as(rows[1:]) if rotation is None else found.turned(rows, rotation)
    wrong = errors(turned, rows[1:], rotation)
    if not bool((wrong <= tolerance(rows.dtype)).all()):
        raise ValueError(
            f"layer {number}: {rotation or 'K left as it is'} is up to {float(wrong.max()):.1e} off what the model "
            f"computes (dim {int(wrong.argmax())}); at most {tolerance(rows.dtype):.0e} would be rounding"
        )
