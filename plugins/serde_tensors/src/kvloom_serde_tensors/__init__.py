"""kvloom serializers `torch` and `safetensors`: blobs that other programs can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import Serializer


@hookimpl
def kvloom_serializers() -> Iterable[type[Serializer]]:
    from kvloom_serde_tensors.serializers import SafetensorsSerializer, TorchSerializer

    return [TorchSerializer, SafetensorsSerializer]
