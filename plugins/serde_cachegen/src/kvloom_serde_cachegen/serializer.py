"""The serializer `cachegen`: one stream for each layer, so that layers are checked and decoded as they arrive."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kvloom import EXACT, Buffers, Chunk, CorruptBlobError, KVSpec, MemoryFormat, Place, Serializer
from kvloom.device import device_of
from kvloom_serde_cachegen import device, first_token, gate, sinks, streams
from kvloom_serde_cachegen.bins import CacheGenConfig
from kvloom_serde_cachegen.native_profile import NativeProfile, known
from kvloom_serde_cachegen.settings import CodecConfig
from kvloom_serde_cachegen.streams import Mode, Settings

_SPARES_FIRST = (Mode.STEP, Mode.KLT)
_BAND = 128
"""Channels of a tile: each tile costs 128 bytes for the states of its lanes."""
_KLT_BAND = 256
_ROPE_CHANNELS = 64
"""Number of last channels of a latent cache that are keys with their position; the others behave as V does."""
_STREAM_ELEMENTS = 1 << 20
"""Maximum number of elements in a stream of opaque pages, if they can be cut evenly."""


class CacheGenSerializer(Serializer):
    """Compresses KV: quantised and entropy-coded to a few bits per value, or without loss."""

    type: ClassVar[str] = "cachegen"
    by_layer: ClassVar[bool] = True

    Config = CodecConfig

    def __init__(self, config: CodecConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._config = config
        self._mode = Mode[config.mode.upper()]
        # On the instance: they follow from the settings.
        self.lossless = self._mode is Mode.LOSSLESS  # type: ignore[misc]
        if not self.lossless:
            # The elements of opaque pages are unknown, so they cannot be quantised.
            self.formats = frozenset({MemoryFormat.KV_BLOB})  # type: ignore[misc]
            if spec is not None and spec.torch_dtype not in streams.DTYPES:
                raise ValueError(f"mode: {config.mode} does not take KV of {spec.dtype}; mode: lossless does")
        self._profile = None if config.profile is None else gate.profile_for(config.profile, spec)
        if config.gated and spec is not None:
            gate.check(self._profile, spec, f"{config.mode}/{config.step:g}")
        self._native = NativeProfile(self._profile) if self._mode is Mode.KLT and self._profile is not None else None

    @property
    def fidelity(self) -> str:
        if self.lossless:
            return EXACT
        if self._mode is Mode.CACHEGEN:
            return f"{self.type}/bins"
        return f"{self.type}/{'klt/' if self._mode is Mode.KLT else ''}{self._config.step:g}"

    def encode(self, chunk: Chunk) -> Buffers:
        return self.encode_many([chunk])[0]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        self.decode_many([blob], [into])

    def encode_many(self, chunks: Sequence[Chunk], place: Place | None = None) -> list[Buffers]:
        kvs = [_layers_of(chunk) for chunk in chunks]
        spared = [self._mode in _SPARES_FIRST and chunk.start == 0 and chunk.num_tokens > 1 for chunk in chunks]
        rest = [first_token.behind(kv) if spares else kv for kv, spares in zip(kvs, spared, strict=True)]
        starts = [1 if spares else chunk.start for chunk, spares in zip(chunks, spared, strict=True)]
        blobs = self._encode(rest, starts, place)
        return [
            self._with_exact(blob, kv, [first_token.kept(whole)] if spares else [])
            for blob, kv, whole, spares in zip(blobs, rest, kvs, spared, strict=True)
        ]

    def _with_exact(self, blob: Buffers, kv: torch.Tensor, first: Buffers) -> Buffers:
        """Streams of `kv`, and the tokens that stay as they are."""
        if self._mode is not Mode.KLT or (of_sinks := sinks.kept(kv.cpu())) is None:
            return [*blob, *first]
        return [*blob, *(first or [b""]), of_sinks]

    def _encode(
        self, kvs: Sequence[torch.Tensor], starts: Sequence[int | None], place: Place | None
    ) -> Sequence[Buffers]:
        if all(_kernels(kv) is not None for kv in kvs) and self._mode in device.ENCODES:
            return device.in_groups(kvs, lambda group: self._encode_on_device([kvs[each] for each in group], place))
        threads = self._config.threads
        return [
            streams.encode(kv.cpu(), self._settings(kv), start=start, threads=threads)
            for kv, start in zip(kvs, starts, strict=True)
        ]

    def decode_many(self, blobs: Sequence[Buffers], into: Sequence[Chunk], place: Place | None = None) -> None:
        whole = [_layers_of(chunk) for chunk in into]
        apart = [sinks.apart(blob, kv.shape[1]) for blob, kv in zip(blobs, whole, strict=True)]
        with device.at(place):
            parts = [first_token.restored(blob, kv) for (blob, _), kv in zip(apart, whole, strict=True)]
        kvs = [kv for _, kv in parts]
        device.in_groups(
            kvs, lambda group: self._decode([parts[each][0] for each in group], [kvs[each] for each in group], 0, place)
        )
        with device.at(place):
            for (_, of_sinks), kv in zip(apart, kvs, strict=True):
                if of_sinks is not None:
                    sinks.restore(of_sinks, kv)

    def decodes_on(self, where: torch.device) -> bool:
        return device_of(where) is not None and device.library() is not None

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        num_layers = like.tensor.shape[1] if like.format is MemoryFormat.KV_BLOB else 0
        if not num_layers or not num_layers <= len(lengths) <= num_layers + 2:
            return None
        shared = range(num_layers, len(lengths))
        return [(layer, *shared) for layer in range(num_layers)]

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        blob, of_sinks = sinks.apart(blob, into.tensor.shape[1])
        streams_of, kv = first_token.restored(blob, into.tensor, layers.start)
        self._decode([streams_of], [kv], layers.start, None)
        if of_sinks is not None:
            sinks.restore(of_sinks, kv, layers.start)

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        kv = _layers_of(chunk)
        first = kv[:, :, 0].numel() * kv.element_size()
        of_sinks = sinks.most_bytes(kv) if self._mode is Mode.KLT else 0
        return first + of_sinks + streams.bound(kv.shape, kv.dtype, self._settings(kv))

    def _encode_on_device(self, kvs: Sequence[torch.Tensor], place: Place | None) -> list[Buffers]:
        codec = _kernels(kvs[0])
        assert codec is not None
        with device.at(place):
            return [*device.encode(kvs, self._settings(kvs[0]), codec, workspace=place and place.workspace)]

    def _decode(
        self, blobs: Sequence[Buffers], kvs: Sequence[torch.Tensor], first_layer: int, place: Place | None
    ) -> None:
        # What was encoded in another mode is decoded too: a stream says how it is to be read.
        alike: dict[tuple[Mode, bytes], list[int]] = {}
        for number, blob in enumerate(blobs):
            mode = _mode_of(blob, kvs[0].dtype)
            alike.setdefault((mode, streams.profile_of(blob[0]) if mode is Mode.KLT else b""), []).append(number)
        codec = _kernels(kvs[0])
        for (mode, id), numbers in alike.items():
            profile = _profile(id, kvs[0], first_layer)
            group, into = [blobs[each] for each in numbers], [kvs[each] for each in numbers]
            how = {"first_layer": first_layer, "profile": profile}
            if codec is not None and mode in device.DECODES:
                with device.at(place):
                    device.decode(group, into, mode, codec, workspace=place and place.workspace, **how)
                continue
            for blob, kv in zip(group, into, strict=True):
                self._decode_on_host(blob, kv, mode, **how)

    def _decode_on_host(self, blob: Buffers, into: torch.Tensor, mode: Mode, **how: Any) -> None:
        kv = into if into.device.type == "cpu" else torch.empty(into.shape, dtype=into.dtype)
        streams.decode(blob, kv, mode, threads=self._config.threads, **how)
        if kv is not into:
            into.copy_(kv)

    def _settings(self, kv: torch.Tensor) -> Settings:
        planes, layers, _, hidden = kv.shape
        bins = CacheGenConfig.for_layers(layers).by_layer() if self._mode is Mode.CACHEGEN else ()
        if self._mode is Mode.KLT:
            if self._native is None or not self._native.covers(kv, 0):
                raise ValueError(f"KV of {tuple(kv.shape)} does not match the profile")
            return Settings(self._mode, min(_KLT_BAND, hidden), step=self._config.step, profile=self._native)
        latent = hidden - _ROPE_CHANNELS
        shared_from = latent if planes == 1 and latent > 0 and latent % _BAND == 0 else 0
        weights = None if self._profile is None else self._profile.steps
        if weights is not None and weights.shape[1:] != (layers, hidden):
            raise ValueError(
                f"a profile of {tuple(weights.shape[1:])} layers and channels for KV of {(layers, hidden)}"
            )
        return Settings(self._mode, min(_BAND, hidden), shared_from, self._config.step, weights, bins)


def _kernels(kv: torch.Tensor) -> ctypes.CDLL | None:
    """The library for the device memory that `kv` is in; None for host memory."""
    return None if device.of(kv) is None else device.library()


def _profile(id: bytes, kv: torch.Tensor, first_layer: int) -> NativeProfile | None:
    """The profile of this id, if this process has it open. Raises CorruptBlobError if it is of other KV."""
    profile = known(id)
    if profile is not None and not profile.covers(kv, first_layer):
        raise CorruptBlobError(f"streams by a profile of {profile.shape} for KV of {tuple(kv.shape)}")
    return profile


def _mode_of(blob: Buffers, dtype: torch.dtype) -> Mode:
    if not blob:
        raise CorruptBlobError("no streams")
    mode = streams.mode_of(blob[0])
    if mode is not Mode.LOSSLESS and dtype not in streams.DTYPES:
        raise CorruptBlobError(f"streams of mode {mode.name.lower()} for KV of {dtype}")
    return mode


def _layers_of(chunk: Chunk) -> torch.Tensor:
    """`[planes, layers, tokens, hidden]`, a stream for each layer; pages are cut evenly, if they can be."""
    if chunk.format is MemoryFormat.KV_BLOB:
        return chunk.tensor
    elements = chunk.tensor.numel()
    least = -(-elements // _STREAM_ELEMENTS)
    cuts = next((cuts for cuts in range(least, 8 * least + 1) if elements % cuts == 0), 1)
    return chunk.tensor.view(1, cuts, 1, elements // cuts)
