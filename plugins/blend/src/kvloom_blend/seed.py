"""CacheBlend's own classes, under their names and with their arguments, over the ones of this package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from kvloom import BlendOutput, BlendRequest, BlendSession, Engine

from .executors.deviation import CacheBlendExecutor
from .retrievers.load_task import LoadTask
from .retrievers.passages import Passage
from .retrievers.separator import SeparatorRetriever, occurrences
from .settings import CacheBlendConfig, SeparatorConfig

PositionalEncoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(positions, Q, K) -> (Q, K), each `[tokens, hidden]`, rotated to the positions or back from them."""


class CacheBlendImpl(CacheBlendExecutor):
    """`cacheblend` with its signature of old: `blend` for one batch after the other, each from layer 0 on.

    A batch belongs to the thread that blends it. Where both encoders are set, retrieved K is turned from where it stood
    to where it stands; otherwise it is taken to stand there already. New code calls `begin`.
    """

    def __init__(self, recompute_ratio: float) -> None:
        number = isinstance(recompute_ratio, int | float) and not isinstance(recompute_ratio, bool)
        if not number or not 0 <= recompute_ratio <= 1:
            raise ValueError(f"recompute_ratio: {recompute_ratio!r}; a share, from 0 to 1")
        super().__init__(CacheBlendConfig(recompute_ratio=float(recompute_ratio)))
        self._encode: PositionalEncoder | None = None
        self._decode: PositionalEncoder | None = None
        self._batch = threading.local()

    def set_positional_encoder(self, positional_encoder: PositionalEncoder) -> None:
        """Set the function that rotates Q and K to positions."""
        self._encode = positional_encoder

    def set_reverse_positional_encoder(self, reverse_positional_encoder: PositionalEncoder) -> None:
        """Set the function that rotates Q and K back from positions."""
        self._decode = reverse_positional_encoder

    def blend(
        self, layer_id: int, retrieved_k: torch.Tensor, retrieved_v: torch.Tensor, valid_mask: torch.Tensor,
        original_positions: torch.Tensor, fresh_q: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor,
        positions: torch.Tensor, query_start_loc: torch.Tensor, token_dim: int,
    ) -> BlendOutput:  # fmt: skip
        """One layer of a batch; layer 0 begins it. See `kvloom.BlendSession.blend`. `query_start_loc` is not changed.

        Raises ValueError for a later layer of a batch that this thread has not begun.
        """
        if layer_id == 0:
            tokens = torch.zeros(len(valid_mask), dtype=torch.long)
            self._batch.session = self.begin(BlendRequest(tokens, query_start_loc, valid_mask.bool().cpu()))
        session: BlendSession | None = getattr(self._batch, "session", None)
        if session is None:
            raise ValueError(f"layer_id: got {layer_id}, but no batch has begun; begin with layer 0")
        if self._encode is not None and self._decode is not None:
            now = _positions(query_start_loc).to(original_positions)
            nothing = torch.zeros_like(retrieved_k)
            _, plain = self._decode(original_positions, nothing, retrieved_k.clone())
            _, retrieved_k = self._encode(now, nothing, plain)
        return session.blend(
            layer_id, retrieved_k, retrieved_v, valid_mask, original_positions, fresh_q, fresh_k, fresh_v, positions,
            query_start_loc, token_dim,
        )  # fmt: skip


def _positions(query_start_loc: torch.Tensor) -> torch.Tensor:
    """The position of each token in its request."""
    starts = query_start_loc.long()
    return torch.arange(int(starts[-1]), device=starts.device) - starts[:-1].repeat_interleave(starts.diff())


class SPTBlendRetrieverTask(LoadTask):
    """The task of `SPTBlendRetriever`."""


class SPTBlendRetriever(SeparatorRetriever):
    """Each segment ends with the special token, which belongs to it: `[x, x, spt]`, `[y, spt]`, `[z, z]`.

    spt: ids of the special token, 0-D or 1-D. cache_engine: keeps each segment by its own tokens. metadata: not
    needed; the engine knows.
    """

    type = "separator"
    task = SPTBlendRetrieverTask

    def __init__(self, spt: torch.Tensor, cache_engine: Engine, metadata: object = None) -> None:
        separator = tuple(spt.reshape(-1).tolist())
        settings = SeparatorConfig(separator=separator, prefix=False, in_context=False)
        super().__init__(settings, cache_engine.spec)
        self.engine = cache_engine

    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        ends = [at + len(self.separator) for at in occurrences(tokens, self.separator)]
        edges = sorted({0, *ends, len(tokens)})
        return [Passage(begin, end) for begin, end in pairwise(edges)]
