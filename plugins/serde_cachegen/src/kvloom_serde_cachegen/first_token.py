"""The first token of a sequence, stored exactly, because every later token attends to it.

Quantising this one token does more harm than quantising all others. So if a chunk is known to begin a sequence, its
streams hold the tokens behind the first, and one more buffer holds the first, `[layers, planes, hidden]`.
"""

from __future__ import annotations

import torch

from kvloom import Buffers, CorruptBlobError
from kvloom_serde_cachegen import device


def kept(kv: torch.Tensor) -> memoryview:
    """The first token of `[planes, layers, tokens, hidden]`."""
    first = kv[:, :, 0].transpose(0, 1).contiguous().cpu()
    return memoryview(first.view(torch.uint8).flatten().numpy().data)


def behind(kv: torch.Tensor) -> torch.Tensor:
    """The tokens after the first, a view."""
    return kv[:, :, 1:]


def restored(blob: Buffers, kv: torch.Tensor, first_layer: int | None = None) -> tuple[Buffers, torch.Tensor]:
    """Fill in the first token, if the blob has one; return the blob's streams and the part of the KV that they fill.

    kv: `[planes, layers, tokens, hidden]`, of which the layers are all of the blob's, or those from `first_layer` on.
    Raises CorruptBlobError.
    """
    planes, layers, tokens, hidden = kv.shape
    if len(blob) != layers + 1:
        return blob, kv
    data = memoryview(blob[-1])
    each = planes * hidden * kv.element_size()
    start = first_layer or 0
    least = (start + layers) * each
    if tokens < 2 or data.nbytes % each or data.nbytes < least or (first_layer is None and data.nbytes != least):
        raise CorruptBlobError(f"a first token of {data.nbytes} bytes for KV of {tuple(kv.shape)}")
    rows = torch.frombuffer(bytearray(data[start * each : least]), dtype=torch.uint8)
    first, there = rows.view(kv.dtype).view(layers, planes, hidden).transpose(0, 1), device.of(kv)
    if there is None:
        kv[:, :, 0] = first
    else:  # after what is queued
        there.queue(lambda: kv[:, :, 0].copy_(first))
    return blob[:-1], behind(kv)
