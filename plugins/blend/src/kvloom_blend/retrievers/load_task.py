"""Buffers for retrieved KV, as long as the prompt, and a task that hands out their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import torch

from kvloom import (
    BackendError,
    BlendEngine,
    BlendRetrieverResult,
    BlendRetrieverTask,
    Chunk,
    Config,
    GPUConnector,
    MemoryFormat,
    Segment,
)

_MOST_LOST = 8
"""Number of found segments that could not be read, after which the rest is computed."""


class LoadedBuffers(GPUConnector):
    """Takes chunks of an engine to `[planes, layers, tokens, hidden]`, wherever in the prompt they stand now."""

    type = "blend buffers"
    format = MemoryFormat.KV_BLOB

    def __init__(self, engine: BlendEngine, num_tokens: int, device: torch.device) -> None:
        super().__init__(Config(), engine.spec)
        shape = engine.spec.blob_shape(num_tokens)
        self.buffers = torch.empty(shape, dtype=engine.spec.torch_dtype, device=device)
        self.original_positions = torch.zeros(num_tokens, dtype=torch.long)
        self.unplaced: list[Segment] = []
        """Segments whose KV came without saying where it had stood: K cannot be turned."""

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        assert num_tokens <= self.buffers.shape[2]

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        raise NotImplementedError("KV that was retrieved for blending is not stored again")

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        with torch.inference_mode():
            for segment, chunk in zip(segments, chunks, strict=True):
                self.buffers[:, :, segment.start : segment.end].copy_(chunk.tensor)
                self._place(segment, chunk)

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        with torch.inference_mode():
            for segment, chunk in zip(segments, chunks, strict=True):
                self.buffers[:, layer, segment.start : segment.end].copy_(chunk.tensor[:, 0])
                if layer == 0:
                    self._place(segment, chunk)

    def _place(self, segment: Segment, chunk: Chunk) -> None:
        if chunk.start is None:
            self.unplaced.append(segment)
        else:
            stood = torch.arange(chunk.start, chunk.start + segment.end - segment.start)
            self.original_positions[segment.start : segment.end] = stood


class LoadTask(BlendRetrieverTask):
    """KV of segments on its way, layer by layer, into buffers of its own."""

    def __init__(
        self, engine: BlendEngine, segments: Sequence[Segment], num_tokens: int, *, device: torch.device,
        exact: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """segments: in order, all of them found just now. exact: bool, of the batch: whose KV is that of a prefix."""
        self._engine = engine
        self._segments = segments
        self._num_tokens = num_tokens
        self._device = device
        self._exact = torch.zeros(num_tokens, dtype=torch.bool) if exact is None else exact
        self._valid: torch.Tensor | None = None
        self._settling = Lock()
        self._loaded = LoadedBuffers(engine, num_tokens, device)
        self._loadings = [engine.load_layers(segments, into=self._loaded)] if segments else []

    @property
    def exact_mask(self) -> torch.Tensor:
        """Bool, on CPU: whose KV is an exact prefix of its request."""
        return self._exact & self._mask()

    @property
    def buffers(self) -> torch.Tensor:
        """The buffers that `result` gives views of: `[planes, layers, tokens, hidden]`. They belong to this request."""
        return self._loaded.buffers

    def result(self, layer_id: int) -> BlendRetrieverResult:
        mask = self._mask()
        positions = self._loaded.original_positions.to(self._device, copy=True)
        if not mask.any():
            return BlendRetrieverResult(None, None, mask.clone(), positions)
        if bool((mask & ~self._wait(layer_id)).any()):
            raise BackendError(f"KV that was found is lost in layer {layer_id}")
        buffers = self._loaded.buffers
        return BlendRetrieverResult(buffers[0, layer_id], buffers[-1, layer_id], mask.clone(), positions)

    def close(self) -> None:
        """Stop reads under way. Idempotent."""
        for loading in self._loadings:
            loading.close()

    def _mask(self) -> torch.Tensor:
        """The tokens whose first layer arrived. KV that is lost before anything was computed was never valid."""
        with self._settling:
            if self._valid is None:
                self._go_on_behind_what_is_lost()
                valid = self._wait(0)
                for segment in self._loaded.unplaced:
                    valid[segment.start : segment.end] = False
                self._loaded.original_positions[~valid] = 0
                self._valid = valid
            return self._valid

    def _go_on_behind_what_is_lost(self) -> None:
        """A load ends at the first segment that is lost; what comes after it may be there all the same."""
        rest = self._segments
        for _ in range(_MOST_LOST):
            there = self._wait(0)
            lost = next((place for place, one in enumerate(rest) if not there[one.start]), len(rest))
            rest = rest[lost + 1 :]
            if not rest:
                break
            self._loadings.append(self._engine.load_layers(rest, into=self._loaded))

    def _wait(self, layer: int) -> torch.Tensor:
        there = torch.zeros(self._num_tokens, dtype=torch.bool)
        for loading in self._loadings:
            came = loading.wait(layer)
            there[: len(came)] |= came
        return there
