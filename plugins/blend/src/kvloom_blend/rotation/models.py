"""Determines the rotation of each layer of a transformers model by what its own code does to K."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .native import Turn
from .probe import Layer, Probe, errors, probe, stays, tolerance
from .rotation import Rotation

_FIXED = {"default", "linear", "llama3", "yarn", "proportional", "mrope"}
"""Types of rope whose frequencies stay as they are."""


class Rotations(Sequence["Rotation | None"]):
    """The rotations of a model's layers; None for a layer without rope. Layers with the same rope share one.

    max_length: the longest sequence, in tokens, that the frequencies hold for; None: no limit.
    """

    def __init__(self, layers: Sequence[Rotation | None], *, max_length: int | None = None) -> None:
        different: list[Rotation] = []
        shared: list[Rotation | None] = []
        for rotation in layers:
            same = rotation and next((other for other in different if other.same_as(rotation)), None)
            if rotation is not None and same is None:
                different.append(rotation)
            shared.append(same or rotation)
        self._layers = tuple(shared)
        self.max_length = max_length

    def __getitem__(self, layer: int) -> Rotation | None:  # type: ignore[override]
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    def turns(self, old: Tensor, new: Tensor) -> list[Turn | None]:
        """The turn of each layer, as `Rotation.turn`; layers that share a rotation share it."""
        known = {id(rotation): rotation.turn(old, new) for rotation in {id(r): r for r in self._layers if r}.values()}
        return [None if rotation is None else known[id(rotation)] for rotation in self._layers]

    def apply(
        self, ks: Sequence[Tensor], turns: Sequence[Turn | None], *, outs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """K of all layers turned, as `Rotation.apply_layers`; that of a layer without rope is copied."""
        outs = [torch.empty(k.shape, dtype=k.dtype, device=k.device) for k in ks] if outs is None else outs
        alike: dict[Any, list[int]] = {}
        for number, (rotation, k) in enumerate(zip(self._layers, ks, strict=True)):
            if rotation is not None:
                alike.setdefault((id(rotation), id(turns[number]), k.shape, k.dtype, k.device), []).append(number)
            elif outs[number] is not k:
                outs[number].copy_(k)
        for numbers in alike.values():
            rotation, turn = self._layers[numbers[0]], turns[numbers[0]]
            if rotation is None or turn is None:
                raise ValueError(f"turns: none for layer {numbers[0]}, which has {rotation}")
            rotation.apply_layers([ks[each] for each in numbers], turn, outs=[outs[each] for each in numbers])
        return outs


def rotations_of(model: nn.Module, *, max_length: int | None = None) -> Rotations:
    """The rotations of a transformers model, found by running it with single tokens, in a few positions.

    max_length: no sequence will be longer. Ropes whose frequencies move with the length (dynamic NTK, longrope) are
    refused without, unless they never do. ValueError, with the reason, for ALiBi, learned positions and whatever else
    is not a rotation of K.
    """
    return probed(model, max_length=max_length)[0]


def probed(model: nn.Module, *, max_length: int | None = None) -> tuple[Rotations, Probe]:
    """As `rotations_of`, with K as it was seen."""
    model, decoder = unwrapped(model)
    _refuse(model, decoder)
    for rope_type, rope in _ropes(decoder):
        _check_fixed(rope_type, rope, max_length, decoder.config)
    found = probe(model, decoder, longest=max_length)
    frequencies = _frequencies(decoder)
    if not found.layers:
        raise ValueError(f"model: {type(model).__name__} keeps no KV")
    layers = [_detected(found, number, layer, frequencies) for number, layer in enumerate(found.layers)]
    return Rotations(layers, max_length=max_length), found


def unwrapped(model: Any) -> tuple[Any, Any]:
    """The transformers model within PEFT's, and the decoder of its text."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise ValueError(f"model: expected a model of transformers, got {type(model).__name__}")
    return model, model.get_decoder()


