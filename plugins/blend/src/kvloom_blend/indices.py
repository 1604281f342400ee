"""Masks and indices, under the names that CacheBlend's interfaces have for them."""

from __future__ import annotations

import torch

Index = tuple[slice | torch.Tensor, ...]


def create_index(ndims: int, target_dim: int, index: torch.Tensor) -> Index:
    """An index that applies `index` to dimension `target_dim` of `ndims`, and takes all of the others.

    Raises IndexError if there is no such dimension; it counts from either end.
    """
    if not -ndims <= target_dim < ndims:
        raise IndexError(f"target_dim: {target_dim} of {ndims} dimensions")
    target = target_dim % ndims
    return tuple(index if dim == target else slice(None) for dim in range(ndims))


def indices_to_mask(indices: torch.Tensor, size: int) -> torch.Tensor:
    """A bool mask of `size` entries that is True at `indices`, on their device."""
    mask = torch.zeros(size, dtype=torch.bool, device=indices.device)
    mask[indices.long()] = True
    return mask


def mask_to_indices(mask: torch.Tensor) -> torch.Tensor:
    """Indices of the nonzero entries of a 1-D mask: int64, ascending."""
    return mask.nonzero().flatten()
