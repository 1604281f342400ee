"""Blending: reuse KV that was computed in another context. The interfaces of CacheBlend, inside sessions.

Shapes are those of one layer: Q, K and V of `[num_tokens, hidden_dim]` over the tokens of one batch, in which
`query_start_loc` (one entry more than requests, int32 or int64) says where each request starts. Q may be wider than
K and V, where several of its heads share one of theirs. Layers are counted from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvloom.contracts.component import Component

if TYPE_CHECKING:
    import torch

    from kvloom.contracts.connector import GPUConnector
    from kvloom.types import Hit, KVSpec, Segment


@dataclass(frozen=True, slots=True)
class BlendRetrieverResult:
    """The stored KV of one layer, as long as the input tokens."""

    k: torch.Tensor | None
    """`[tokens, hidden]` in the model's dtype; None if nothing was retrieved; undefined where `valid_mask` is False."""
    v: torch.Tensor | None
    """Likewise: `[tokens, hidden]` in the model's dtype, or None."""
    valid_mask: torch.Tensor
    """Bool `[tokens]`, on CPU: whose KV was retrieved. The same in every layer of a task."""
    original_positions: torch.Tensor
    """The position each K was rotated to when it was stored, 0 where invalid: int32 or int64 `[tokens]`, on the device
    of `k`."""


