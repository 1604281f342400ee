"""Other codecs of KV, each as a codec of `kvloom_serde_cachegen.measuring`: the decoded values, and every byte."""

from __future__ import annotations

import numpy as np
import torch

from kvloom_serde_cachegen import measuring

Codec = measuring.Codec

FP8_MAX = 448.0
LMCACHE_SYMBOLS = 32
"""Number of symbols in the tables of all layers, also of those with fewer levels."""


def raw(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    return kv.clone(), kv.numel() * kv.element_size()


def zstd(level: int, *, planes: bool) -> Codec:
    """planes: upper and lower bytes apart."""
    import zstandard

    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        data = kv.contiguous().view(torch.uint8).numpy()
        if planes:
            data = np.ascontiguousarray(data.reshape(-1, kv.element_size()).T)
        return kv.clone(), len(zstandard.ZstdCompressor(level=level).compress(data.tobytes()))

    return codec


def to_fp8(kv: torch.Tensor) -> torch.Tensor:
    return kv.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """A cast with scale 1, as servers do with `kv_cache_dtype: fp8`."""
    return to_fp8(kv).to(kv.dtype), kv.numel()


def fp8_then(codec: Codec) -> Codec:
    """A cast, and the codec for what comes out of it."""

    def both(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        back, size = codec(to_fp8(kv), start)
        return back.to(kv.dtype), size

    return both


def int8(head_size: int) -> Codec:
    """Each head of a token with a scale of its own, 16 bits."""

    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        heads = kv.float().unflatten(-1, (-1, head_size))
        scale = (heads.abs().amax(-1, keepdim=True) / 127).half().float().clamp(min=1e-7)
        back = (heads / scale).round().clamp(-127, 127) * scale
        return back.flatten(-2).to(kv.dtype), kv.numel() + 2 * scale.numel()

    return codec


def int4(head_size: int) -> Codec:
    """Each head of a token with a scale and a least value of its own, 16 bits each."""

    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        back, size = _asymmetric(kv.float().unflatten(-1, (-1, head_size)), -1, 4)
        return back.flatten(-2).to(kv.dtype), size

    return codec


def kivi(bits: int, group: int = 32) -> Codec:
    """K in groups of a channel's tokens, V in groups of a token's channels. Of KIVI's recent tokens, which stay as they
    are, only K of those that fill no group."""

    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        whole = kv.shape[2] // group * group
        rest = kv[0, :, whole:]
        k, k_size = _asymmetric(kv[0, :, :whole].float().unflatten(1, (-1, group)), 2, bits)
        v, v_size = _asymmetric(kv[1].float().unflatten(2, (-1, group)), -1, bits)
        keys = torch.cat([k.flatten(1, 2).to(kv.dtype), rest], dim=1)
        return torch.stack([keys, v.flatten(2).to(kv.dtype)]), k_size + v_size + rest.numel() * kv.element_size()

    return codec


def _asymmetric(values: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, int]:
    least, most = values.amin(dim, keepdim=True).half().float(), values.amax(dim, keepdim=True)
    scale = ((most - least) / (2**bits - 1)).half().float().clamp(min=1e-7)
    levels = ((values - least) / scale).round().clamp(0, 2**bits - 1)
    return levels * scale + least, values.numel() * bits // 8 + 4 * scale.numel()


def lmcache_cachegen(bins: list[tuple[int, int]]) -> Codec:
    """LMCache's CacheGen: its levels, and the size of its container without the pickle around: the arithmetic coder's
    bytes, a table of 33 16-bit entries and a length of 32 bits for each channel, a scale for each token.

    bins: of K and V in each layer.
    """
    halves = torch.tensor(bins, dtype=torch.float32).T[:, :, None, None] // 2 - 1

    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        scales = kv.abs().amax(-1, keepdim=True)
        levels = (kv.float() * (halves / scales.float()) + halves).round()
        back = (levels - halves) / halves * scales.float()
        streams = levels.to(torch.uint8).transpose(2, 3).flatten(0, 2).numpy()
        size = arithmetic_coded_bytes(streams).sum()
        tables_and_lengths = len(streams) * (2 * (LMCACHE_SYMBOLS + 1) + 4)
        return back.to(kv.dtype), int(size) + tables_and_lengths + 2 * scales.numel()

    return codec


def lmcache_tables(streams: np.ndarray) -> np.ndarray:
    """Cumulative frequencies `[streams, symbols + 1]` of symbols `[streams, tokens]`, out of 2^16: those of the stream
    itself, and 1 for what does not occur."""
    tokens = streams.shape[1]
    counts = np.stack([(streams == symbol).sum(1) for symbol in range(LMCACHE_SYMBOLS)], axis=1)
    cumulative = np.concatenate([np.zeros((len(streams), 1), dtype=np.int64), counts.cumsum(1)], axis=1)
    return (0xFFFF - LMCACHE_SYMBOLS) * cumulative // tokens + np.arange(LMCACHE_SYMBOLS + 1)


def arithmetic_coded_bytes(streams: np.ndarray) -> np.ndarray:
    """Size of each of `[streams, tokens]` after a coder with bounds of 32 bits that writes single bits, in bytes."""
    tables = lmcache_tables(streams).astype(np.uint64)
    every = np.arange(len(streams))
    one, middle, most = np.uint64(1), np.uint64(1 << 31), np.uint64((1 << 32) - 1)
    low, high = np.zeros(len(streams), np.uint64), np.full(len(streams), most)
    bits = np.full(len(streams), 2, np.uint64)  # that end a stream
    for symbol in streams.T:
        span = high - low + one
        high = low + (span * tables[every, symbol + 1] >> np.uint64(16)) - one
        low = low + (span * tables[every, symbol] >> np.uint64(16))
        settled = _leading_zeros(low ^ high)
        low, high = low << settled & most, ((high + one << settled) - one) & most
        # Bounds about the middle, 01.. and 10..: their second bits leave, and follow the first when it is settled.
        straddling = _leading_zeros(~(low & ~high) & middle - one) - one
        low, high = low << straddling & middle - one, ((high + one << straddling) - one) & most | middle
        bits += settled + straddling
    return (bits.astype(np.int64) + 7) // 8


def _leading_zeros(values: np.ndarray) -> np.ndarray:
    """Number of leading zeros in 32 bits."""
    return (32 - np.frexp(values)[1]).astype(np.uint64)