def _refuse(model: Any, decoder: Any) -> None:
    name, config = type(model).__name__, decoder.config
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(f"model: {name} has ALiBi, which is in the attention and not in K: its KV cannot be moved")
    if next(_buffers(decoder), None) is not None:
        return
    tables = [part for part, module in decoder.named_modules() if isinstance(module, nn.Embedding)]
    learned = [part for part in tables if part.rsplit(".", 1)[-1] in ("wpe", "embed_positions", "position_embeddings")]
    if learned:
        raise ValueError(f"model: {name} has learned positions ({learned[0]}), which cannot be removed from K")
    raise ValueError(f"model: {name} has no rotary embedding with frequencies (inv_freq): its positions are unknown")


def _ropes(decoder: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The type and the parameters of each rope in the configuration."""
    parameters = getattr(decoder.config, "rope_parameters", None) or {}
    nested = [rope for rope in parameters.values() if isinstance(rope, dict)]
    for rope in nested or [parameters]:
        yield rope.get("rope_type", rope.get("type", "default")), rope
    for module in decoder.modules():
        own = getattr(module, "rope_type", None)
        if isinstance(own, str) and not nested and own != parameters.get("rope_type", "default"):
            yield own, parameters


def _check_fixed(rope_type: str, rope: dict[str, Any], max_length: int | None, config: Any) -> None:
    """ValueError if the frequencies may move below `max_length`."""
    if rope_type in _FIXED or (rope_type == "longrope" and rope.get("short_factor") == rope.get("long_factor")):
        return
    if rope_type not in ("longrope", "dynamic"):
        raise ValueError(f"rope_type: {rope_type!r} is unknown; known are {', '.join(sorted(_FIXED))}")
    moves = rope["original_max_position_embeddings"] if rope_type == "longrope" else config.max_position_embeddings
    if max_length is None or max_length > moves:
        raise ValueError(
            f"rope_type: the frequencies of {rope_type!r} are others for sequences of more than {moves} tokens; "
            f"if there are none, say max_length={moves}"
        )


def _buffers(decoder: nn.Module) -> Iterator[Tensor]:
    for module in decoder.modules():
        for name, value in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and "long" not in name:
                yield value


def _frequencies(decoder: nn.Module) -> list[Tensor]:
    """Those that differ, of all ropes of the decoder; in host memory."""
    different: list[Tensor] = []
    for value in map(Tensor.cpu, _buffers(decoder)):
        if not any(torch.equal(value, other) for other in different):
            different.append(value)
    return different


def _detected(found: Probe, number: int, layer: Layer, frequencies: Sequence[Tensor]) -> Rotation | None:
    """The rotation that moves the layer's K as the model does. ValueError if none of those that there are does."""
    try:
        rows = layer.rows()
    except ValueError as error:
        raise ValueError(f"layer {number}: {error}") from None
    if stays(rows):
        return None
    bound, least = tolerance(rows.dtype), torch.inf
    for rotation in _candidates(found, rows, frequencies):
        worst = float(errors(found.turned(rows, rotation), rows[1:], rotation).max())
        if worst <= bound:
            return rotation
        least = min(least, worst)
    raise ValueError(
        f"layer {number}: K at other positions is not a rotation by the model's frequencies, in halves or "
        f"interleaved (the nearest one is {least:.1e} off): a rope of an unknown kind"
    )


def _candidates(found: Probe, rows: Tensor, frequencies: Sequence[Tensor]) -> Iterator[Rotation]:
    head_size = rows.shape[-1]
    for inv_freq in frequencies:
        room = head_size - 2 * len(inv_freq)
        if room < 0:
            continue
        for interleaved in (False, True):
            for start in dict.fromkeys((0, room)):
                rotation = Rotation(inv_freq, head_size=head_size, interleaved=interleaved, start=start)
                yield rotation if len(found.positions) == 1 else _in_sections(found, rows, rotation)


def _in_sections(found: Probe, rows: Tensor, rotation: Rotation) -> Rotation:
    """The rotation with each pair in the section whose positions turn it as the model does."""
    apart = []
    for section in range(len(found.positions)):
        alone = Probe(found.positions[section : section + 1], found.layers)
        wrong = errors(alone.turned(rows, rotation), rows[1:], rotation)
        apart.append(torch.stack(rotation.halves(wrong)).amax(0)[0])
    return Rotation(
        rotation.inv_freq, head_size=rotation.head_size, interleaved=rotation.interleaved, start=rotation.start,
        sections=torch.stack(apart).argmin(0),
    )  # fmt: skip
