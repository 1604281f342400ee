"""The plugin that brings simulated components into an engine: backends, a connector and a lossy serializer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from kvloom import (
    Buffer,
    Buffers,
    Chunk,
    Config,
    CorruptBlobError,
    Entry,
    GPUConnector,
    MappedBlob,
    MemoryFormat,
    ReadDone,
    Segment,
    Serializer,
    Sink,
    StorageBackend,
    WriteDone,
    hookimpl,
)
from kvloom.builtin.plain import PlainConnector
from simulation.connection import Client


class Host:
    """The part of the current world that backends and connectors see."""

    connect: Callable[[str], Client]
    """Returns a backend's store."""
    pause: Callable[[], None]
    """Lets somebody else run in the middle of a copy."""


host = Host()


class SimBackend(StorageBackend):
    """A connection to one of the world's stores."""

    type = "sim"
    persistent = True

    class Config(Config):
        store: str
        threads: int = 4

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config)
        self.threads = config.threads  # type: ignore[misc]
        self.client = host.connect(config.store)

    def put(self, key: str, blob: Buffers) -> None:
        self.client.put(key, blob)

    def get(self, key: str) -> Buffer | None:
        return self.client.get(key)

    def get_into(self, key: str, sink: Sink) -> bool:
        return self.client.get_into(key, sink)

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        return self.client.get_range(key, offset, into)

    def contains(self, key: str) -> bool:
        return self.client.contains_many([key])[0]

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return self.client.contains_many(list(keys))

    def delete(self, key: str) -> None:
        self.client.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        self.client.delete_many(list(keys))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return self.client.scan(prefix)

    def touch_many(self, keys: Sequence[str]) -> None:
        self.client.touch_many(keys)

    def hold(self, name: str) -> bool:
        return self.client.hold(name)

    def close(self) -> None:
        self.client.close()


class SimShared(SimBackend):
    """Reads and writes many blobs at once."""

    type = "sim_shared"
    shared = True

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        self.client.put_many(requests, done)

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        self.client.get_many_into(requests, done)


class SimMapped(SimShared):
    """In the memory of the machine."""

    type = "sim_mapped"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return self.client.map(key, most_bytes)


class SimVolatile(SimBackend):
    """Empty each time that it is opened."""

    type = "sim_volatile"
    persistent = False

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config, spec)
        self.client.store.blobs.clear()


class SimBounded(SimShared):
    """Evicts by itself."""

    type = "sim_bounded"
    bounded = True


class SimConnector(PlainConnector):
    """The plain one, interrupted in the middle of its copies."""

    type = "sim_plain"
    representation: ClassVar[Mapping[str, Any]] = {}

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            host.pause()
            super().read([segment], [chunk], **where)
            host.pause()

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            host.pause()
            _check_length(segment, chunk)
            super().write([segment], [chunk], **where)
            host.pause()

    def read_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            host.pause()
            super().read_layer(layer, [segment], [chunk], **where)
            host.pause()

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            host.pause()
            _check_length(segment, chunk)
            super().write_layer(layer, [segment], [chunk], **where)
            host.pause()


def _check_length(segment: Segment, chunk: Chunk) -> None:
    # torch would raise in C++, and unwinding a greenlet's stack there ends the process now and then.
    if chunk.tensor.shape[2] != segment.end - segment.start:
        raise RuntimeError(f"{chunk.tensor.shape[2]} tokens of KV for a segment of {segment.end - segment.start}")


class LossySerializer(Serializer):
    """Adds one to every byte: a chunk that goes through it twice is known by that."""

    type = "sim_lossy"
    lossless = False
    formats = frozenset({MemoryFormat.KV_BLOB})

    def encode(self, chunk: Chunk) -> Buffers:
        data = chunk.tensor.contiguous().view(torch.uint8).flatten() + 1
        return [data.numpy().tobytes()]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        data = b"".join(blob)
        if len(data) != into.nbytes:
            raise CorruptBlobError("the blob is not as long as its chunk")
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(into.tensor.dtype)
        into.tensor.copy_(flat.view(into.tensor.shape))


@hookimpl
def kvloom_storage_backends() -> list[type[StorageBackend]]:
    return [SimBackend, SimShared, SimMapped, SimVolatile, SimBounded]


@hookimpl
def kvloom_gpu_connectors() -> list[type[GPUConnector]]:
    return [SimConnector]


@hookimpl
def kvloom_serializers() -> list[type[Serializer]]:
    return [LossySerializer]
