"""The settings of the connectors for paged KV. Imports no torch, so that a configuration is checked without it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvloom import ByteSize, Config

LayoutName = Literal["auto", "nhd", "hnd", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""`auto`: heads and tokens are distinguished by their numbers. `nhd`, `hnd`: the order of tokens and heads in the
shape. The others are vLLM's: each layer is `[B, H, N, C]`, with strides in the named order, or all layers are one
tensor of this shape."""


class Geometry(Config):
    """The shape of a page, and everything else that its bytes depend on, which is in the fingerprint."""

    layers: int = Field(ge=1)
    """Number of layers with pages in a chunk."""
    block_tokens: int = Field(ge=1)
    """Tokens of the engine's block."""
    page_elements: int = Field(ge=1)
    """Size of one block in one layer, in elements of the KV's dtype."""
    surrounding_elements: int = Field(default=0, ge=0)
    """The further elements of the engine's page, if chunks hold only some of its heads. Not in the fingerprint: it
    depends on the number of ranks, and the bytes of a chunk do not."""
    identity: dict[str, str | int | bool | list[str]] = Field(default_factory=dict)
    """Layout, attention backend, instruction set, the engine's hash and whatever else the adapter found."""

    @property
    def representation(self) -> dict[str, Any]:
        """Everything that determines the bytes of a chunk, as JSON values."""
        return self.model_dump(mode="json", exclude={"surrounding_elements"})


class VLLMConfig(Config):
    geometry: Geometry | None = None
    """Filled in by the adapter."""
    staging: ByteSize = ByteSize(64 << 20)
    """Size of the buffers on a GPU, of each direction; they hold two chunks at least."""


class VLLMBlobConfig(VLLMConfig):
    shards: int = Field(default=0, ge=0)
    """Keep the heads of all ranks in so many parts, whatever the number of ranks: engines whose numbers of ranks divide
    it share their KV. 0: one for each rank, which is only of use to as many ranks."""


class PagedConfig(Config):
    layout: LayoutName = "auto"
    """The layout of `kvcaches`; `auto` refuses an ambiguous one."""


class PagedCudaConfig(PagedConfig):
    staging: ByteSize = ByteSize(64 << 20)
    """Size of the buffers on the device, of each direction; they hold two chunks at least."""


class NestedTupleConfig(Config):
    token_dim: int = Field(default=0, ge=0)
    """The axis of tokens: 0 for `[tokens, heads, head_size]`, 2 for `[1, heads, tokens, head_size]`."""
