"""`timed: true` on a serializer: every encode and decode is logged with its size and speed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.contracts.serializer import Place, Serializer
from kvloom.runtime import Runtime
from kvloom.types import Buffers, Chunk

log = logging.getLogger(__name__)


class TimedSerializer(Serializer):
    """Another serializer, with its time taken. Blobs are the same, so they stay readable without it."""

    def __init__(self, inner: Serializer, runtime: Runtime) -> None:
        super().__init__(inner.config, inner.spec)
        self._inner = inner
        self._now = runtime.now
        self.type = inner.type  # type: ignore[misc]
        self.lossless = inner.lossless  # type: ignore[misc]
        self.formats = inner.formats  # type: ignore[misc]
        self.by_layer = inner.by_layer  # type: ignore[misc]

    @property
    def params(self) -> Mapping[str, Any]:
        return self._inner.params

    @property
    def fidelity(self) -> str:
        return self._inner.fidelity

    def encode(self, chunk: Chunk) -> Buffers:
        began = self._now()
        buffers = self._inner.encode(chunk)
        self._say("encode", chunk, buffers, began)
        return buffers

    def decode(self, blob: Buffers, into: Chunk) -> None:
        began = self._now()
        self._inner.decode(blob, into)
        self._say("decode", into, blob, began)

    def decodes_on(self, device: Any) -> bool:
        return self._inner.decodes_on(device)

    def decode_many(self, blobs: Sequence[Buffers], into: Sequence[Chunk], place: Place | None = None) -> None:
        began = self._now()
        self._inner.decode_many(blobs, into, place)
        for blob, chunk in zip(blobs, into, strict=True):
            self._say("decode", chunk, blob, began)

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        return self._inner.layer_buffers(lengths, like, params)

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        began = self._now()
        self._inner.decode_layers(blob, layers, into)
        self._say("decode", into, blob, began)

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        return self._inner.view(blob, like)

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return self._inner.max_encoded_bytes(chunk)

    def close(self) -> None:
        self._inner.close()

    def _say(self, verb: str, chunk: Chunk, blob: Buffers, began: float) -> None:
        seconds = self._now() - began
        nbytes = sum(memoryview(buffer).nbytes for buffer in blob)
        log.info(
            "serializer=%s verb=%s chunk_bytes=%d blob_bytes=%d seconds=%.6f gbytes_per_second=%.2f",
            self.type, verb, chunk.nbytes, nbytes, seconds, chunk.nbytes / max(seconds, 1e-9) / 1e9,
        )  # fmt: skip
