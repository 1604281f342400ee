"""The common part of all executors: selects the tokens that go on to the next layer, and merges K and V."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvloom import BlendOutput, BlendRequest, BlendSession


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's data for the choice. Fresh tensors have the tokens `going`, retrieved ones the batch."""

    number: int
    going: torch.Tensor
    """Places in the batch of the tokens that reached this layer: int64, on CPU, ascending."""
    retrieved_k: torch.Tensor
    retrieved_v: torch.Tensor
    fresh_k: torch.Tensor
    fresh_v: torch.Tensor
    original_positions: torch.Tensor
    token_dim: int


class SelectingSession(BlendSession):
    """A session whose subclass selects, in some layers, the tokens that go on. Tensors may be on any device.

    In any case, invalid tokens and the last one of each request go on, and exact ones do not.
    """

    def __init__(self, request: BlendRequest) -> None:
        self.request = request
        self.starts: list[int] = request.query_start_loc.tolist()
        check_starts(self.starts, len(request.valid_mask))
        self.valid = request.valid_mask.bool().cpu()
        self.always = ~self.valid
        """Tokens that go on in every layer: those to compute, and those that the next token is predicted from."""
        self.always[[end - 1 for begin, end in pairwise(self.starts) if end > begin]] = True
        exact = request.exact_mask
        self.candidates = self.valid.clone() if exact is None else self.valid & ~exact.bool().cpu()
        """Tokens whose retrieved KV is approximate."""
        self._going = torch.arange(len(self.valid))

    def plan(self) -> torch.Tensor | None:
        """All tokens except exact ones; a subclass that selects without computing narrows it."""
        planned = self.candidates | self.always
        self._going = planned.nonzero().flatten()
        return planned

    @abstractmethod
    def choose(self, layer: Layer) -> torch.Tensor | None:
        """Select the candidates that go on from this layer: a bool CPU mask over the batch. None: all that came this
        far."""

    def blend(
        self, layer_id: int, retrieved_k: torch.Tensor, retrieved_v: torch.Tensor, valid_mask: torch.Tensor,
        original_positions: torch.Tensor, fresh_q: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor,
        positions: torch.Tensor, query_start_loc: torch.Tensor, token_dim: int,
    ) -> BlendOutput:  # fmt: skip
        going = self._going
        if token_dim not in (0, -fresh_k.dim()) or fresh_k.shape[token_dim] != len(going):
            raise ValueError(f"token_dim: {token_dim} of {list(fresh_k.shape)}, and {len(going)} tokens were handed on")
        layer = Layer(layer_id, going, retrieved_k, retrieved_v, fresh_k, fresh_v, original_positions, token_dim)
        chosen = self.choose(layer)
        k, v = self._merged(retrieved_k, fresh_k, token_dim), self._merged(retrieved_v, fresh_v, token_dim)
        if chosen is not None:
            local = (chosen | self.always)[going].nonzero().flatten()
            if len(local) < len(going):
                self._going = going[local]
                starts = torch.searchsorted(self._going, torch.tensor(self.starts)).to(query_start_loc)
                there = local.to(fresh_q.device)
                return BlendOutput(
                    fresh_q.index_select(token_dim, there), k, v, positions[local.to(positions.device)], there, starts
                )
        everyone = torch.arange(len(going), device=fresh_q.device)
        return BlendOutput(fresh_q, k, v, positions, everyone, None)

    def _merged(self, retrieved: torch.Tensor, fresh: torch.Tensor, token_dim: int) -> torch.Tensor:
        """Put the computed values over the retrieved ones, also for tokens that go no further."""
        if len(self._going) == len(self.valid):
            return fresh
        merge = retrieved.index_copy_ if self.request.in_place else retrieved.index_copy
        return merge(token_dim, self._going.to(retrieved.device), fresh.to(retrieved.dtype))

    def largest(self, scores: torch.Tensor, ratio: float, *, among: torch.Tensor | None = None) -> torch.Tensor:
        """The share `ratio` of each request's candidates that have the largest scores.

        scores: float, of the batch, on CPU. among: only these, though the share is of all candidates.
        """
        pool = self.candidates if among is None else self.candidates & among
        scores = scores.masked_fill(~pool, float("-inf"))
        chosen = torch.zeros_like(pool)
        for begin, end in pairwise(self.starts):
            count = min(round(ratio * int(self.candidates[begin:end].sum())), int(pool[begin:end].sum()))
            if count:
                chosen[begin + scores[begin:end].topk(count).indices] = True
        return chosen


def check_starts(starts: list[int], num_tokens: int) -> None:
    """Raise ValueError unless `query_start_loc` says where requests start that make up the whole batch."""
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != num_tokens or any(a > b for a, b in pairwise(starts)):
        raise ValueError(
            f"query_start_loc: {starts} for {num_tokens} tokens; it goes from 0 to their number and never down"
        )
