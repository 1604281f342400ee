"""Reading a stored blob by ranges: the header, then the bytes of single layers, each verified by its own checksum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from kvloom import envelope
from kvloom.contracts.storage import StorageBackend
from kvloom.tiers.rooms import Place, layer_bytes

WHOLE_BYTES = 1 << 20
"""Chunks up to this size are read whole: layers that small are not worth a call each."""
RANGE_BYTES = 2 << 20
"""Layers that lie side by side are read together up to this size: below it, the call costs more than the bytes."""


def reads_ranges(backend: StorageBackend) -> bool:
    """Whether the backend reads a part of a blob without reading all of it."""
    return type(backend).get_range is not StorageBackend.get_range


def has_layers(header: envelope.Header, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the blob of a chunk `[planes, layers, tokens, hidden]` is its bytes, with a checksum for each layer."""
    raw = header.description.serializer == "raw"
    return raw and header.lengths == (layer_bytes(shape, dtype),) * (shape[0] * shape[1])


def groups(num_layers: int, nbytes: int) -> list[range]:
    """Which layers to read together if one (plane of one) has `nbytes` bytes; with 0, nothing is read: each alone.

    The first comes alone, for it is waited for; then more and more at a time, until a range is long enough.
    """
    most = max(1, RANGE_BYTES // nbytes) if nbytes else 1
    parts, start, size = [], 0, 1
    while start < num_layers:
        parts.append(range(start, min(start + size, num_layers)))
        start += size
        size = min(2 * size, most)
    return parts


def read_layers(
    backend: StorageBackend, header: envelope.Header, place: Place, *, num_layers: int, layers: range
) -> int:
    """Read `layers` of a blob that has layers into their place, all planes; how many, from the first on, are right.

    Raises whatever the backend raises.
    """
    right = len(layers)
    step = layer_bytes(place.shape, place.dtype)
    for plane in range(place.shape[0]):
        first = plane * num_layers + layers.start
        into = place.rows(plane, layers[:right])
        offset = header.header_bytes + first * step
        if not right or not backend.get_range(header.description.key, offset, into):
            return 0
        for number in range(right):
            if xxhash.xxh3_128_digest(into[number * step : (number + 1) * step]) != header.digests[first + number]:
                right = number
                break
    return right
