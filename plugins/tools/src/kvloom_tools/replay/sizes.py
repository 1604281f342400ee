"""The size of a chunk, or of a piece of one, in each tier of a configuration, and the tier's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kvloom import EXACT, ConfigError, inspection

if TYPE_CHECKING:
    from kvloom import Chunk, KVSpec, Serializer
    from kvloom.inspection import Resolved, TierChoice

STAGING_BYTES = 1 << 30
"""The pool of an engine whose memory tier does not say, as in `kvloom.engine.builder`."""
_PAGE_BYTES = 4096


class Size(NamedTuple):
    """Bytes of a number of tokens."""

    stored: int
    """Bytes of the capacity."""
    moved: int
    """Bytes that are read or written."""
    landed: int
    """Bytes of the memory tier's pool, when they come from this tier."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier."""

    name: str
    type: str
    capacity: int | None
    """Bytes; None for no limit."""
    stored_bytes: int
    """Bytes of the capacity that one stored chunk takes."""
    moved_bytes: int
    """Bytes that are read or written for one chunk."""
    landed_bytes: int = 0
    """Bytes of the memory tier's pool that one chunk from this tier takes."""
    piece: Callable[[int], Size] = lambda tokens: Size(0, 0, 0)
    """The size of a piece of so many tokens."""
    write: str = "through"
    admission: str = "lru"
    ttl: float | None = None
    """Seconds."""
    quota: Mapping[str, int] | None = None
    """Bytes by salt, as the configuration has it."""
    exact: bool = True
    """The tier gives back what was stored, bit for bit."""
    evicts_itself: bool = False
    """The store has a limit of its own, which is not known here."""

    @property
    def in_memory(self) -> bool:
        return self.type == "memory"

    @property
    def bounded(self) -> bool:
        """There is something that makes chunks go."""
        return self.write != "never" and (self.capacity is not None or self.ttl is not None or bool(self.quota))


def plan_tiers(
    resolved: Resolved, *, chunk_tokens: int, spec: KVSpec | None, bytes_per_token: float | None = None,
    ratios: Mapping[str, float] | None = None,
) -> list[TierPlan]:  # fmt: skip
    """The tiers of a configuration.

    spec: what the model's KV looks like; without one, `bytes_per_token` says how much it is. ratios: by tier, how long
    a blob is in parts of its chunk; default: as the serializer makes of noise. Raises ConfigError.
    """
    if spec is None and bytes_per_token is None:
        raise ConfigError("--spec", "the size of a token's KV is not known; give --spec or --bytes-per-token")

    @lru_cache(maxsize=1)  # tiers ask for the same one after another
    def sample(tokens: int) -> tuple[int, Chunk | None]:
        if spec is None:
            return max(1, round((bytes_per_token or 0) * tokens)), None
        chunk = _sample(resolved, spec, tokens)
        return chunk.nbytes, chunk

    names = {choice.name for choice in resolved.tiers}
    if strangers := sorted((ratios or {}).keys() - names):
        raise ConfigError("--ratio", f"no tier is called {strangers[0]!r}; there are: {', '.join(sorted(names))}")
    pool = _pool_bytes(resolved)
    plans = [
        _memory(choice, sample, chunk_tokens, pool)
        if choice.backend is None
        else _stored(choice, sample, chunk_tokens, pool, spec=spec, ratio=(ratios or {}).get(choice.name))
        for choice in resolved.tiers
    ]
    for plan, choice in zip(plans, resolved.tiers, strict=True):
        if plan.capacity is not None and plan.capacity < plan.stored_bytes:
            text = f"{choice.capacity} bytes is less than one chunk takes ({plan.stored_bytes} bytes); raise it"
            raise ConfigError(f"{choice.path}.capacity", text)
    return plans


def _pool_bytes(resolved: Resolved) -> int:
    first = next((choice for choice in resolved.tiers if choice.backend is None), None)
    return (first.capacity if first is not None else None) or STAGING_BYTES


_Sample = Callable[[int], "tuple[int, Chunk | None]"]
"""For a number of tokens, the bytes of their KV, and a chunk of them if the model is known."""


def _memory(choice: TierChoice, sample: _Sample, chunk_tokens: int, pool: int) -> TierPlan:
    @cache
    def size(tokens: int) -> Size:
        nbytes, _ = sample(tokens)
        taken = inspection.pool_bytes(nbytes, pool)
        return Size(taken, nbytes, taken)

    whole = pool // _PAGE_BYTES * _PAGE_BYTES
    return TierPlan(
        choice.name, "memory", whole, *size(chunk_tokens), piece=size, ttl=choice.ttl, quota=choice.quota
    )  # fmt: skip


def _stored(
    choice: TierChoice, sample: _Sample, chunk_tokens: int, pool: int, *, spec: KVSpec | None, ratio: float | None
) -> TierPlan:
    assert choice.backend is not None and choice.serializer is not None
    serializer = None if spec is None else choice.serializer.make(spec)
    if serializer is not None:
        views, exact = serializer.type == "raw", serializer.fidelity == EXACT
    else:
        if ratio is None and choice.serializer.type != "raw":
            text = f"how much {choice.serializer.type!r} compresses is not known without a spec"
            raise ConfigError(f"{choice.path}.serializer", f"{text}; give --spec, or --ratio {choice.name}=0.3")
        views, exact = choice.serializer.type == "raw", choice.serializer.cls.lossless

    @cache
    def size(tokens: int) -> Size:
        kv_bytes, chunk = sample(tokens)
        blob_bytes, header_bytes = kv_bytes + _PAGE_BYTES, _PAGE_BYTES
        if serializer is not None and chunk is not None:
            blob_bytes, header_bytes = _framed(serializer, chunk)
        if ratio is not None:
            blob_bytes = header_bytes + max(1, round(ratio * kv_bytes))
        landed = inspection.pool_bytes(blob_bytes if views else kv_bytes, pool)
        return Size(inspection.stored_bytes(blob_bytes), blob_bytes, landed)

    bounded = choice.backend.cls.bounded
    return TierPlan(
        choice.name, choice.backend.type, choice.capacity, *size(chunk_tokens), piece=size, write=choice.write,
        admission=choice.policy, ttl=choice.ttl, quota=choice.quota, exact=exact,
        evicts_itself=bounded and choice.capacity is None,
    )  # fmt: skip


def _sample(resolved: Resolved, spec: KVSpec, chunk_tokens: int) -> Chunk:
    """A chunk of noise: it does not compress better than KV does."""
    import torch

    from kvloom import Chunk

    connector = resolved.connector.make(spec)
    shape, dtype = tuple(connector.shape(chunk_tokens)), spec.torch_dtype
    noise = torch.randn(shape) if dtype.is_floating_point else torch.randint(-99, 99, shape)
    return Chunk(noise.to(dtype), connector.format, chunk_tokens)


def _framed(serializer: Serializer, chunk: Chunk) -> tuple[int, int]:
    """Bytes of a chunk's blob, and of the header in front of it."""
    from kvloom import envelope

    dtype = str(chunk.tensor.dtype).removeprefix("torch.")
    about = envelope.Description(
        f"{'0' * 32}/{'0' * 16}/1000-{'0' * 64}", serializer.type, tuple(chunk.tensor.shape), dtype,
        chunk.format.value, chunk.num_tokens, serializer.fidelity, serializer.params, 1 << 31, 1 << 20,
    )  # fmt: skip
    parts = envelope.seal(about, serializer.encode(chunk))
    sizes = [memoryview(part).nbytes for part in parts]
    return sum(sizes), sizes[0]
