"""Chunks to try things on: of any bits or of plausible values, in memory that shows where something was written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvloom import Chunk, KVSpec, MemoryFormat
from kvloom_testkit.subjects import SPEC

POISONS = (0x00, 0xFF, 0x5A)
"""Bytes that fill memory before it is written to."""

MODELS = (
    SPEC,
    replace(SPEC, kv_planes=1),
    replace(SPEC, num_layers=1, num_kv_heads=1, head_size=5),
    replace(SPEC, num_kv_heads=16, head_size=64),
    *(
        replace(SPEC, dtype=dtype)
        for dtype in ("float32", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "uint8")
    ),
)
"""A usual one, one with a latent cache, one of odd numbers, one of chunks larger than a MiB, and other dtypes."""

PAGES = ((5, 24), (2, 3, 16), (7,))
"""Shapes of opaque pages, in elements."""

_GUARD_BYTES = 4096
_UNEVEN = 8


def chunk_of(spec: KVSpec, num_tokens: int = 5, *, seed: int = 0) -> Chunk:
    """A chunk of any bits, NaNs and infinities among them, with zeros here and there."""
    return _any_bits(spec, spec.blob_shape(num_tokens), MemoryFormat.KV_BLOB, num_tokens, seed)


def pages_of(spec: KVSpec, shape: Sequence[int], *, seed: int = 0) -> Chunk:
    """A chunk of opaque pages of any bits."""
    return _any_bits(spec, tuple(shape), MemoryFormat.KV_PAGES, 16, seed)


def finite_chunks(spec: KVSpec, num_tokens: int = 5) -> dict[str, Chunk]:
    """Chunks of finite values, by their difficulty."""
    shape, dtype = spec.blob_shape(num_tokens), spec.torch_dtype
    normal = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(num_tokens))
    if not dtype.is_floating_point:
        return {"whole numbers": Chunk((normal * 40).clamp(0, 127).to(dtype), MemoryFormat.KV_BLOB, num_tokens)}
    about = torch.finfo(dtype)
    outliers = normal.clone()
    outliers[..., 0] *= 100
    tensors = {
        "usual values": normal,
        "zeros": torch.zeros(shape),
        "all the same": torch.full(shape, 0.75),
        "outliers": outliers,
        "the largest numbers": normal.sign() * about.max,
        "the smallest numbers": normal.sign() * about.smallest_normal,
    }
    return {name: Chunk(each.to(dtype), MemoryFormat.KV_BLOB, num_tokens) for name, each in tensors.items()}


def uneven_chunks(spec: KVSpec, num_tokens: int = 4) -> dict[str, Chunk]:
    """Chunks of usual values with one half much larger than the other, by that half; none for integers."""
    shape, dtype = spec.blob_shape(num_tokens), spec.torch_dtype
    if not dtype.is_floating_point:
        return {}
    normal = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(num_tokens))
    large = {
        "K": (0, slice(None)),
        "V": (-1, slice(None)),
        "layer 0": (slice(None), 0),
        "the others": (slice(None), slice(1, None)),
    }
    found = {}
    for name, which in large.items():
        values = normal.clone()
        values[which] *= _UNEVEN
        found[f"{name} {_UNEVEN} times as large"] = Chunk(values.to(dtype), MemoryFormat.KV_BLOB, num_tokens)
    return found


def astray(back: Chunk, given: Chunk) -> str:
    """Describe layers that differ after a round trip by more than rounding, even very rough; empty if there are none.

    Two bits a value are enough, scaled by the largest value of a layer, or five scaled by the largest of a chunk.
    """
    found = []
    for plane, layers in enumerate(zip(back.tensor.double(), given.tensor.double(), strict=True)):
        for layer, (here, there) in enumerate(zip(*layers, strict=True)):
            product = float((here * there).sum())
            times = product / float((there * there).sum())
            alike = product / max(float(here.norm() * there.norm()), 1e-300)
            if not (0.35 < times < 1.6 and alike > 0.3):
                found.append(
                    f"plane {plane}, layer {layer}: {times:.2f} times what it was, with a correlation of {alike:.2f}"
                )
    return "; ".join(found)


def bits(chunk: Chunk) -> torch.Tensor:
    """The bytes of a chunk, in order: a copy, 1-D uint8."""
    return chunk.tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def outline(chunk: Chunk) -> Chunk:
    """Its shape and dtype, on the meta device."""
    return replace(chunk, tensor=torch.empty_like(chunk.tensor, device="meta"))


def room_for(chunk: Chunk, poison: int = POISONS[-1]) -> Chunk:
    """A chunk of the same shape and dtype, filled with `poison`."""
    return Guarded.around(chunk, poison).chunk


@dataclass(frozen=True, slots=True)
class Guarded:
    """A poisoned chunk in the middle of memory that is not its own, as chunks of the pool are."""

    chunk: Chunk
    memory: torch.Tensor
    start: int
    poison: int

    @classmethod
    def around(cls, like: Chunk, poison: int) -> Guarded:
        memory = torch.full((like.nbytes + 2 * _GUARD_BYTES,), poison, dtype=torch.uint8)
        inside = memory[_GUARD_BYTES : _GUARD_BYTES + like.nbytes]
        tensor = inside.view(like.tensor.dtype).view(like.tensor.shape)
        return cls(replace(like, tensor=tensor), memory, _GUARD_BYTES, poison)

    @property
    def intact(self) -> bool:
        """Nothing around the chunk was written to."""
        outside = torch.cat([self.memory[: self.start], self.memory[self.start + self.chunk.nbytes :]])
        return bool((outside == self.poison).all())


def _any_bits(spec: KVSpec, shape: tuple[int, ...], format: MemoryFormat, num_tokens: int, seed: int) -> Chunk:
    dtype = spec.torch_dtype
    chance = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=chance)
    flat[flat.numel() // 3 : flat.numel() // 2] = 0
    return Chunk(flat.view(dtype).view(shape), format, num_tokens)
