"""kvloom serializers `torch` and `safetensors`: blobs that other programs can read."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_serializers() -> Mapping[str, str]:
    return {
        "torch": "kvloom_serde_tensors.serializers:TorchSerializer",
        "safetensors": "kvloom_serde_tensors.serializers:SafetensorsSerializer",
    }
