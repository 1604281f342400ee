"""A host pool such as HiCache has, small and made of nothing but torch."""

from __future__ import annotations

import torch

PAGE_TOKENS = 4


class HostPool:
    """K and V of all layers, token by token.

    layout: `layer_first`, `[2, layers, rows, heads, size]`, or `page_first`, `[2, rows, layers, heads, size]`.
    """

    start_layer = 0

    def __init__(
        self, *, layers: int, heads: int, head_size: int, dtype: torch.dtype, pages: int,
        page_size: int = PAGE_TOKENS, layout: str = "layer_first",
    ) -> None:  # fmt: skip
        self.layer_num, self.head_num, self.head_dim = layers, heads, head_size
        self.end_layer = self.layer_num
        self.dtype, self.layout, self.page_size, self.size = dtype, layout, page_size, pages * page_size
        self._row_dim = {"layer_first": 2, "page_first": 1}[layout]
        dims = [2, self.layer_num, self.head_num, self.head_dim]
        dims.insert(self._row_dim, self.size)
        self.kv_buffer = torch.zeros(dims, dtype=self.dtype)

    def page(self, index: int) -> torch.Tensor:
        """The page that begins with a row."""
        return self.kv_buffer.narrow(self._row_dim, index, self.page_size)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A copy of a page if it is wanted flat."""
        return self.page(index).flatten() if flat else self.page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Memory for a page."""
        return torch.zeros_like(self.page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Fill a page."""
        page = self.page(index)
        page.copy_(data_page.reshape(page.shape))
