"""Blend retrievers with a fault each, and odd ones."""

from __future__ import annotations

import functools
import threading
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

from kvloom import BlendRetrieverResult, BlendRetrieverTask
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.reference.retriever import PIECE, PiecesRetriever


class _Task(BlendRetrieverTask):
    """The reference's, with the retriever's `spoil` in between."""

    def __init__(self, retriever: _Spoils, task: BlendRetrieverTask) -> None:
        self.retriever = retriever
        self.task = task

    def result(self, layer_id: int) -> BlendRetrieverResult:
        return self.retriever.spoil(self, layer_id)


class _Spoils(Mutant, PiecesRetriever):
    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        return _Task(self, super().new_request(input_tokens, query_start_loc))

    @abstractmethod
    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        """The spoilt result of one layer."""


class ReturnsWhatWasFound(_Spoils):
    """Returns only the tokens that were found, not one row for each."""

    breaks = "R01"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        result = task.task.result(layer)
        assert result.k is not None and result.v is not None
        return replace(result, k=result.k[result.valid_mask], v=result.v[result.valid_mask])


class KeepsPositionsInBytes(_Spoils):
    """A byte is enough for texts of 128 tokens only."""

    breaks = "R01"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        result = task.task.result(layer)
        return replace(result, original_positions=result.original_positions.byte())


class FindsPrefixes(Mutant, PiecesRetriever):
    """A piece counts where all before it count."""

    breaks = "R02"

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        task: Any = super().new_request(input_tokens, query_start_loc)
        end = 0
        while end in task._found:
            end += PIECE
        task._found = {place: piece for place, piece in task._found.items() if place < end}
        return task  # type: ignore[no-any-return]


class FindsWholeBlocks(Mutant, PiecesRetriever):
    """Looks where a block of the request begins."""

    breaks = "R02"

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        task: Any = super().new_request(input_tokens, query_start_loc)
        task._found = {place: piece for place, piece in task._found.items() if place % PIECE == 0}
        return task  # type: ignore[no-any-return]


class MixesLayers(_Spoils):
    """Counts them from one."""

    breaks = "R03"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        return task.task.result((layer + 1) % 3)


class TrustsZeros(_Spoils):
    """Counts tokens at position 0 as retrieved, though that is the position of invalid ones."""

    breaks = "R04"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        result = task.task.result(layer)
        return replace(result, valid_mask=result.valid_mask | (result.original_positions == 0))


class SortsTheTokens(Mutant, PiecesRetriever):
    """Sorts the caller's tokens in place."""

    breaks = "R05"

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        task = super().new_request(input_tokens, query_start_loc)
        input_tokens.copy_(input_tokens.sort().values)
        return task


class ReadsLayersInOrder(_Spoils):
    """Reads layers in order, whichever is asked for."""

    breaks = "R06"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        task.next = getattr(task, "next", -1) + 1  # type: ignore[attr-defined]
        return task.task.result(task.next % 3)  # type: ignore[attr-defined]


class SearchesTheBatch(Mutant, PiecesRetriever):
    """Treats it as one sequence."""

    breaks = "R07"

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        return super().new_request(input_tokens, query_start_loc[[0, -1]])


class SaysWhereTheyAre(_Spoils):
    """Returns the present positions, not those at which K was rotated."""

    breaks = "R08"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        result = task.task.result(layer)
        return replace(result, original_positions=torch.arange(len(result.valid_mask)) * result.valid_mask)


class KeepsTheRequest(_Spoils):
    """Keeps the last request on the retriever, where requests meet."""

    breaks = "R09"

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        task: Any = super().new_request(input_tokens, query_start_loc)
        self.last = task.task
        return task  # type: ignore[no-any-return]

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        return self.last.result(layer)  # type: ignore[no-any-return]


class ReadsIntoOneBuffer(_Spoils):
    """For each layer, of all requests."""

    breaks = "R10"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        result = task.task.result(layer)
        assert result.k is not None
        buffers = self.__dict__.setdefault("buffers", {})
        buffer = buffers.setdefault((layer, len(result.k)), torch.empty_like(result.k))
        return replace(result, k=buffer.copy_(result.k))


class HasTwentyTasks(_Spoils):
    """Serves twenty tasks at a time, and frees one only when its last layer is read."""

    breaks = "R11"

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        free = self.__dict__.setdefault("free", threading.Semaphore(20))
        if not free.acquire(blocking=False):
            raise RuntimeError("too many requests")
        return super().new_request(input_tokens, query_start_loc)

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        if layer == 2:
            self.__dict__["free"].release()
        return task.task.result(layer)


class ClosesOnce(Mutant, PiecesRetriever):
    """Raises at the second `close`."""

    breaks = "R12"

    def close(self) -> None:
        del self._pieces


class LooksUpEachLayer(Mutant, PiecesRetriever):
    """Looks up at the first layer instead of at the request."""

    breaks = "R13"

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        return _Anew(self, input_tokens.clone(), query_start_loc.clone())

    def now(self, tokens: torch.Tensor, starts: torch.Tensor) -> BlendRetrieverTask:
        return super().new_request(tokens, starts)


class _Anew(BlendRetrieverTask):
    def __init__(self, retriever: LooksUpEachLayer, tokens: torch.Tensor, starts: torch.Tensor) -> None:
        self._ask = lambda: retriever.now(tokens, starts)

    def result(self, layer_id: int) -> BlendRetrieverResult:
        return self._ask().result(layer_id)


class LosesALayer(_Spoils):
    """Does not report the loss beforehand."""

    breaks = "R13"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        result = task.task.result(layer)
        return replace(result, valid_mask=result.valid_mask & (layer < 2))


class TakesAllThreads(_Spoils):
    """Uses all of the process's threads for its copies."""

    breaks = "R14"

    def spoil(self, task: _Task, layer: int) -> BlendRetrieverResult:
        torch.set_num_threads(torch.get_num_threads() + 1)
        return task.task.result(layer)


class FindsHalf(Oddity, PiecesRetriever):
    """Finds half of the pieces it could: a hit is never guaranteed."""

    def add(self, tokens: torch.Tensor, kv: torch.Tensor) -> None:
        for start in range(0, len(tokens) - 2 * PIECE + 1, 2 * PIECE):
            piece = tuple(tokens[start : start + PIECE].tolist())
            self._pieces[piece] = (start, kv[:, :, start : start + PIECE].clone())


class FindsFromTheEnd(Oddity, PiecesRetriever):
    """Does the work of a task when its first result is asked for."""

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        return _Late(self, input_tokens.clone(), query_start_loc.clone())

    def now(self, tokens: torch.Tensor, starts: torch.Tensor) -> BlendRetrieverTask:
        return super().new_request(tokens, starts)


class _Late(BlendRetrieverTask):
    def __init__(self, retriever: FindsFromTheEnd, tokens: torch.Tensor, starts: torch.Tensor) -> None:
        self._ask = functools.cache(lambda: retriever.now(tokens, starts))

    def result(self, layer_id: int) -> BlendRetrieverResult:
        return self._ask().result(layer_id)
