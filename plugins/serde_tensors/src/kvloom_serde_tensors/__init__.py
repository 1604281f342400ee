"""kvloom serializers `torch` and `safetensors`: blobs that other programs can read."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_serializers() -> Mapping[str, tuple[str, str]]:
    settings = f"{__name__}.settings:TensorConfig"
    return {
        "torch": (f"{__name__}.serializers:TorchSerializer", settings),
        "safetensors": (f"{__name__}.serializers:SafetensorsSerializer", settings),
    }
