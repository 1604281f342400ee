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
    from .paged.blobs import VLLMBlobConnector as VLLMBlobConnector
    from .paged.settings import Geometry as Geometry
    from .paged.settings import VLLMConfig as VLLMConfig
    from .paged.views import pages_of as pages_of

_HOME = {
    "Geometry": "paged.settings",
    "PromMetrics": "adapter.metrics",
    "Stats": "adapter.metrics",
    "VLLMBlobConnector": "paged.blobs",
    "VLLMConfig": "paged.settings",
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
def kvloom_gpu_connectors() -> Mapping[str, tuple[str, str]]:
    paged, offload = f"{__name__}.paged", f"{__name__}.offload"
    return {
        "vllm": (f"{paged}.blocks:VLLMConnector", f"{paged}.settings:VLLMConfig"),
        "vllm_blob": (f"{paged}.blobs:VLLMBlobConnector", f"{paged}.settings:VLLMBlobConfig"),
        "vllm_offload": (f"{offload}.pages:OffloadPagesConnector", f"{offload}.settings:OffloadPagesConfig"),
        "nested_tuple": (f"{paged}.nested_tuple:NestedTupleConnector", f"{paged}.settings:NestedTupleConfig"),
        "paged": (f"{paged}.connector:PagedConnector", f"{paged}.settings:PagedConfig"),
        "paged_cuda": (f"{paged}.cuda:PagedCudaConnector", f"{paged}.settings:PagedCudaConfig"),
    }


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
