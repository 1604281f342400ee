"""Digests over weights: two fine-tunes of one model have the same names, headers and shapes, and differ only here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash

_BLOCK_BYTES = 64 << 20

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def full_digest(tensors: NamedTensors) -> str:
    """xxh3-128 over names, dtypes, shapes and every byte, about 10 GB/s from the host's memory."""
    state = xxhash.xxh3_128()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        state.update(_header(name, tensor))
        for block in _blocks(_flat_bytes(name, tensor)):
            state.update(block.cpu().numpy())
    return state.hexdigest()


def sampled_digest(tensors: NamedTensors, *, samples: int = 256) -> str:
    """xxh3-128 over names, dtypes, shapes and about `samples` elements of each tensor, spread evenly over all of it.

    Tells models and their fine-tunes apart, and weights before and after a merge. Not an edit of a few elements.
    """
    state = xxhash.xxh3_128()
    taken: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        state.update(_header(name, tensor))
        flat = _flat(name, tensor)
        # Odd, so that it does not always fall on the same column of a matrix.
        step = max(1, flat.numel() // samples) | 1
        taken.setdefault(tensor.device, []).append(flat[::step].contiguous().view(torch.uint8))
    for parts in taken.values():
        state.update(torch.cat(parts).cpu().numpy())
    return state.hexdigest()


def _header(name: str, tensor: torch.Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one row. ValueError if its bytes are not in reach."""
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: its weights are offloaded and cannot be digested; load the model whole")
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        raise ValueError(f"{name}: weights of type {type(tensor).__name__} cannot be digested")
    return tensor.detach().reshape(-1)


def _flat_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return _flat(name, tensor).view(torch.uint8)


def _blocks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces that are cheap to bring to the host, one at a time."""
    return iter(flat.split(_BLOCK_BYTES)) if flat.device.type != "cpu" else iter((flat,))
