"""`type: sglang`: whole pages of SGLang's host memory as chunks, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, GPUConnector, KVSpec, MemoryFormat, Segment

from .settings import SGLangConfig

_INTEGERS = (torch.int64, torch.int32)
_METHODS = ("get_data_page", "set_from_flat_data_page")


class SGLangConnector(GPUConnector):
    """Pages as opaque bytes (KV_PAGES), `[pages, page_elements]` for a chunk: only SGLang can read them.

    `where`: `pool`, the host pool of HiCache; `rows`, 1-D int64 or int32, the first row in it of each page, in order.
    Or `flat`, the pages themselves, 1-D tensors of `page_elements`.
    """

    type = "sglang"
    format = MemoryFormat.KV_PAGES
    Config = SGLangConfig

    def __init__(self, config: SGLangConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        if config.geometry is None:
            raise ValueError("'sglang' is opened by SGLang: start it with --hicache-storage-backend dynamic")
        self._geometry = config.geometry

    @property
    def representation(self) -> Mapping[str, Any]:
        return self._geometry.model_dump(mode="json")

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        pages, rest = divmod(num_tokens, self._geometry.page_tokens)
        if rest:
            raise ValueError(f"num_tokens: {num_tokens} is not a whole number of pages of {self._geometry.page_tokens}")
        return (pages, self._geometry.page_elements)

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        if set(where) not in ({"pool", "rows"}, {"flat"}):
            got = sorted(where) or "nothing"
            raise ValueError(f"sglang connector: expected pool= and rows=, or flat=, got {got}")
        (pages, _) = self.shape(num_tokens)
        if "flat" in where:
            self._check_flat(where["flat"], pages)
        else:
            self._check_rows(where["pool"], where["rows"], pages)

    def _check_flat(self, flat: Any, pages: int) -> None:
        if not isinstance(flat, Sequence) or len(flat) < pages:
            raise ValueError(f"flat: expected {pages} pages")
        for number, page in enumerate(flat):
            if not isinstance(page, torch.Tensor) or page.shape != (self._geometry.page_elements,):
                shape = list(page.shape) if isinstance(page, torch.Tensor) else type(page).__name__
                raise ValueError(f"flat: page {number} is {shape}, not [{self._geometry.page_elements}]")
            if self.spec is not None and page.dtype != self.spec.torch_dtype:
                raise ValueError(f"flat: page {number} is {page.dtype}, not {self.spec.torch_dtype}")

    def _check_rows(self, pool: Any, rows: Any, pages: int) -> None:
        lacking = [name for name in _METHODS if not callable(getattr(pool, name, None))]
        if lacking:
            raise ValueError(f"pool: expected a host pool of HiCache, {type(pool).__name__} has no {lacking[0]}")
        if self.spec is not None and pool.dtype != self.spec.torch_dtype:
            raise ValueError(f"pool: it holds {pool.dtype}, not {self.spec.torch_dtype}")
        step = self._geometry.page_tokens
        if pool.page_size != step:
            raise ValueError(f"pool: its pages are of {pool.page_size} tokens, not {step}")
        if not isinstance(rows, torch.Tensor) or rows.dim() != 1 or rows.dtype not in _INTEGERS:
            raise ValueError("rows: expected a 1-D tensor of int64 or int32")
        if len(rows) < pages:
            raise ValueError(f"rows: {len(rows)} for {pages} pages")
        outside = (rows < 0) | (rows > pool.size - step) | (rows % step != 0)
        if bool(outside.any()):
            raise ValueError(f"rows: {int(rows[outside][0])} is not the first row of a page of {pool.size} rows")
        if len(rows) and pool.get_data_page(int(rows[0]), flat=False).numel() != self._geometry.page_elements:
            raise ValueError(f"pool: its pages are not of {self._geometry.page_elements} elements")

    @torch.inference_mode()
    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for number, page in self._pages(segments, chunks):
            if "flat" in where:
                page.copy_(where["flat"][number])
                continue
            source = where["pool"].get_data_page(int(where["rows"][number]), flat=False)
            page.view(source.shape).copy_(source)

    @torch.inference_mode()
    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for number, page in self._pages(segments, chunks):
            if "flat" in where:
                where["flat"][number].copy_(page)
            else:
                where["pool"].set_from_flat_data_page(int(where["rows"][number]), page)

    def _pages(self, segments: Sequence[Segment], chunks: Sequence[Chunk]) -> list[tuple[int, torch.Tensor]]:
        """The place of each page in the sequence, in pages, and its part of a chunk."""
        step = self._geometry.page_tokens
        return [
            (number, page)
            for segment, chunk in zip(segments, chunks, strict=True)
            for number, page in enumerate(chunk.tensor, start=segment.start // step)
        ]
