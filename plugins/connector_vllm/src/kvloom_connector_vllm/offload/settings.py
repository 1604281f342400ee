"""The settings of `type: vllm_offload`. Imports no torch, so that a configuration is checked without it."""

from __future__ import annotations

from pydantic import Field

from kvloom import Config


class PieceGeometry(Config):
    """The size of a piece, and everything else that its bytes depend on; all of it is in the fingerprint."""

    piece_bytes: list[int] = Field(min_length=1)
    """Bytes of each rank, or of each layer of an engine's own host memory."""
    identity: dict[str, str | int | bool | list[str]] = Field(default_factory=dict)
    """Layout, layers, and whatever else the adapter found."""


class OffloadPagesConfig(Config):
    geometry: PieceGeometry | None = None
    """Filled in by the adapter."""
