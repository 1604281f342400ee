"""`type: vllm` and `vllm_blob`: whole blocks of an engine's paged KV as chunks, byte for byte or as K and V."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvloom import Chunk, GPUConnector, MemoryFormat, Segment

from .. import native
from .settings import VLLMConfig


class VLLMConnector(GPUConnector):
    """Pages as opaque bytes (KV_PAGES), `[layers, blocks, page_elements]` for a chunk: only the engine can read them.

    `where`: `pages`, for each layer a view `[num_blocks, page_elements]` of the engine's memory, the elements of a page
    next to each other; `blocks`, ids in the order of the sequence, -1 for a block to skip (reading needs every block);
    `first_block`, the place in the sequence of the first one, in blocks. `ready`: optional, an event of the device
    (with `synchronize`) after which the pages are ready to be read.
    """

    type = "vllm"
    format = MemoryFormat.KV_PAGES
    Config = VLLMConfig
    _words = frozenset({"pages", "blocks", "first_block", "ready"})

    def __init__(self, config: VLLMConfig, spec: Any = None) -> None:
        super().__init__(config, spec)
        if config.geometry is None:
            raise ValueError(f"{self.type!r} is opened by vLLM: start it with --kv-transfer-config (docs/use/vllm.md)")
        self._geometry = config.geometry

    @property
    def representation(self) -> Mapping[str, Any]:
        return self._geometry.representation

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        return (self._geometry.layers, self._whole_blocks(num_tokens), self._geometry.page_elements)

    def _whole_blocks(self, num_tokens: int) -> int:
        blocks, rest = divmod(num_tokens, self._geometry.block_tokens)
        if rest:
            raise ValueError(
                f"num_tokens: {num_tokens} is not a whole number of blocks of {self._geometry.block_tokens}"
            )
        return blocks

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        """Raise ValueError, by name, unless `where` is this engine's memory and ids within it."""
        geometry = self._geometry
        unknown = set(where) - self._words
        if unknown or not {"pages", "blocks"} <= set(where):
            raise ValueError(
                f"{self.type} connector: expected pages=, blocks= and first_block=, got {sorted(where) or 'nothing'}"
            )
        pages, blocks, first = where["pages"], where["blocks"], where.get("first_block", 0)
        if not isinstance(pages, list | tuple) or not all(isinstance(view, torch.Tensor) for view in pages):
            raise ValueError("pages: expected a list of tensors, one for each layer")
        if not isinstance(blocks, list | tuple) or not all(isinstance(block, int) for block in (*blocks, first)):
            raise ValueError("blocks: expected a list of ids, and an index as first_block")
        if len(pages) != geometry.layers:
            raise ValueError(f"pages: {len(pages)} layers, the model has {geometry.layers}")
        for number, view in enumerate(pages):
            if view.dim() != 2 or view.shape[1] != geometry.page_elements or view.stride(1) != 1:
                raise ValueError(
                    f"pages: layer {number} is {list(view.shape)} with strides {view.stride()}, "
                    f"not [blocks, {geometry.page_elements}] with pages in one piece"
                )
            if self.spec is not None and view.dtype != self.spec.torch_dtype:
                raise ValueError(f"pages: layer {number} is {view.dtype}, not {self.spec.torch_dtype}")
        count = min(view.shape[0] for view in pages)
        wrong = next((block for block in blocks if not -1 <= block < count), None)
        if wrong is not None:
            raise ValueError(f"blocks: there is no block {wrong}; there are {count}")
        tokens = (first + len(blocks)) * geometry.block_tokens
        if num_tokens > tokens:
            raise ValueError(f"blocks: they end at token {tokens} of the sequence, not {num_tokens}")

    @torch.inference_mode()
    def read(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, pages: Sequence[torch.Tensor],
        blocks: Sequence[int], first_block: int = 0, ready: Any = None, **how: Any,
    ) -> None:  # fmt: skip
        """Copy pages into chunks; done on return. ValueError if a block of a segment is left out of `blocks`."""
        if ready is not None:
            ready.synchronize()
        library = native.processor()
        if library is not None and self._at_once(chunks, pages):
            self._copy(library, segments, chunks, pages, blocks, first_block, to_pages=False)
            return
        device = pages[0].device
        with _own_stream(device):
            for segment, chunk in zip(segments, chunks, strict=True):
                ids = torch.tensor(self._all_blocks(segment, blocks, first_block), device=device)
                for layer, view in enumerate(pages):
                    self._take(view, ids, chunk.tensor, layer, **how)

    @torch.inference_mode()
    def write(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, pages: Sequence[torch.Tensor],
        blocks: Sequence[int], first_block: int = 0, ready: Any = None, **how: Any,
    ) -> None:  # fmt: skip
        """Copy chunks into pages; done on return."""
        library = native.processor()
        if library is not None and self._at_once(chunks, pages):
            self._copy(library, segments, chunks, pages, blocks, first_block, to_pages=True)
            return
        device = pages[0].device
        with _own_stream(device):
            for segment, chunk in zip(segments, chunks, strict=True):
                wanted = self._blocks(segment, blocks, first_block)
                kept = [index for index, block in enumerate(wanted) if block >= 0]
                if not kept:
                    continue
                ids = torch.tensor([wanted[index] for index in kept], device=device)
                for layer, view in enumerate(pages):
                    rows = self._rows(chunk.tensor, layer, **how)
                    part = rows if len(kept) == len(wanted) else rows[kept]
                    view.index_copy_(0, ids, part.to(device, non_blocking=True))

    def _at_once(self, chunks: Sequence[Chunk], pages: Sequence[torch.Tensor]) -> bool:
        """Return whether native code can copy these: whole pages of one dtype, all in host memory."""
        elements, dtype = self._geometry.page_elements, pages[0].dtype
        tensors = [*pages, *(chunk.tensor for chunk in chunks)]
        return (
            all(tensor.device.type == "cpu" and tensor.dtype == dtype for tensor in tensors)
            and all(view.stride(1) == 1 and view.shape[1] == elements for view in pages)
            and all(chunk.tensor.stride()[1:] == (elements, 1) for chunk in chunks)
        )

    def _copy(
        self, library: ctypes.CDLL, segments: Sequence[Segment], chunks: Sequence[Chunk],
        pages: Sequence[torch.Tensor], blocks: Sequence[int], first_block: int, *, to_pages: bool,
    ) -> None:  # fmt: skip
        """Copy all blocks of all layers in one call of native code."""
        size = pages[0].element_size()
        width = self._geometry.page_elements * size
        ids, rows = [], []
        for segment, chunk in zip(segments, chunks, strict=True):
            wanted = (self._blocks if to_pages else self._all_blocks)(segment, blocks, first_block)
            row = np.zeros((len(wanted), 4), dtype=np.int64)
            row[:, 0] = chunk.tensor.data_ptr() + np.arange(len(wanted)) * width
            row[:, 2] = chunk.tensor.stride(0) * size
            if tuple(chunk.tensor.shape) != (len(pages), len(wanted), self._geometry.page_elements):
                raise ValueError(f"chunk: of tokens {segment.start} to {segment.end}, got {list(chunk.tensor.shape)}")
            ids.append(np.array(wanted, dtype=np.int64))
            rows.append(row)
        its, of = np.concatenate(ids), np.concatenate(rows)
        if to_pages:
            of, its = of[its >= 0], its[its >= 0]
        if not len(its):
            return
        if its.min() < 0 or its.max() >= min(view.shape[0] for view in pages):
            raise ValueError(f"blocks: there is no block {its.max()}")
        of[:, 3] = np.arange(len(its))
        layers = np.array([(view.data_ptr(), view.stride(0) * size, 0, 0) for view in pages], dtype=np.int64)
        native.copy_blocks(library, layers, of, its, width=width, to_pages=to_pages)

    def _take(self, view: torch.Tensor, ids: torch.Tensor, into: torch.Tensor, layer: int) -> None:
        """One layer's pages into a chunk."""
        if view.device == into.device:
            torch.index_select(view, 0, ids, out=into[layer])
        else:
            into[layer].copy_(view.index_select(0, ids), non_blocking=True)

    def _rows(self, chunk: torch.Tensor, layer: int) -> torch.Tensor:
        """One layer's pages of a chunk, `[blocks, page_elements]`."""
        return chunk[layer]

    def _blocks(self, segment: Segment, blocks: Sequence[int], first_block: int) -> list[int]:
        """The ids of a segment's blocks."""
        begin, end = segment.start // self._geometry.block_tokens, segment.end // self._geometry.block_tokens
        if begin < first_block:
            raise ValueError(f"blocks: they begin at block {first_block} of the sequence, not {begin}")
        return list(blocks[begin - first_block : end - first_block])

    def _all_blocks(self, segment: Segment, blocks: Sequence[int], first_block: int) -> list[int]:
        """The same, for a segment that is read. ValueError if a block is left out of `blocks`."""
        wanted = self._blocks(segment, blocks, first_block)
        if min(wanted) < 0:
            raise ValueError(f"blocks: some of tokens {segment.start} to {segment.end} are left out")
        return wanted


