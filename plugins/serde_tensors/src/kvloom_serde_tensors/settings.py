"""The settings of both serializers. Imports no torch, so that a configuration is checked without it."""

from __future__ import annotations

from typing import Literal

from kvloom import Config

DtypeName = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


class TensorConfig(Config):
    """The settings of `torch` and `safetensors`."""

    dtype: DtypeName | None = None
    """The dtype to store a chunk in; retrieving casts back. Without it, chunks are stored as they are."""
