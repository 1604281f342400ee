"""Fingerprints and chained digests: the names under which KV is kept.

`digest_0 = SHA-256("kvloom/1" | fingerprint | chunk_tokens | salt)`
`digest_i = SHA-256(digest_{i-1} | int32-LE tokens)`

A piece of chunk i, which is kept of a sequence that ends within it, has a key of another domain, see `pieces`:

`SHA-256("kvloom/1/piece" | NUL | digest_{i-1} | int32-LE tokens of the chunk up to its end | its start in 8 bytes, LE)`

A passage, whose KV does not stand for the beginning of a prompt, has keys of a third domain: see `passage`.

Nothing else enters a key: no environment variable, no Python `hash`, no process state.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from kvloom import native
from kvloom.types import ChunkKey, KVSpec, MemoryFormat, Segment, canonical_json, short_digest

if TYPE_CHECKING:
    import numpy as np
    import torch

DOMAIN = "kvloom/1"
"""The key format; part of every digest."""

PIECE_TOKENS = 16
"""Tokens of the smallest piece of a chunk, unless chunks are long; usual blocks of engines are as long."""

_WHOLE_UNITS = 256
"""Most tokens of a chunk that has pieces of `PIECE_TOKENS`."""
_PIECE_DOMAIN = f"{DOMAIN}/piece\0".encode()
_DIGEST_BYTES = 32
_BATCH_TOKENS = 1 << 18
"""Hashed without letting another thread run: for a part of the time that the interpreter gives a thread anyway."""
_NO_INT32 = "tokens: a token id does not fit into 32 bits"
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_MODEL_FIELDS = ("model", "revision", "rope", "adapters")
# tuple.__new__ makes the same values as calling the classes, at a third of the cost: there is one per chunk.
_new_key: Any = partial(tuple.__new__, ChunkKey)
_new_segment: Any = partial(tuple.__new__, Segment)


def identity(spec: KVSpec, format: MemoryFormat, representation: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a fingerprint, as JSON values: `{"model": {...}, "representation": {...}}`."""
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    model = {name: fields.pop(name) for name in _MODEL_FIELDS}
    if fields.pop("replicated"):
        fields.pop("rank")
    fields |= {"format": format.value, "connector": dict(representation), "domain": DOMAIN}
    return {"model": model, "representation": fields}


def fingerprint(spec: KVSpec, format: MemoryFormat, representation: Mapping[str, Any]) -> str:
    """32 hex digits that differ whenever KV may not be shared."""
    return short_digest(canonical_json(identity(spec, format, representation)), num_bytes=16)


def salt_tag(salt: str) -> str:
    """The salt's place in a key's text: tells tenants apart in a listing without naming them."""
    return short_digest(f"{DOMAIN}/salt/{salt}", num_bytes=8) if salt else "-"


def salt_tag_of(namespace: str) -> str:
    """The tenant in a key's namespace, `<fingerprint>/<salt tag>`."""
    return namespace.partition("/")[2]