class VLLMBlobConnector(VLLMConnector):
    """K and V of whole blocks (KV_BLOB), for engines whose pages are known inside out: codecs can work on it.

    `where`, besides that of `vllm`: `order`, int64 `[page_elements]` on the pages' device: where in a page the element
    is that comes next in the order (plane, token, head, element of the head); each place once.
    """

    type = "vllm_blob"
    format = MemoryFormat.KV_BLOB
    _words = VLLMConnector._words | {"order"}

    def __init__(self, config: VLLMConfig, spec: Any = None) -> None:
        super().__init__(config, spec)
        self._known: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def _at_once(self, chunks: Sequence[Chunk], pages: Sequence[torch.Tensor]) -> bool:
        return False  # elements change their order

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        assert self.spec is not None
        self._whole_blocks(num_tokens)
        return self.spec.blob_shape(num_tokens)

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        super().check(where, num_tokens)
        order, elements = where.get("order"), self._geometry.page_elements
        if not isinstance(order, torch.Tensor) or order.dtype != torch.int64 or tuple(order.shape) != (elements,):
            raise ValueError(f"order: expected an int64 tensor [{elements}]")
        self._inverse(order)

    def _take(  # type: ignore[override]
        self, view: torch.Tensor, ids: torch.Tensor, into: torch.Tensor, layer: int, *, order: torch.Tensor
    ) -> None:
        planes, _, _, hidden = into.shape
        rows = view.index_select(0, ids).index_select(1, order)
        ordered = rows.view(len(ids), planes, self._geometry.block_tokens, hidden).transpose(0, 1)
        into[:, layer].view(ordered.shape).copy_(ordered, non_blocking=True)

    def _rows(self, chunk: torch.Tensor, layer: int, *, order: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        planes, _, tokens, hidden = chunk.shape
        step = self._geometry.block_tokens
        ordered = chunk[:, layer].view(planes, tokens // step, step, hidden).transpose(0, 1)
        return ordered.reshape(tokens // step, -1).index_select(1, self._inverse(order).to(chunk.device))

    def _inverse(self, order: torch.Tensor) -> torch.Tensor:
        """The place in the order of each element of a page. ValueError unless the order has each place once."""
        version = 0 if order.is_inference() else order._version
        if self._known is None or self._known[0] is not order or self._known[1] != version:
            places, inverse = torch.sort(order)
            if not torch.equal(places, torch.arange(len(order), device=order.device)):
                raise ValueError("order: each place of a page has to be in it once")
            self._known = (order, version, inverse)
        return self._known[2]


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Copies do not queue up behind the engine's computing, and are done when this ends."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
