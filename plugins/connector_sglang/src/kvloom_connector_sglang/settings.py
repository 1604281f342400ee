"""The settings of `type: sglang`. Imports no torch, so that a configuration is checked without it."""

from __future__ import annotations

from pydantic import Field

from kvloom import Config


class Geometry(Config):
    """The shape of a page, and everything else that its bytes depend on; all of it is in the fingerprint."""

    page_tokens: int = Field(ge=1)
    """Tokens of a page."""
    page_elements: int = Field(ge=1)
    """Size of one page in all layers, in elements of the KV's dtype."""
    identity: dict[str, str | int] = Field(default_factory=dict)
    """Layout, kind of pool, layers, and whose part of the model this is."""


class SGLangConfig(Config):
    geometry: Geometry | None = None
    """Settings of the connector, which `KVLoomHiCache` fills in."""
