"""kvloom for vLLM. Light on purpose: what is heavy is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import GPUConnector


@hookimpl
def kvloom_gpu_connectors() -> Iterable[type[GPUConnector]]:
    from .nested_tuple import NestedTupleConnector
    from .offload_pages import OffloadPagesConnector
    from .paged import PagedConnector
    from .paged_cuda import PagedCudaConnector
    from .pages import VLLMBlobConnector, VLLMConnector

    paged = [PagedConnector, PagedCudaConnector]
    return [VLLMConnector, VLLMBlobConnector, OffloadPagesConnector, NestedTupleConnector, *paged]
