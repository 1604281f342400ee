"""The speed of a tier for chunks of one model: measured through the real backend, serializer and checksums."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvloom import Chunk, envelope
from kvloom.inspection import Store, at_once
from kvloom_tools.stores import PROBES, remove_left
from kvloom_tools.verify import VerifyingSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom import KVSpec, MemoryFormat, Serializer

_BYTES = 128 << 20
"""Bytes to write to a store, about; at least _FEWEST chunks and at most _MOST."""
_FEWEST, _MOST = 4, 32
_SECONDS = 5.0
"""The longest that one measurement goes on, except for the call under way."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one tier, for blobs of one size."""

    blob_bytes: int
    """Size of one chunk, as it is stored."""
    write_bytes_per_second: float
    read_bytes_per_second: float
    latency_seconds: float
    """Seconds from asking for one chunk to having it, with nothing else under way."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The shape and format of a chunk."""

    shape: tuple[int, ...]
    spec: KVSpec
    format: MemoryFormat
    num_tokens: int

    def chunk(self) -> Chunk:
        """A chunk of noise: it does not compress better than KV does."""
        dtype = self.spec.torch_dtype
        noise = torch.randn(self.shape) if dtype.is_floating_point else torch.randint(-99, 99, self.shape)
        return Chunk(noise.to(dtype), self.format, self.num_tokens)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.spec.torch_dtype.itemsize


def measure_memory(sample: Sample) -> Speed:
    """By copying chunks from one place to another, which is what the memory tier does."""
    count = max(2, min(_MOST, _BYTES // sample.nbytes))
    chunks = [sample.chunk().tensor.contiguous() for _ in range(2)]
    places = [torch.zeros_like(chunks[0]) for _ in range(count)]
    seconds: list[float] = []
    for _ in range(3):  # the first time, memory is still to come
        seconds = []
        for place in places:
            began = time.monotonic()
            place.copy_(chunks[len(seconds) % 2])
            seconds.append(max(time.monotonic() - began, 1e-9))
    usual = _median(seconds)  # not the mean: one copy in a few waits for a processor
    return Speed(sample.nbytes, sample.nbytes / usual, sample.nbytes / usual, usual)


def measure_store(store: Store, serializer: Serializer, sample: Sample) -> Speed:
    """By writing and reading chunks under `plan/`, which are gone afterwards. Raises what the backend raises."""
    remove_left(store, PROBES)
    chunk = sample.chunk()
    probe = _Probe(store, serializer, chunk)
    prefix = f"{PROBES}{os.urandom(8).hex()}/"
    blob_bytes = sum(memoryview(part).nbytes for part in probe.sealed(prefix))
    most = _MOST if store.choice.capacity is None else max(1, store.choice.capacity // (4 * blob_bytes))
    count = min(most, max(_FEWEST, min(_MOST, _BYTES // blob_bytes)))
    keys = [f"{prefix}{index}" for index in range(count)]
    backend = store.backend
    try:
        written, write_seconds = probe.timed(keys, probe.write, threads=min(2, backend.threads))
        alone = [probe.timed([key], probe.read, threads=1)[1] for key in written[:8]]
        read_seconds, read_bytes = 0.0, 0
        while read_seconds < 0.3 and read_bytes < 4 * count * blob_bytes:
            done, seconds = probe.timed(written, probe.read, threads=backend.threads)
            read_seconds, read_bytes = read_seconds + seconds, read_bytes + len(done) * blob_bytes
    finally:
        store.ask(lambda: backend.delete_many(keys))
    written_bytes = len(written) * blob_bytes
    return Speed(blob_bytes, written_bytes / write_seconds, read_bytes / read_seconds, _median(alone))


@dataclass(frozen=True, slots=True)
class _Probe:
    """A chunk on its way into a store and back, as the engine would move it."""

    store: Store
    serializer: Serializer
    chunk: Chunk
    buffers: list[mmap.mmap] = field(default_factory=list)
    """Memory to read into, used before: an engine's pool is touched once, too."""

    def sealed(self, key: str) -> Sequence[Any]:
        chunk, serializer = self.chunk, self.serializer
        dtype = str(chunk.tensor.dtype).removeprefix("torch.")
        about = envelope.Description(
            key, serializer.type, tuple(chunk.tensor.shape), dtype, chunk.format.value, chunk.num_tokens,
            serializer.fidelity, serializer.params,
        )  # fmt: skip
        return envelope.seal(about, serializer.encode(chunk), self.store.choice.protection)

    def write(self, key: str) -> None:
        self.store.backend.put(key, self.sealed(key))

    def read(self, key: str) -> None:
        try:
            buffer = self.buffers.pop()
        except IndexError:  # all are in use
            buffer = mmap.mmap(-1, mmap.PAGESIZE)
        sink = VerifyingSink(key, buffer, self.store.choice.protection)
        try:
            if not self.store.backend.get_into(key, sink):
                raise LookupError(f"what was written is not there: {key}")
            self._decode(sink.finish(), sink)
        finally:
            self.buffers.append(sink.buffer)

    def _decode(self, header: envelope.Header, sink: VerifyingSink) -> None:
        payload, like = sink.payload(header), self.chunk.tensor
        meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
        about = (self.chunk.format, self.chunk.num_tokens, header.description.fidelity)
        if self.serializer.view(payload, Chunk(meta, *about)) is None:
            self.serializer.decode(envelope.split(header, payload), Chunk(torch.empty_like(like), *about))

    def timed(self, keys: Iterable[str], move: Any, *, threads: int) -> tuple[list[str], float]:
        """Move blobs, several at a time, until all are or time is up: which were, and how long it took in seconds."""
        began = time.monotonic()

        def in_time() -> Iterable[tuple[str, Any]]:
            for key in keys:
                if time.monotonic() - began > _SECONDS:
                    return
                yield key, partial(move, key)

        done = []
        for key, outcome in at_once(in_time(), seconds=self.store.choice.deadline, threads=threads):
            if isinstance(outcome, Exception):
                raise outcome
            done.append(key)
        return done, max(time.monotonic() - began, 1e-9)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