def int32_tokens(tokens: torch.Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """`tokens` as a contiguous 1-D array of little-endian int32, without a copy where it is that already.

    tokens: 1-D, of any integer dtype. An array of numpy is fine, too: where keys are made, torch need not be. Raises
    TypeError unless it is an integer tensor, ValueError unless it is 1-D, on the CPU and within int32.
    """
    import numpy as np  # here, so that to check a configuration does not load it

    array = _array(tokens)
    if array.dtype == "<i4" and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.dtype != "<i8" and array.dtype.name not in _INTEGERS:
        raise TypeError(f"tokens: expected an integer dtype, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"tokens: expected 1 dimension, got {array.ndim} {array.shape}; pass one sequence")
    narrow = np.ascontiguousarray(array, dtype="<i4")
    if array.dtype.itemsize > 4 and not np.array_equal(narrow, array):
        raise ValueError(_NO_INT32)
    return narrow


def _array(tokens: Any) -> np.ndarray[Any, Any]:
    """The tokens of a tensor as an array, or an array as it is. Raises TypeError for anything else."""
    import numpy as np

    if isinstance(tokens, np.ndarray):
        return tokens
    try:
        if tokens.dtype.itemsize >= 4 and tokens.ndim == 1:
            return cast("np.ndarray[Any, Any]", tokens.numpy())
    except (AttributeError, TypeError, RuntimeError):
        pass  # what is wrong with it is said below
    if not hasattr(tokens, "detach") or not hasattr(tokens, "device"):
        raise TypeError(f"tokens: expected a 1-D integer torch.Tensor, got {type(tokens).__name__}")
    kind = str(tokens.dtype).removeprefix("torch.")
    if kind not in _INTEGERS:
        raise TypeError(f"tokens: expected an integer dtype, got {tokens.dtype}")
    if tokens.device.type != "cpu":
        raise ValueError(f"tokens: expected a CPU tensor, got {tokens.device}; pass tokens.cpu()")
    array: np.ndarray[Any, Any] = tokens.detach().numpy()
    return array


def chain(
    tokens: torch.Tensor | np.ndarray[Any, Any], *, chunk_tokens: int, fingerprint: str, salt: str = ""
) -> list[Segment]:
    """Segments of `chunk_tokens` tokens each, every key covering all tokens before its end; a short tail has none.

    tokens: 1-D, of any integer dtype. Raises TypeError and ValueError for tokens as `int32_tokens` does, TypeError for
    a salt that is not text, ValueError for `chunk_tokens` below 1.
    """
    if not isinstance(salt, str):
        raise TypeError(f"salt: expected a str, got {type(salt).__name__}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected at least 1, got {chunk_tokens}")
    digests = _digests(tokens, _root(chunk_tokens, fingerprint, salt), chunk_tokens)
    namespace = f"{fingerprint}/{salt_tag(salt)}"
    count = len(digests)
    keys = map(_new_key, zip(repeat(namespace, count), range(count), digests, strict=True))
    stop = count * chunk_tokens
    starts, ends = range(0, stop, chunk_tokens), range(chunk_tokens, stop + 1, chunk_tokens)
    return list(map(_new_segment, zip(starts, ends, keys, strict=True)))


def _digests(tokens: torch.Tensor | np.ndarray[Any, Any], digest: bytes, chunk_tokens: int) -> list[bytes]:
    """The digest of each whole chunk. digest: that before the first one."""
    native_chain = _native_chain()
    if native_chain is not None and type(chunk_tokens) is int:
        memory = _memory_of_tensor(tokens) or _memory_of_array(_array(tokens))
        if memory is not None and chunk_tokens <= memory.num_tokens:
            return _native_digests(native_chain, memory, digest, chunk_tokens)
    data = memoryview(int32_tokens(tokens).data).cast("B")
    sha256 = hashlib.sha256
    step = 4 * chunk_tokens
    digests: list[bytes] = []
    append = digests.append
    for start in range(0, len(data) - step + 1, step):
        state = sha256(digest)
        state.update(data[start : start + step])
        digest = state.digest()
        append(digest)
    return digests


class _TokenMemory(NamedTuple):
    """Tokens that native code can read where they lie."""

    address: int
    num_tokens: int
    width: int
    """Bytes of a token."""


def _memory_of_tensor(tokens: Any) -> _TokenMemory | None:
    """Return where a flat tensor in host memory is; None for others. To make an array of it first takes longer."""
    try:
        width = _width(tokens.dtype)
        if not width or tokens.ndim != 1 or tokens.device.type != "cpu" or not tokens.is_contiguous():
            return None
        address = tokens.data_ptr()
    except (AttributeError, TypeError, RuntimeError):  # it is sparse, without memory, or something else
        return None
    return None if not address or address % width else _TokenMemory(address, tokens.numel(), width)


@cache
def _width(dtype: object) -> int:
    """Bytes of a token of a tensor's dtype that native code reads in place; 0: it reads no such token so."""
    return {"torch.int64": 8, "torch.int32": 4}.get(str(dtype), 0) if sys.byteorder == "little" else 0


def _memory_of_array(array: np.ndarray[Any, Any]) -> _TokenMemory | None:
    flags = array.flags
    if array.ndim == 1 and array.dtype.str in ("<i8", "<i4") and flags.c_contiguous and flags.aligned:
        return _TokenMemory(array.__array_interface__["data"][0], len(array), array.itemsize)
    return None


def _native_digests(
    native_chain: Callable[..., int], memory: _TokenMemory, digest: bytes, chunk_tokens: int
) -> list[bytes]:
    """As `_digests`, of at least one chunk."""
    at, left, width = memory
    digests: list[bytes] = []
    while True:
        count = min(left, max(1, _BATCH_TOKENS // chunk_tokens) * chunk_tokens)
        found = ctypes.create_string_buffer(count // chunk_tokens * _DIGEST_BYTES or 1)
        if native_chain(digest, at, count, width == 8, chunk_tokens, found):
            raise ValueError(_NO_INT32)
        raw = found.raw
        digests += [raw[end - _DIGEST_BYTES : end] for end in range(_DIGEST_BYTES, len(raw) + 1, _DIGEST_BYTES)]
        left -= count
        if not left:
            return digests
        at += count * width
        digest = digests[-1]


@cache
def _native_chain() -> Callable[..., int] | None:
    """The function of `kvloom-native`, or None if it is not there, or the processor has no instructions for SHA-256."""
    size, address = ctypes.c_uint64, ctypes.c_void_p
    types = (ctypes.c_char_p, address, size, ctypes.c_int, size, address)
    return native.own_function("kvloom_chain", *types, asked="kvloom_has_chain", brief=True)


@lru_cache(maxsize=64, typed=True)
def _root(chunk_tokens: int, fingerprint: str, salt: str) -> bytes:
    """The digest before that of the first chunk."""
    root = "\0".join((DOMAIN, fingerprint, str(chunk_tokens), salt))
    return hashlib.sha256(root.encode(errors="surrogatepass")).digest()


def pieces(
    tokens: torch.Tensor | np.ndarray[Any, Any], before: Segment | None, *, chunk_tokens: int, fingerprint: str,
    salt: str = "", own: bool = False,
) -> list[Segment]:  # fmt: skip
    """Pieces that sequences which end within the chunk behind `before` may have left of it, in order of ends.

    Tokens are counted in units of `PIECE_TOKENS` for chunks of up to 256 tokens, of twice as many for up to 512, and so
    on. A piece that ends k units behind the chunk's beginning has as many units as the lowest bit of k says: its end
    determines its start, and those of k's bits, the longest first, lead from the chunk's beginning to any k.

    tokens: 1-D, of any integer dtype. before: one of their segments of `chain`; None for the first chunk. own: only
    those that lead to the last unit of the tokens. The key of a piece covers all tokens before its end, and its start.
    Raises TypeError and ValueError as `int32_tokens` does, for tokens of a chunk that has a piece, and TypeError for a
    salt that is not text.
    """
    if not isinstance(salt, str):
        raise TypeError(f"salt: expected a str, got {type(salt).__name__}")
    first, depth = (0, 0) if before is None else (before.end, before.key.depth + 1)
    unit = PIECE_TOKENS * -(-chunk_tokens // _WHOLE_UNITS)
    array = _array(tokens)
    most = min(chunk_tokens - 1, array.size - first) // unit
    if most < 1:
        return []
    digest = _root(chunk_tokens, fingerprint, salt) if before is None else before.key.digest
    data = memoryview(int32_tokens(array[first : first + chunk_tokens] if array.ndim == 1 else array).data).cast("B")
    namespace = f"{fingerprint}/{salt_tag(salt)}"
    state, hashed = hashlib.sha256(_PIECE_DOMAIN + digest), 0
    found = []
    bits = [1 << bit for bit in range(most.bit_length())]
    for count in [most & -bit for bit in reversed(bits) if most & bit] if own else range(1, most + 1):
        start, end = first + (count & (count - 1)) * unit, first + count * unit
        state.update(data[4 * hashed : 4 * (end - first)])
        hashed = end - first
        piece = state.copy()
        piece.update(start.to_bytes(8, "little"))
        key = _new_key((namespace, depth + count.bit_count() - 1, piece.digest()))
        found.append(_new_segment((start, end, key)))
    return found


class _Span(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


P = TypeVar("P", bound=_Span)


def leading(pieces: Iterable[P], start: int) -> list[P]:
    """The pieces that follow one another from the token `start` on, the longest first. pieces: in order of ends."""
    longest = {piece.start: piece for piece in pieces}
    found = []
    while (piece := longest.get(start)) is not None:
        found.append(piece)
        start = piece.end
    return found


def passage(
    tokens: torch.Tensor, *, chunk_tokens: int, fingerprint: str, salt: str = "", lead: Sequence[int] = (),
    context: str = "",
) -> list[Segment]:  # fmt: skip
    """Segments of a passage: KV that is identified by its own tokens, at any position.

    Their keys have another domain than `chain`'s, so that a prompt's lookup never returns them. A key covers the
    `lead`, the tokens that stood before the passage when its KV was computed, the `context`, a word for anything else
    that its KV depends on, and the passage's tokens up to the segment's end. A short tail is a segment too. Starts are
    counted from the passage's first token. Raises as `chain` does.
    """
    import numpy as np

    data = memoryview(int32_tokens(tokens).data).cast("B")
    before = np.asarray(lead, dtype="<i4").tobytes()
    root = "\0".join((f"{DOMAIN}/passage", fingerprint, str(chunk_tokens), str(len(before) // 4), salt, context))
    digest = hashlib.sha256(root.encode(errors="surrogatepass") + b"\0" + before).digest()
    namespace = f"{fingerprint}/{salt_tag(salt)}"
    segments = []
    for depth, start in enumerate(range(0, len(data) // 4, chunk_tokens)):
        end = min(start + chunk_tokens, len(data) // 4)
        digest = hashlib.sha256(digest + data[4 * start : 4 * end]).digest()
        segments.append(Segment(start, end, ChunkKey(namespace, depth, digest)))
    return segments


def select(segments: Sequence[Segment], mask: torch.Tensor | None, num_tokens: int) -> int:
    """The index of the first segment that `mask` selects.

    mask: bool `[num_tokens]`, or None, which selects everything. Raises TypeError unless the mask is a bool tensor,
    ValueError unless it has `num_tokens` entries, its Falses are a prefix, and they end where a segment ends.
    """
    if mask is None:
        return 0
    if str(getattr(mask, "dtype", "")) != "torch.bool":
        raise TypeError(f"mask: expected a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if tuple(mask.shape) != (num_tokens,):
        raise ValueError(f"mask: expected shape ({num_tokens},) like the tokens, got {tuple(mask.shape)}")
    selected = int(mask.count_nonzero())
    skipped = num_tokens - selected
    if selected and not bool(mask[skipped:].all()):
        raise ValueError("mask: its Falses must all come before its Trues, like FFFFTTTT")
    for index, segment in enumerate(segments):
        if segment.start >= skipped:
            if segment.start == skipped:
                return index
            break
    covered = segments[-1].end if segments else 0
    if skipped in (covered, num_tokens):
        return len(segments)
    raise ValueError(f"mask: its {skipped} Falses are not a whole number of chunks, and no hit")
