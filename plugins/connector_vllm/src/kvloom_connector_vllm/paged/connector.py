"""`type: paged`: an engine's paged KV as KV_BLOB chunks, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvloom import Chunk, Fence, GPUConnector, KVSpec, MemoryFormat, Segment

from .. import native
from .move import Move, by_torch, tensor_of
from .settings import PagedConfig
from .slots import Slots, slots_of
from .table import PageTable, PageTables


class PagedConnector(GPUConnector):
    """Reads and writes the pages of vLLM's GPU backends without quantization, and of engines like it. It does not
    support vLLM's attention for processors, whose page order does not show in their shape.

    `where`:

    - `kvcaches`: for each layer a pair (K, V) or one tensor; or one tensor for all layers. See `PagedLayout.of`.
    - `slot_mapping`: `[tokens]` int32 or int64, the slot of each token of the sequence from its beginning. A token
      with a negative slot is skipped when writing, and cannot be read; use it for tokens that the engine has
      cached.
    - or `block_table`: `[blocks]`, the blocks of the sequence in order. `block_size`: the tokens of an entry, if
      that is a multiple of the block size of `kvcaches`.

    Keep page tables in host memory: each call waits for a table on a device. If two tokens have one slot, either may be
    in it after writing.
    """

    type = "paged"
    format = MemoryFormat.KV_BLOB
    takes = frozenset({"kvcaches", "slot_mapping", "block_table", "block_size"})
    """The names of its arguments."""

    Config = PagedConfig
    config: PagedConfig

    def __init__(self, config: PagedConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        assert spec is not None
        self._tables = PageTables(spec, config.layout)

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        """Raise ValueError, by name, unless there are pages of this model, with places for `num_tokens` tokens."""
        self._slots(where, num_tokens, self._pages(where))

    @torch.inference_mode()
    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Fence | None:
        """Copy from the pages. ValueError if a token of a segment has no slot."""
        return self._move(segments, chunks, where, to_pages=False)

    @torch.inference_mode()
    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Fence | None:
        """Copy into the pages, but for tokens that have no slot."""
        return self._move(segments, chunks, where, to_pages=True)

    @torch.inference_mode()
    def read_layer(
        self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any
    ) -> Fence | None:
        """Copy one layer from its pages. Only this layer's tensors are needed in `kvcaches`; the others may be None."""
        return self._move(segments, chunks, where, to_pages=False, layer=layer)

    @torch.inference_mode()
    def write_layer(
        self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any
    ) -> Fence | None:
        """Copy one layer into its pages."""
        return self._move(segments, chunks, where, to_pages=True, layer=layer)

    def _pages(self, where: Mapping[str, Any], layer: int | None = None) -> PageTable:
        """The pages. ValueError for invalid arguments, and for KV of another model."""
        unknown = sorted(set(where) - self.takes)
        if unknown:
            raise ValueError(f"{unknown[0]}: the {self.type} connector takes {', '.join(sorted(self.takes))}")
        return self._tables.get(where.get("kvcaches"), layer)

    def _slots(self, where: Mapping[str, Any], num_tokens: int, pages: PageTable) -> Slots:
        return slots_of(where, num_tokens, pages)

    def _move(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], where: Mapping[str, Any], *, to_pages: bool,
        layer: int | None = None,
    ) -> Fence | None:  # fmt: skip
        assert self.spec is not None
        if not segments:
            return None
        pages = self._pages(where, layer)
        slots = self._slots(where, segments[-1].end, pages)
        for segment in segments if not to_pages else ():
            if (slots[segment.start : segment.end] < 0).any():
                raise ValueError(
                    f"slot_mapping: a token of {segment.start} to {segment.end} has no slot to be read from"
                )
        num_layers = self.spec.num_layers if layer is None else 1
        tensors = [tensor_of(*pair, self.spec, num_layers) for pair in zip(segments, chunks, strict=True)]
        own = np.concatenate([slots[segment.start : segment.end] for segment in segments])
        return self._copy(Move(pages, own, tensors, to_pages), where, layer)

    def _copy(self, move: Move, where: Mapping[str, Any], layer: int | None) -> Fence | None:
        library = native.processor()
        in_host_memory = all(each.device.type == "cpu" for each in (move.pages, *move.chunks))
        if library is not None and in_host_memory:
            native.on_processor(native.Tables.of(move), library)
        else:
            by_torch(move, self._tables.layout(where["kvcaches"], layer))
        return None