class BlendRetrieverTask(ABC):
    """One request batch whose KV is being fetched."""

    @abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Block until the KV of `layer_id` is there; layers may be asked for in any order, and again.

        A token that is valid in one layer is valid in all: a token that was skipped in one layer has no hidden state in
        the next. Raises BackendError if the KV of a valid token is lost by now.
        """


class BlendLoading(Protocol):
    """A layer-wise load that an engine has begun (`kvloom.Loading`)."""

    def wait(self, layer: int) -> torch.Tensor:
        """Block until the layer is loaded, and return whose KV came: bool `[tokens]`, on CPU."""
        ...

    def close(self) -> None:
        """Stop the load. Idempotent."""
        ...


class BlendEngine(Protocol):
    """The part of `kvloom.Engine` that a retriever uses."""

    @property
    def spec(self) -> KVSpec:
        """The shape of the model's KV."""
        ...

    @property
    def salt(self) -> str:
        """The configured salt, which verbs use where none is given."""
        ...

    def lookup(self, tokens: torch.Tensor, *, salt: str | None = None) -> Hit:
        """Find the longest stored prefix. tokens: 1-D, of any integer dtype."""
        ...

    def segments(self, tokens: torch.Tensor, *, salt: str | None = None) -> list[Segment]:
        """Cut a prompt into segments with keys. tokens: 1-D, of any integer dtype."""
        ...

    def passage(
        self, tokens: torch.Tensor, *, lead: Sequence[int] = (), context: str = "", salt: str | None = None
    ) -> list[Segment]:
        """Cut a text that is known by its own tokens, wherever it stands. tokens: 1-D, of any integer dtype."""
        ...

    def find(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Return a bool tensor `[segments]`: whether a tier says that it holds each."""
        ...

    def load_layers(self, segments: Sequence[Segment], *, into: GPUConnector) -> BlendLoading:
        """Load segments layer by layer into a connector of the caller's."""
        ...


class BlendRetriever(Component):
    """Finds stored KV for any part of a prompt."""

    engine: BlendEngine
    """The engine to retrieve from, set by it before the first request."""

    @abstractmethod
    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        """Start fetching, possibly in the background. Neither argument is changed.

        input_tokens: 1-D, of any integer dtype, of all requests.
        query_start_loc: `[requests + 1]`, int32 or int64: where each request starts, and where the last one ends.
        """


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """The input of a blend session."""

    input_tokens: torch.Tensor
    """1-D, of any integer dtype, of all requests."""
    query_start_loc: torch.Tensor
    """`[requests + 1]`, int32 or int64: where each request starts, and where the last one ends."""
    valid_mask: torch.Tensor
    """Bool `[tokens]`, on CPU: the tokens whose KV was retrieved. Every `blend` of the session
    receives the same mask."""
    original_positions: torch.Tensor | None = None
    """Positions of the tokens when their KV was computed, int32 or int64 `[tokens]`, on CPU. A passage begins where
    they do not increase by one."""
    exact_mask: torch.Tensor | None = None
    """Bool `[tokens]`, on CPU: the tokens whose KV equals a prefill's (an exact prefix). None: no token. Such tokens
    need not be selected, and do not count for a share of tokens to compute again."""
    attention: Callable[[], torch.Tensor] | None = None
    """Returns how much the tokens that are not valid (the question) attend to each token, times the length (L2 norm) of
    that token's V in the head, summed over heads and layers, in a pass that reuses all that was retrieved: float32
    `[tokens]`, on CPU. It costs that pass. None where the engine cannot tell."""
    in_place: bool = False
    """The retrieved KV passed to `blend` belongs to this request, and may be overwritten."""


@dataclass(frozen=True, slots=True)
class BlendOutput:
    """A short Q over a long, blended KV."""

    q: torch.Tensor
    """`[selected tokens, hidden]`, in the dtype of the fresh Q."""
    k: torch.Tensor
    """`[tokens of the batch, hidden]`, in the dtype of the fresh K."""
    v: torch.Tensor
    """`[tokens of the batch, hidden]`, in the dtype of the fresh V."""
    positions: torch.Tensor
    """`[selected tokens]`: their positions in the input sequence, in the dtype of the given positions."""
    local_indices: torch.Tensor
    """`[selected tokens]`: which they are in the fresh Q, int64, ascending."""
    query_start_loc: torch.Tensor | None
    """`[requests + 1]`: the start of each request in `q`, in the dtype of the given one; None if no
    selection was made."""


class BlendSession(ABC):
    """The blending of one batch, layer by layer; all state lives here, so that requests do not meet."""

    def plan(self) -> torch.Tensor | None:
        """The tokens of the batch to compute in the first layer: bool `[tokens]`, on CPU; None for all.

        Called once, before the first `blend`, by engines that can leave tokens out from the beginning; other engines
        compute all tokens in the first layer. It includes invalid tokens and the last one of each request.
        """
        return None

    def selects_in(self, layer_id: int) -> bool:
        """Return whether `blend` may leave tokens out in this layer.

        A hint, asked before the layer is computed: an engine then computes K and V of the layer first, and the rest of
        it for the selected tokens only. Where it says False, they are left out from the layer after.
        """
        return False

    @abstractmethod
    def blend(
        self,
        layer_id: int,
        retrieved_k: torch.Tensor,
        retrieved_v: torch.Tensor,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        fresh_q: torch.Tensor,
        fresh_k: torch.Tensor,
        fresh_v: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_dim: int,
    ) -> BlendOutput:
        """Merge retrieved and fresh KV of one layer; inputs are not changed.

        The fresh tensors have the tokens that the previous layer selected, in its order; in the first layer, all of
        them. Invalid tokens are always selected, and so is the last one of each request, from which the next token is
        predicted. A token that is not selected has retrieved KV, or fresh KV if it reached this layer.

        layer_id: from 0; a session may end before the last layer. retrieved_k, retrieved_v: `[tokens of the batch,
        hidden]` in the model's dtype, undefined where `valid_mask` is False; K is rotated to the tokens' present
        positions. valid_mask: bool `[tokens of the batch]`: that of `begin`, whatever was selected since.
        original_positions: int32 or int64 `[tokens of the batch]`: the positions that the retrieved K is rotated to
        (the request's are the original ones). fresh_q, fresh_k, fresh_v: `[fresh tokens, hidden]` in the model's dtype.
        positions: int32 or int64 `[fresh tokens]`: positions in their request. query_start_loc: int32 or int64
        `[requests + 1]`: of the whole batch, in every layer. token_dim: the dimension of Q, K and V that counts tokens,
        as torch counts: 0, or -2, which is the same.
        """


class BlendExecutor(Component):
    """Decides which tokens to recompute and merges the rest."""

    @abstractmethod
    def begin(self, request: BlendRequest) -> BlendSession:
        """Begin the blending of one batch, starting with layer 0. Several may be under way, on several threads."""
