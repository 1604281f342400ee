"""Blend executors that are odd and right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvloom import BlendExecutor, BlendOutput, BlendRequest, BlendSession
from kvloom_testkit.mutants import Oddity
from kvloom_testkit.reference.executor import NoneExecutor, NoneSession
from kvloom_testkit.reference.full_executor import FullSession


class ComputesEverything(Oddity, BlendExecutor):
    """A blend that reuses nothing is slow, and right."""

    type = "kit_everything"

    def begin(self, request: BlendRequest) -> BlendSession:
        return FullSession()


class SelectsMoreAndMore(Oddity, BlendExecutor):
    """All in the first layer; from then on what must be."""

    type = "kit_late"

    def begin(self, request: BlendRequest) -> BlendSession:
        return _Late(request)


class _Late(NoneSession):
    def blend(self, layer_id: int, *arguments: Any) -> BlendOutput:  # type: ignore[override]
        if layer_id:
            return super().blend(layer_id, *arguments)
        everything, chosen = self._going, self._chosen
        self._chosen = everything
        output = super().blend(layer_id, *arguments)
        self._chosen = chosen
        return output


class KeepsWhatWasComputed(Oddity, BlendExecutor):
    """In the layer that selects, K and V of all tokens are fresh: they have been computed anyway."""

    type = "kit_fresh"

    def begin(self, request: BlendRequest) -> BlendSession:
        return _Fresh(request)


class _Fresh(NoneSession):
    def plan(self) -> None:
        """It wants to be handed everything."""

    def blend(self, layer_id: int, *arguments: Any) -> BlendOutput:  # type: ignore[override]
        output = super().blend(layer_id, *arguments)
        fresh_k, fresh_v = arguments[5], arguments[6]
        return output if layer_id else replace(output, k=fresh_k, v=fresh_v)


class ReusesWhatItMay(Oddity, NoneExecutor):
    """The reference itself."""
