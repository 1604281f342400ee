"""The values that pass between core and plugins. All frozen; torch is not imported until a tensor is asked for."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Buffer = bytes | bytearray | memoryview
"""One run of bytes."""

Buffers = Sequence[Buffer]
"""The bytes of one blob as one or several buffers, in order; they are joined by copying only if necessary."""

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
"""The dtypes that KV may have, by torch's names."""

_MOST = 1 << 31
_MOST_RANKS = 1 << 12
"""Maximum number of ranks: an index makes a spec and keys for each."""

EXACT = "exact"
"""The fidelity of KV that equals, bit for bit, what the engine computed."""


class MemoryFormat(enum.Enum):
    """The layout of a chunk's tensor."""

    KV_BLOB = "kv_blob"
    """`[2, num_layers, num_tokens, hidden_dim]`, K then V; 1 instead of 2 for a latent (MLA) cache."""
    KV_PAGES = "kv_pages"
    """Opaque engine pages: whole blocks whose bytes only the engine understands."""


class ChunkKey(NamedTuple):
    """The name of one chunk of KV: it covers the model, the layout, the salt and every token up to its end.

    `str(key)` is `<fingerprint>/<salt tag>/<depth>-<digest>`, safe in paths and URLs.
    """

    namespace: str
    """`<fingerprint>/<salt tag>`"""
    depth: int
    """Number of chunks before this one in its chain, or another number that grows along it."""
    digest: bytes
    """32 bytes of SHA-256 that cover the namespace, too: tiers tell chunks apart by their digests alone."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.depth}-{self.digest.hex()}"

    @classmethod
    def parse(cls, text: str) -> ChunkKey:
        """The inverse of `str`; ValueError if `text` is not a key."""
        namespace, _, name = text.rpartition("/")
        depth, _, digest = name.partition("-")
        key = cls(namespace, int(depth), bytes.fromhex(digest))
        if str(key) != text or namespace.count("/") != 1 or len(key.digest) != 32:
            raise ValueError(f"not a chunk key: {text!r}")
        return key


class Segment(NamedTuple):
    """Tokens `start` (inclusive) to `end` (exclusive) of a sequence, and the key of their KV."""

    start: int
    end: int
    key: ChunkKey


def tokens_of(segments: Iterable[Segment]) -> int:
    """Number of tokens in all of them."""
    return sum(segment.end - segment.start for segment in segments)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The KV of one segment, in the process's own memory."""

    tensor: torch.Tensor
    """`[planes, layers, tokens, hidden]`, or what else `format` says, in the dtype of the spec, on the CPU."""
    format: MemoryFormat
    num_tokens: int
    fidelity: str = EXACT
    """`"exact"`, or the name of the lossy codec that this KV went through."""
    start: int | None = None
    """The position of its first token in its sequence, where it is known."""

    @property
    def exact(self) -> bool:
        """The chunk is exactly what was stored, bit for bit."""
        return self.fidelity == EXACT

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.tensor.nbytes


