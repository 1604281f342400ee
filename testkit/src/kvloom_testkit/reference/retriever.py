"""A blend retriever that knows texts by pieces of sixteen tokens, wherever they stand."""

from __future__ import annotations

from itertools import pairwise

import torch

from kvloom import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask, Config, KVSpec

PIECE = 16
Piece = tuple[int, torch.Tensor]
"""The start of a piece, and its KV."""


class PiecesTask(BlendRetrieverTask):
    """Found pieces, by place in the batch."""

    def __init__(self, found: dict[int, Piece], num_tokens: int, spec: KVSpec) -> None:
        self._found = found
        self._num_tokens = num_tokens
        self._spec = spec

    def result(self, layer_id: int) -> BlendRetrieverResult:
        k, v = torch.zeros(2, self._num_tokens, self._spec.hidden_dim, dtype=self._spec.torch_dtype)
        valid = torch.zeros(self._num_tokens, dtype=torch.bool)
        positions = torch.zeros(self._num_tokens, dtype=torch.long)
        for place, (start, kv) in self._found.items():
            run = slice(place, place + PIECE)
            k[run], v[run] = kv[:, layer_id]
            valid[run], positions[run] = True, torch.arange(start, start + PIECE)
        return BlendRetrieverResult(k, v, valid, positions)


class PiecesRetriever(BlendRetriever):
    """Keeps KV in memory, by the tokens of each piece."""

    type = "kit_pieces"

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._pieces: dict[tuple[int, ...], Piece] = {}

    def add(self, tokens: torch.Tensor, kv: torch.Tensor) -> None:
        for start in range(0, len(tokens) - PIECE + 1, PIECE):
            piece = tuple(tokens[start : start + PIECE].tolist())
            self._pieces[piece] = (start, kv[:, :, start : start + PIECE].clone())

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        assert self.spec is not None
        tokens, starts = input_tokens.tolist(), query_start_loc.tolist()
        found: dict[int, Piece] = {}
        for begin, end in pairwise(starts):
            place = begin
            while place + PIECE <= end:
                piece = self._pieces.get(tuple(tokens[place : place + PIECE]))
                if piece is not None:
                    found[place] = piece
                place += 1 if piece is None else PIECE
        return PiecesTask(found, len(tokens), self.spec)
