"""kvloom for vLLM. Heavy modules are imported on first use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import GPUConnector


@hookimpl
def kvloom_gpu_connectors() -> Iterable[type[GPUConnector]]:
    from .offload.pages import OffloadPagesConnector
    from .paged.blocks import VLLMBlobConnector, VLLMConnector
    from .paged.connector import PagedConnector
    from .paged.cuda import PagedCudaConnector
    from .paged.nested_tuple import NestedTupleConnector

    paged = [PagedConnector, PagedCudaConnector]
    return [VLLMConnector, VLLMBlobConnector, OffloadPagesConnector, NestedTupleConnector, *paged]
