"""Attention sinks in the mode `klt`, stored exactly: tokens that others attend to, whatever they say.

Their V is small, and its noise counts for more than that of all other tokens. The mode `step` has them in its streams.
Components cannot keep a token exact, so a blob of `klt` with sinks has two buffers behind its streams: the first token
(see `first_token`), empty if it is in the streams, and the sinks of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvloom import Buffer, Buffers, CorruptBlobError
from kvloom_serde_cachegen import device

_PART_OF_SQUARES = 0.09
"""Of the mean over tokens: V with less is that of a sink."""
TOKENS_OF_SINK = 16
"""A layer with more than one sink in so many tokens is taken to have none."""
_PLACE_BYTES = 4
"""Of each sink its layer and its token, 16 bits each, before its K and V."""


def kept(kv: torch.Tensor) -> memoryview | None:
    """The sinks of `[planes, layers, tokens, hidden]` in host memory, with fewer than 65,536 layers and tokens; None if
    there are none."""
    planes, layers, tokens, _ = kv.shape
    if planes != 2 or max(layers, tokens) > 0xFFFF:
        return None
    values = kv[1].double()
    squares = torch.where(values.isfinite(), values, 0.0).square().sum(-1)
    small = squares < _PART_OF_SQUARES * squares.mean(1, keepdim=True)
    small &= small.sum(1, keepdim=True) <= tokens // TOKENS_OF_SINK
    where = small.nonzero()
    if not len(where):
        return None
    places = np.ascontiguousarray(where.numpy().astype("<u2"))
    rows = kv[:, where[:, 0], where[:, 1]].transpose(0, 1).contiguous().view(torch.uint8).flatten(1).numpy()
    return memoryview(np.concatenate([places.view(np.uint8), rows], 1).ravel().data)


def most_bytes(kv: torch.Tensor) -> int:
    """The most that `kept` returns."""
    planes, layers, tokens, hidden = kv.shape
    return layers * (tokens // TOKENS_OF_SINK) * (_PLACE_BYTES + planes * hidden * kv.element_size())


def apart(blob: Buffers, layers: int) -> tuple[Sequence[Buffer], Buffer | None]:
    """A blob without its sinks, and its sinks, if it has any."""
    if len(blob) != layers + 2:
        return blob, None
    first = blob[-2]
    return [*blob[:-2], *([first] if memoryview(first).nbytes else [])], blob[-1]


def restore(data: Buffer, kv: torch.Tensor, first_layer: int | None = None) -> None:
    """Fill in sinks after everything else. kv: all layers of a blob, or those from `first_layer` on. Raises
    CorruptBlobError."""
    planes, layers, tokens, hidden = kv.shape
    each = _PLACE_BYTES + planes * hidden * kv.element_size()
    entries = np.frombuffer(data, dtype=np.uint8)
    if entries.size == 0 or entries.size % each:
        raise CorruptBlobError(f"sinks of {entries.size} bytes for KV of {tuple(kv.shape)}")
    entries = entries.reshape(-1, each)
    places = torch.from_numpy(entries[:, :_PLACE_BYTES].copy().view("<u2").astype(np.int64))
    order = places[:, 0] * (1 << 16) + places[:, 1]
    misplaced = (first_layer is None and int(places[-1, 0]) >= layers) or int(places[:, 1].max()) >= tokens
    if misplaced or not bool((order.diff() > 0).all()):
        raise CorruptBlobError(f"sinks that are not in order, or not in KV of {tuple(kv.shape)}")
    wanted = places[:, 0] - (first_layer or 0)
    mine = (wanted >= 0) & (wanted < layers)
    if not bool(mine.any()):
        return
    rows = torch.from_numpy(entries[:, _PLACE_BYTES:][mine.numpy()])
    values = rows.view(kv.dtype).view(-1, planes, hidden).transpose(0, 1)
    at, there = (wanted[mine], places[mine, 1]), device.of(kv)

    def fill() -> None:
        kv[:, at[0].to(kv.device), at[1].to(kv.device)] = values.to(kv.device)

    if there is None:
        fill()
    else:  # after what is queued
        there.queue(fill)
