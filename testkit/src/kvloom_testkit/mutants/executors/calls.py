"""Blend executors with a fault each."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

from kvloom import BlendOutput, BlendRequest, BlendSession
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.executor import NoneExecutor, NoneSession


class _Spoils(Mutant, NoneExecutor):
    """Its sessions are those of the reference, with `spoil` in between."""

    def begin(self, request: BlendRequest) -> BlendSession:
        return _Spoiled(self, NoneSession(request))

    @abstractmethod
    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        """The spoilt output of one layer."""


class _Spoiled(BlendSession):
    def __init__(self, executor: _Spoils, session: NoneSession) -> None:
        self._executor = executor
        self._session = session

    def blend(self, *arguments: Any) -> BlendOutput:  # type: ignore[override]
        return self._executor.spoil(self._session, arguments)


class CutsK(_Spoils):
    """To the selection, like Q."""

    breaks = "X01"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        return replace(output, k=output.k[: len(output.q)])


class CountsPositionsInFloats(_Spoils):
    """Like the rotation."""

    breaks = "X01"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        return replace(output, positions=output.positions.float())


class StartsInShorts(_Spoils):
    """Batches have grown since."""

    breaks = "X01"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        starts = output.query_start_loc
        return replace(output, query_start_loc=None if starts is None else starts.short())


class TakesQToBeAsWideAsK(_Spoils):
    """Knows no model whose heads share K and V."""

    breaks = "X01"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        return replace(output, q=torch.empty_like(output.k[: len(output.q)]).copy_(output.q[:, : output.k.shape[1]]))


class TrustsWhatIsInvalid(Mutant, NoneExecutor):
    """Selects by a number of tokens, whichever they are."""

    breaks = "X02"

    def begin(self, request: BlendRequest) -> BlendSession:
        return NoneSession(replace(request, valid_mask=request.valid_mask | True))


class KeepsRetrievedK(_Spoils):
    """Merges V, and forgets K."""

    breaks = "X03"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        return replace(session.blend(*arguments), k=arguments[1].clone())


class KeepsV(_Spoils):
    """Keeps the last layer's V for the tokens that are reused."""

    breaks = "X04"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        kept = getattr(session, "kept", output.v)
        session.kept = kept  # type: ignore[attr-defined]
        return replace(output, v=kept.index_copy(0, session._chosen, output.v[session._chosen]))  # type: ignore[attr-defined]


class SortsPositions(_Spoils):
    """By value, over all requests of the batch."""

    breaks = "X05"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        return replace(output, positions=output.positions.sort().values)


class WritesIntoTheCache(_Spoils):
    """Saves a copy."""

    breaks = "X06"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        arguments[1].copy_(output.k)
        return output


class SelectsByTopK(_Spoils):
    """And leaves the indices in the order of importance."""

    breaks = "X07"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        order = torch.arange(len(output.q) - 1, -1, -1)
        return replace(output, q=output.q[order], positions=output.positions[order],
                       local_indices=output.local_indices[order])  # fmt: skip


class PassesOnTheStarts(_Spoils):
    """Passes on the starts of the whole batch."""

    breaks = "X08"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        return replace(output, query_start_loc=arguments[9])


class KeepsTheSelection(Mutant, NoneExecutor):
    """Keeps the selection on the executor, where batches meet."""

    breaks = "X09"

    def begin(self, request: BlendRequest) -> BlendSession:
        self.current = NoneSession(request)
        return _Current(self)


class _Current(BlendSession):
    def __init__(self, executor: KeepsTheSelection) -> None:
        self._executor = executor

    def blend(self, *arguments: Any) -> BlendOutput:  # type: ignore[override]
        return self._executor.current.blend(*arguments)


class EmptiesItsCacheAtTheLastLayer(_Spoils):
    """A request that is cancelled never reaches the last layer."""

    breaks = "X10"
    _offset = 0

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        self._offset = 1 if arguments[0] == 0 else 0 if arguments[0] == 2 else self._offset
        if arguments[0] == 0 and getattr(self, "_cut", False):
            output = replace(output, v=output.v + 1)
        self._cut = self._offset == 1
        return output


class AlwaysReusesSome(Mutant, NoneExecutor):
    """Leaves tokens out even if nothing was retrieved."""

    breaks = "X11"

    def begin(self, request: BlendRequest) -> BlendSession:
        mask = request.valid_mask.clone()
        mask[: len(mask) // 2] = True
        return NoneSession(replace(request, valid_mask=mask))


class ForgetsTheLastToken(Mutant, NoneExecutor):
    """Drops it if it was retrieved."""

    breaks = "X12"

    def begin(self, request: BlendRequest) -> BlendSession:
        session = NoneSession(request)
        session._chosen = (~request.valid_mask).nonzero().flatten()
        return session


class MultipliesByTheMask(_Spoils):
    """NaN times zero is NaN."""

    breaks = "X13"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output, mask = session.blend(*arguments), arguments[3].unsqueeze(1)
        return replace(output, v=arguments[2] * mask + output.v * ~mask)


class SharesItsScratch(_Spoils):
    """Between threads."""

    breaks = "X14"

    def __init__(self, config: Any, spec: Any = None) -> None:
        super().__init__(config, spec)
        self._busy = 0

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        import time

        self._busy += 1
        time.sleep(0.002)  # for the others to come
        output = session.blend(*arguments)
        disturbed, self._busy = self._busy > 1, self._busy - 1
        return replace(output, v=output.v + 1) if disturbed else output


class ClosesOnce(Mutant, NoneExecutor):
    """Raises at the second `close`."""

    breaks = "X15"

    def close(self) -> None:
        del self.config


class ComparesDimensions(_Spoils):
    """Finds the tokens' dimension by counting from the first."""

    breaks = "X16"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        output = session.blend(*arguments)
        index = tuple(output.local_indices if dim == arguments[10] else slice(None) for dim in range(2))
        return replace(output, q=arguments[5][index])


class SwitchesGradientsOff(_Spoils):
    """Switches gradients off and never on again."""

    breaks = "X17"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        torch.set_grad_enabled(False)
        return session.blend(*arguments)


class DrawsFromTheProcess(_Spoils):
    """Breaks ties by random numbers that the model samples with."""

    breaks = "X17"

    def spoil(self, session: BlendSession, arguments: tuple[Any, ...]) -> BlendOutput:
        torch.rand(1)
        return session.blend(*arguments)


class PlansWhatIsInvalidOnly(Mutant, NoneExecutor):
    """Plans invalid tokens only, without the last token of each request."""

    breaks = "X18"

    def begin(self, request: BlendRequest) -> BlendSession:
        class Session(NoneSession):
            def plan(self) -> torch.Tensor | None:
                super().plan()
                return ~request.valid_mask

        return Session(request)


class TakesItsPlanForTheBatch(Mutant, NoneExecutor):
    """Plans a selection, but counts rows of the first layer as if all tokens were computed."""

    breaks = "X18"

    def begin(self, request: BlendRequest) -> BlendSession:
        class Session(NoneSession):
            def plan(self) -> torch.Tensor | None:
                everyone = self._going
                planned = super().plan()
                self._going = everyone
                return planned

        return Session(request)
