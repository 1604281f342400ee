"""`type: vllm`: whole blocks of an engine's paged KV as chunks, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvloom import Chunk, Fence, GPUConnector, MemoryFormat, Segment
from kvloom.device import Device, device_of

from .. import native
from .bounce import BounceBuffers, Near, mark
from .layers import LayerEvents
from .move import Move
from .settings import VLLMConfig
from .slots import Slots
from .table import PageTable


class VLLMConnector(GPUConnector):
    """Pages as opaque bytes (KV_PAGES), `[layers, blocks, page_elements]` for a chunk: only the engine can read them.

    `where`: `pages`, for each layer a view `[num_blocks, page_elements]` of the engine's memory, the elements of a page
    next to each other; `blocks`, ids in the order of the sequence, -1 for a block to skip (reading needs every block);
    `first_block`, the place in the sequence of the first one, in blocks. `ready`: optional, an event of the device
    after which the pages may be read or written; without it, what the calling thread's stream has queued comes before.
    `layer_events`: optional, told of each layer that is written.
    """

    type = "vllm"
    format = MemoryFormat.KV_PAGES
    Config = VLLMConfig
    config: VLLMConfig
    _words = frozenset({"pages", "blocks", "first_block", "ready", "layer_events"})

    def __init__(self, config: VLLMConfig, spec: Any = None) -> None:
        super().__init__(config, spec)
        if config.geometry is None:
            raise ValueError(f"{self.type!r} is opened by vLLM: start it with --kv-transfer-config (docs/use/vllm.md)")
        self._geometry = config.geometry
        self._known_pages: Pages | None = None
        self._of_device: dict[torch.device, BounceBuffers | None] = {}

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
        kinds = set(map(type, blocks)) if isinstance(blocks, list | tuple) else {object}
        if not all(issubclass(kind, int) for kind in (*kinds, type(first))):
            raise ValueError("blocks: expected a list of ids, and an index as first_block")
        if len(pages) != geometry.layers:
            raise ValueError(f"pages: {len(pages)} layers, the model has {geometry.layers}")
        its = self._pages_of(pages)
        if its.problem:
            raise ValueError(f"pages: {its.problem}")
        if blocks and (min(blocks) < -1 or max(blocks) >= its.count):
            wrong = next(block for block in blocks if not -1 <= block < its.count)
            raise ValueError(f"blocks: there is no block {wrong}; there are {its.count}")
        tokens = (first + len(blocks)) * geometry.block_tokens
        if num_tokens > tokens:
            raise ValueError(f"blocks: they end at token {tokens} of the sequence, not {num_tokens}")

    def device(self, where: Mapping[str, Any]) -> torch.device:
        found: torch.device = where["pages"][0].device
        return found

    def ordered(self, where: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ready": mark(where["pages"][0].device), **where}

    @torch.inference_mode()
    def read(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, pages: Sequence[torch.Tensor],
        blocks: Sequence[int], first_block: int = 0, ready: Any = None, **how: Any,
    ) -> Fence | None:  # fmt: skip
        """Copy pages into chunks. ValueError if a block of a segment is left out of `blocks`."""
        if not segments:
            return None
        its = self._pages_of(pages)
        chosen = self._chosen(segments, blocks, first_block, its)
        if chosen.ids.min() < 0:
            segment = next(one for one, ids in zip(segments, chosen.lists(), strict=True) if min(ids) < 0)
            raise ValueError(f"blocks: some of tokens {segment.start} to {segment.end} are left out")
        tensors, buffers = self._tensors(segments, chunks), self._buffers(pages[0].device)
        if buffers is not None:
            return buffers.read(tensors, self._near(buffers.device, its, chosen, tensors, False, how)(), ready)
        for move in self._moves(its, chosen, tensors, to_pages=False, how=how):
            move()
        return None

    @torch.inference_mode()
    def write(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, pages: Sequence[torch.Tensor],
        blocks: Sequence[int], first_block: int = 0, ready: Any = None, layer_events: LayerEvents | None = None,
        **how: Any,
    ) -> Fence | None:  # fmt: skip
        """Copy chunks into pages; one layer of all chunks after another if these are all that `layer_events` is of."""
        if not segments:
            return None
        its = self._pages_of(pages)
        chosen = self._chosen(segments, blocks, first_block, its)
        tensors, buffers = self._tensors(segments, chunks), self._buffers(pages[0].device)
        if layer_events is not None and layer_events.chunks == len(segments):
            if buffers is not None:
                return self._write_layers(buffers, its, chosen, tensors, layer_events, ready, how)
            for move in self._moves(its, chosen, tensors, to_pages=True, how=how, by_layer=True):
                move()
                layer_events.there()
            return None
        if buffers is not None:
            return buffers.write(tensors, self._near(buffers.device, its, chosen, tensors, True, how)(), ready)
        for move in self._moves(its, chosen, tensors, to_pages=True, how=how):
            move()
        return None

    def _write_layers(
        self, buffers: BounceBuffers, its: Pages, chosen: Chosen, tensors: Sequence[torch.Tensor],
        events: LayerEvents, ready: Any, how: Mapping[str, Any],
    ) -> Fence:  # fmt: skip
        near = self._near(buffers.device, its, chosen, tensors, True, how, by_layer=True)
        layers = (([self._layer(one, layer) for one in tensors], near(layer)) for layer in range(len(its.views)))
        return buffers.write_layers(tensors, layers, partial(events.there, buffers.device), ready)

    def _pages_of(self, pages: Sequence[torch.Tensor]) -> Pages:
        """The pages as numbers; those of a tuple, which is what an engine's connector passes, are worked out once."""
        known = self._known_pages
        if known is not None and known.views is pages and known.places == _places(pages):
            return known
        elements = self._geometry.page_elements + self._geometry.surrounding_elements
        found = Pages.of(pages, elements, None if self.spec is None else self.spec.torch_dtype)
        if isinstance(pages, tuple):
            self._known_pages = found
        return found

    def close(self) -> None:
        self._known_pages = None
        for buffers in [*self._of_device.values()]:
            if buffers is not None:
                buffers.close()
        self._of_device.clear()

    def _buffers(self, where: torch.device) -> BounceBuffers | None:
        """Those on the pages' device; None if they are in host memory."""
        if where in self._of_device:
            return self._of_device[where]
        device = device_of(where)
        return self._of_device.setdefault(where, None if device is None else BounceBuffers(device, self.config.staging))

    def _near(
        self, device: Device, its: Pages, chosen: Chosen, tensors: Sequence[torch.Tensor], to_pages: bool,
        how: Mapping[str, Any], *, by_layer: bool = False,
    ) -> Callable[..., Near]:  # fmt: skip
        """Between the pages and buffers on their device, of the chunks from a number on. All tables are made here.

        by_layer: the result is given a layer, and its buffers have this one only.
        """
        run = native.runner(its.device) if self._alike(its, tensors, **how) else None
        if run is None:
            ids = chosen.lists()

            def by_torch(layer: int = 0) -> Near:
                views = its.views[layer : layer + 1] if by_layer else its.views

                def near(first: int, parts: Sequence[torch.Tensor]) -> object:
                    some = ids[first : first + len(parts)]
                    return device.queue(lambda: self._by_torch(views, some, parts, to_pages=to_pages, how=how))

                return near

            return by_torch
        table, slots, counts = self._table(its, chosen, **how)
        tables = native.Tables.buffered(table, slots, counts, to_pages=to_pages, by_layer=by_layer)

        def by_native(layer: int = 0) -> Near:
            own = tables.layer(layer) if by_layer else tables
            return lambda first, parts: device.queue(partial(run, own.part(first, parts)))

        return by_native

    def _moves(
        self, its: Pages, chosen: Chosen, tensors: Sequence[torch.Tensor], *, to_pages: bool, how: Mapping[str, Any],
        by_layer: bool = False,
    ) -> Iterator[Callable[[], object]]:  # fmt: skip
        """Between pages and tensors, in host memory: one call, which moves everything, or one for each layer."""
        at_once = self._alike(its, tensors, **how) and all(map(self._in_one_piece, tensors))
        run = native.runner(its.device) if at_once and tensors[0].device == its.device else None
        if run is None:
            go = partial(self._by_torch, ids=chosen.lists(), to_pages=to_pages, how=how)
            if not by_layer:
                yield partial(go, its.views, tensors=tensors)
                return
            for layer in range(len(its.views)):
                yield partial(go, its.views[layer : layer + 1], tensors=[self._layer(one, layer) for one in tensors])
            return
        if chosen.ids.max() < 0:
            run = id  # there is nothing to be moved
        table, slots, _ = self._table(its, chosen, **how)
        tables = native.Tables.of(Move(table, slots, list(map(self._by_plane, tensors)), to_pages))
        for layer in range(len(its.views)) if by_layer else (None,):
            yield partial(run, tables if layer is None else tables.layer(layer))

    def _by_torch(
        self, pages: Sequence[torch.Tensor], ids: Sequence[list[int]], tensors: Sequence[torch.Tensor], *,
        to_pages: bool, how: Mapping[str, Any],
    ) -> None:  # fmt: skip
        for wanted, tensor in zip(ids, tensors, strict=True):
            kept = [index for index, block in enumerate(wanted) if block >= 0]
            if not kept:
                continue
            here = torch.tensor([wanted[index] for index in kept], device=pages[0].device)
            for layer, view in enumerate(pages):
                if to_pages:
                    rows = self._rows(tensor, layer)
                    self._put(view, here, rows if len(kept) == len(wanted) else rows[kept], **how)
                else:
                    self._take(view, here, tensor, layer, **how)

    def _alike(self, its: Pages, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether they are whole pages of one dtype, so that native code can copy them."""
        return not its.problem and all(tensor.dtype == its.dtype for tensor in tensors)

    def _in_one_piece(self, tensor: torch.Tensor) -> bool:
        """Return whether a layer of a chunk is."""
        return tensor.stride()[1:] == (self._geometry.page_elements, 1)

    def _table(self, its: Pages, chosen: Chosen) -> tuple[PageTable, Slots, Slots]:
        """A block as a slot of one token: the pages, the slots of all chunks, and how many each has."""
        width = self._geometry.page_elements * its.dtype.itemsize
        table = PageTable(its.rows, 1, len(its.rows), 1, width, its.count, 1, its.device)
        return table, chosen.ids, chosen.counts

    def _by_plane(self, tensor: torch.Tensor) -> torch.Tensor:
        """A chunk as `Move` has them."""
        return tensor.unsqueeze(0)

    def _layer(self, tensor: torch.Tensor, layer: int) -> torch.Tensor:
        """One layer of a chunk, as a chunk of a model of one layer."""
        return tensor[layer : layer + 1]

    def _tensors(self, segments: Sequence[Segment], chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """The tensors of chunks. ValueError unless each is that of its segment."""
        for segment, chunk in zip(segments, chunks, strict=True):
            if tuple(chunk.tensor.shape) != self.shape(segment.end - segment.start):
                raise ValueError(f"chunk: of tokens {segment.start} to {segment.end}, got {list(chunk.tensor.shape)}")
        return [chunk.tensor for chunk in chunks]

    def _take(self, view: torch.Tensor, ids: torch.Tensor, into: torch.Tensor, layer: int) -> None:
        """One layer's pages into a chunk on their device."""
        torch.index_select(view, 0, ids, out=into[layer])

    def _rows(self, chunk: torch.Tensor, layer: int) -> torch.Tensor:
        """One layer's pages of a chunk, `[blocks, page_elements]`, in the order of the chunk."""
        return chunk[layer]

    def _put(self, view: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows, as `_rows` gives them, into one layer's pages."""
        view.index_copy_(0, ids, rows)

    def _chosen(self, segments: Sequence[Segment], blocks: Sequence[int], first_block: int, its: Pages) -> Chosen:
        """The blocks of segments, in order. ValueError for one that there is not."""
        spans = np.array([(segment.start, segment.end) for segment in segments], dtype=np.int64)
        begin, end = (spans // self._geometry.block_tokens - first_block).T
        if begin.min() < 0:
            first = begin.min() + first_block
            raise ValueError(f"blocks: they begin at block {first_block} of the sequence, not {first}")
        if end.max() > len(blocks):
            last = segments[int(end.argmax())]
            raise ValueError(f"blocks: they end before tokens {last.start} to {last.end}")
        given = np.array(blocks, dtype=np.int64)
        counts = end - begin
        places = np.repeat(begin - (np.cumsum(counts) - counts), counts)
        ids = given[places + np.arange(len(places))]
        least, most = int(ids.min()), int(ids.max())
        if most >= its.count or least < -1:
            raise ValueError(f"blocks: there is no block {most if most >= its.count else least}")
        return Chosen(ids, counts)


class Chosen(NamedTuple):
    """The blocks of chunks."""

    ids: Slots
    """One chunk's after another's; a negative one is skipped."""
    counts: Slots
    """Number of blocks by chunk."""

    def lists(self) -> list[list[int]]:
        """By chunk."""
        return [part.tolist() for part in np.split(self.ids, np.cumsum(self.counts)[:-1])]


class Pages(NamedTuple):
    """An engine's pages as numbers."""

    views: Sequence[torch.Tensor]
    places: list[tuple[int, int]]
    """See `_places`; a tensor may be given other memory."""
    rows: np.ndarray[Any, Any]
    """int64 `[layers, 4]`: address, stride of a block in bytes, 0, 0."""
    count: int
    """Number of blocks that every layer has."""
    device: torch.device
    dtype: torch.dtype
    problem: str
    """The reason why they are not pages of the model, in one piece each, on one device; empty if they are."""

    @classmethod
    def of(cls, pages: Sequence[torch.Tensor], elements: int, dtype: torch.dtype | None) -> Pages:
        first, problem, rows = pages[0], "", []
        for number, view in enumerate(pages):
            if view.layout != torch.strided or view.dim() != 2:
                return cls(pages, [], np.zeros((0, 4), np.int64), 0, first.device, first.dtype,
                           f"layer {number} is {list(view.shape)}, not [blocks, {elements}]")  # fmt: skip
            if view.shape[1] != elements or view.stride(1) != 1:
                problem = problem or (
                    f"layer {number} is {list(view.shape)} with strides {view.stride()}, "
                    f"not [blocks, {elements}] with pages in one piece"
                )
            elif view.dtype != (dtype or first.dtype):
                problem = problem or f"layer {number} is {view.dtype}, not {dtype or first.dtype}"
            elif view.device != first.device:
                problem = problem or f"layer {number} is on {view.device}, not {first.device}"
            rows.append((view.data_ptr(), view.stride(0) * view.element_size(), 0, 0))
        count = min(view.shape[0] for view in pages)
        return cls(pages, _places(pages), np.array(rows, np.int64), count, first.device, first.dtype, problem)


def _places(pages: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and number of elements of each."""
    return [(view.data_ptr(), view.numel()) for view in pages]
