"""Executors that choose before anything is computed: by nothing, by place, or by what the question looks at."""

from __future__ import annotations

from typing import cast

import torch

from kvloom import BlendExecutor, BlendOutput, BlendRequest, BlendSession

from ..settings import EpicConfig, RatioConfig
from .budgeted import BudgetedExecutor
from .session import Layer, SelectingSession


class StaticSession(SelectingSession):
    """Selects once, in the first layer."""

    def __init__(self, request: BlendRequest, chosen: torch.Tensor | None = None) -> None:
        """chosen: a bool CPU mask over the batch; None for no candidate at all."""
        super().__init__(request)
        self.chosen = torch.zeros_like(self.valid) if chosen is None else chosen

    def plan(self) -> torch.Tensor | None:
        planned = self.chosen | self.always
        self._going = planned.nonzero().flatten()
        return planned

    def choose(self, layer: Layer) -> torch.Tensor | None:
        return self.chosen if layer.number == 0 else None


class NoneExecutor(BlendExecutor):
    """`none`: reuses all retrieved KV, and computes the rest.

    For models trained on passages computed alone. For other models it is the fastest, and differs most from a prefill.
    """

    type = "none"

    def begin(self, request: BlendRequest) -> BlendSession:
        return StaticSession(request)


class FullSession(BlendSession):
    """Selects everything, in every layer."""

    def blend(
        self, layer_id: int, retrieved_k: torch.Tensor, retrieved_v: torch.Tensor, valid_mask: torch.Tensor,
        original_positions: torch.Tensor, fresh_q: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor,
        positions: torch.Tensor, query_start_loc: torch.Tensor, token_dim: int,
    ) -> BlendOutput:  # fmt: skip
        everyone = torch.arange(len(positions), device=fresh_q.device)
        return BlendOutput(fresh_q, fresh_k, fresh_v, positions, everyone, None)


class FullExecutor(BlendExecutor):
    """`full`: computes everything again, which is what blending is compared with."""

    type = "full"

    def begin(self, request: BlendRequest) -> BlendSession:
        return FullSession()


class EpicExecutor(BudgetedExecutor):
    """`epic`: computes the first tokens of each passage again, for it is these that draw attention where they should
    not once they stand in the middle of a prompt (EPIC's LegoLink)."""

    type = "epic"
    Config = EpicConfig

    def begin(self, request: BlendRequest) -> BlendSession:
        config = cast(EpicConfig, self.config)
        session = StaticSession(request)
        offsets = offsets_in_passages(request)
        if config.tokens_per_passage is not None:
            session.chosen = session.candidates & (offsets < config.tokens_per_passage)
        else:
            session.chosen = session.largest(-offsets.float(), config.recompute_ratio)
        return session


def offsets_in_passages(request: BlendRequest) -> torch.Tensor:
    """Number of tokens of its passage before each token: int64, on CPU.

    A passage begins with a request, behind a token that is not valid, and where original positions do not increase by
    one.
    """
    valid = request.valid_mask.bool().cpu()
    begins = torch.zeros_like(valid)
    begins[request.query_start_loc[:-1].long().cpu().clamp(max=max(len(valid) - 1, 0))] = True
    begins[1:] |= valid[1:] != valid[:-1]
    if request.original_positions is not None:
        stood = request.original_positions.cpu().long()
        begins[1:] |= valid[1:] & (stood[1:] != stood[:-1] + 1)
    places = torch.arange(len(valid))
    return places - torch.where(begins, places, 0).cummax(0).values


def attention_of(request: BlendRequest, executor: str) -> torch.Tensor:
    """The attention of the question to each token, times the length of its V. ValueError where the engine cannot
    tell."""
    if request.attention is None:
        raise ValueError(
            f"blend executor {executor!r} needs the question's attention, which this engine does not provide"
        )
    return request.attention().float().cpu()


class QuestionAttentionExecutor(BudgetedExecutor):
    """`question_attention`: computes the tokens again with the largest attention of the question times length of V, in
    a pass over the retrieved KV (ProphetKV and A3 select by attention alone). Alone it fails if the question finds its
    tokens by information that their retrieved KV lacks."""

    type = "question_attention"

    def begin(self, request: BlendRequest) -> BlendSession:
        config = cast(RatioConfig, self.config)
        session = StaticSession(request)
        if session.candidates.any() and config.recompute_ratio:
            session.chosen = session.largest(attention_of(request, self.type), config.recompute_ratio)
        return session