class Entry(NamedTuple):
    """One blob in a listing."""

    key: str
    bytes: int
    """Bytes that the blob takes in the store."""
    modified: float
    """Time of the last write, in seconds since the epoch."""
    used: float = 0.0
    """Time of the last use, in seconds since the epoch; 0 if the store does not know."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A forecast of `retrieve`: which leading tokens the tiers say they hold. Nothing was read or verified."""

    tokens: int
    """Leading tokens found without a gap."""
    by_tier: Mapping[str, int] = field(default_factory=dict)
    """Number of those tokens that would come from each tier."""

    def __bool__(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class TierHealth:
    """The state of one tier, as far as it is known without asking it."""

    name: str
    state: str
    """`ok`; `paused`: skipped until it answers again; `read only`: not written to until that works again; `stuck`:
    every thread is held by a call that hangs; `neglected`: listing or deleting hangs, so that bounds may not hold;
    `degraded`: not all that it holds is accounted for, so that it does not grow, or this process cannot evict."""
    reason: str = ""
    """The last error, unless it is ok."""
    retry_in_seconds: float | None = None
    """Time until it is tried again, if it is paused."""
    failures: int = 0
    """In a row."""
    abandoned_calls: int = 0
    """Calls past their deadline that have not returned yet."""
    waiting_bytes: int = 0
    """Accepted and not written yet."""
    blobs: int = 0
    bytes: int = 0
    """Size of its content, as far as this process knows."""
    capacity: int | None = None
    """Maximum number of bytes that kvloom lets it hold; None if there is no limit."""
    recovered: bool = True
    """The content from before this process started is known."""
    evicts: bool = True
    """This process evicts, to keep the tier within its bounds."""

    @property
    def ok(self) -> bool:
        """Nothing keeps it from being read and written."""
        return self.state == "ok"


@dataclass(frozen=True, slots=True)
class Health:
    """The state of an engine's tiers. Serving continues, whatever it is."""

    tiers: tuple[TierHealth, ...]

    @property
    def ok(self) -> bool:
        """Every tier is."""
        return all(tier.ok for tier in self.tiers)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape and the owner of the KV of one model, or of one of its ranks.

    Every field reaches the fingerprint, so that KV is never served to a model that did not compute it.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    """Number of KV heads in this rank."""
    head_size: int
    """Elements of K of one head for one token."""
    dtype: str
    """A torch dtype by name, one of `DTYPES`: `"bfloat16"`."""
    revision: str = ""
    """The commit of the weights on a hub, or a digest over them: two fine-tunes differ here and nowhere else."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the positional encoding."""
    adapters: Sequence[str] = ()
    """Active adapters (LoRA), each with a digest of its weights."""
    kv_planes: int = 2
    """2 for K and V, 1 for a latent (MLA) cache."""
    kv_quantization: str = ""
    world_size: int = 1
    """Number of ranks that the layers' heads are spread over."""
    rank: int = 0
    replicated: bool = False
    """Every rank holds the same KV (MLA): ranks then share keys."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_size", "world_size", "kv_planes", "rank"):
            value, least = getattr(self, name), 0 if name == "rank" else 1
            # Not a bool, which is an int: its JSON differs, and so the fingerprint would.
            if type(value) is bool or not isinstance(value, int) or not least <= value < _MOST:
                raise ValueError(f"KVSpec.{name} must be a whole number of at least {least}, not {_quoted(value)}")
        if self.world_size > _MOST_RANKS:
            raise ValueError(f"KVSpec.world_size must be at most {_MOST_RANKS}, not {self.world_size}")
        for name in ("model", "revision", "kv_quantization"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"KVSpec.{name} must be a string, not {_quoted(getattr(self, name))}")
        if self.dtype not in DTYPES:
            raise ValueError(f"KVSpec.dtype must be one of {', '.join(DTYPES)}, not {_quoted(self.dtype)}")
        if self.kv_planes not in (1, 2):
            raise ValueError(f"KVSpec.kv_planes must be 1 or 2, not {self.kv_planes}")
        if self.rank >= self.world_size:
            raise ValueError(f"KVSpec.rank must be in [0, {self.world_size}), not {self.rank}")
        if not isinstance(self.replicated, bool):
            raise ValueError(f"KVSpec.replicated must be true or false, not {_quoted(self.replicated)}")
        listed = isinstance(self.adapters, Sequence) and not isinstance(self.adapters, str)
        if not listed or not all(isinstance(adapter, str) for adapter in self.adapters):
            raise ValueError(f"KVSpec.adapters must be a list of strings, not {_quoted(self.adapters)}")
        object.__setattr__(self, "adapters", tuple(self.adapters))
        if not isinstance(self.rope, Mapping):
            raise ValueError(f"KVSpec.rope must be a mapping, not {_quoted(self.rope)}")
        try:
            canonical_json(dict(self.rope))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"KVSpec.rope must be what JSON can say: {error}") from None
        object.__setattr__(self, "rope", dict(self.rope))

    @property
    def hidden_dim(self) -> int:
        """Elements of K (or V) for one token of one layer."""
        return self.num_kv_heads * self.head_size

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`, as torch has it."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def identity(self) -> str:
        """Model, weights, config and adapters, without the hardware and kernels that computed the KV."""
        weights, _, _ = self.revision.partition(", on ")
        return ", ".join([self.model, weights, *self.adapters])

    def blob_shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """The shape of a KV_BLOB chunk of `num_tokens` tokens."""
        return (self.kv_planes, self.num_layers, num_tokens, self.hidden_dim)

    def other_ranks(self) -> list[KVSpec]:
        """The specs of the other ranks, whose KV has keys of its own."""
        ranks = () if self.replicated else range(self.world_size)
        return [replace(self, rank=rank) for rank in ranks if rank != self.rank]

    def to_json(self) -> str:
        """Canonical JSON: the same spec gives the same text everywhere."""
        return canonical_json(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> KVSpec:
        """The spec that `to_json` wrote. Raises ValueError or TypeError for anything else."""
        return cls(**json.loads(text))


def _quoted(value: object) -> str:
    """A wrong value for an error's text, cut short."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and nothing but ASCII, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def short_digest(text: str, *, num_bytes: int) -> str:
    """The first `num_bytes` bytes of SHA-256 over UTF-8 `text`, lone surrogates included, in hex."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[: 2 * num_bytes]
