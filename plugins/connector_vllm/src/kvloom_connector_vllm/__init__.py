"""kvloom for vLLM. Heavy modules are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    from .adapter.metrics import PromMetrics as PromMetrics
    from .adapter.metrics import Stats as Stats
    from .adapter.order import page_order as page_order
    from .adapter.platform import about_model as about_model
    from .adapter.platform import check_version as check_version
    from .identity import identify as identify
    from .identity import layer_spec as layer_spec
    from .paged.blocks import Geometry as Geometry
    from .paged.blocks import VLLMBlobConnector as VLLMBlobConnector
    from .paged.blocks import VLLMConfig as VLLMConfig
    from .paged.views import pages_of as pages_of

_HOME = {
    "Geometry": "paged.blocks",
    "PromMetrics": "adapter.metrics",
    "Stats": "adapter.metrics",
    "VLLMBlobConnector": "paged.blocks",
    "VLLMConfig": "paged.blocks",
    "about_model": "adapter.platform",
    "check_version": "adapter.platform",
    "identify": "identity",
    "layer_spec": "identity",
    "page_order": "adapter.order",
    "pages_of": "paged.views",
}
"""For other connectors of vLLM, such as kvloom-blend's."""

__all__ = sorted(_HOME)  # noqa: PLE0605


@hookimpl
def kvloom_gpu_connectors() -> Mapping[str, str]:
    return {
        "vllm": "kvloom_connector_vllm.paged.blocks:VLLMConnector",
        "vllm_blob": "kvloom_connector_vllm.paged.blocks:VLLMBlobConnector",
        "vllm_offload": "kvloom_connector_vllm.offload.pages:OffloadPagesConnector",
        "nested_tuple": "kvloom_connector_vllm.paged.nested_tuple:NestedTupleConnector",
        "paged": "kvloom_connector_vllm.paged.connector:PagedConnector",
        "paged_cuda": "kvloom_connector_vllm.paged.cuda:PagedCudaConnector",
    }


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
