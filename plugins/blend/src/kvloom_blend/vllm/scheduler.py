"""The scheduler's half: decides which prompts are blended. Imports nothing of vLLM.

Only the worker's half has the tiers, so only it knows how much of a prompt is stored. The scheduler asks in one step
and has the answer in the next; until then the request waits while others compute.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

from .orders import Blend, Orders, Prompt, Report

ANSWER_SECONDS = 5.0
"""Maximum time that a request waits for an answer; then vLLM computes it."""


class _State(Enum):
    ASKED = 1
    FOUND = 2
    SETTLED = 3
    """It is being blended, or was, or vLLM computes it. Nothing is blended twice: what failed once may fail again."""


class Scheduler:
    """The scheduler's half of one engine. All calls come from vLLM's scheduler."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._since: dict[str, float] = {}
        self._orders = Orders()
        self._stopped = False

    def matched(self, prompt: Prompt) -> int | None:
        """The number of tokens of a prompt that will be blended: all but the last one, or 0. None: not known yet."""
        state = self._states.get(prompt.request)
        if self._stopped:
            return 0
        if state is None:
            self._states[prompt.request] = _State.ASKED
            self._since[prompt.request] = time.monotonic()
            self._orders.asked.append(prompt)
            return None
        if state is _State.ASKED:
            if time.monotonic() - self._since[prompt.request] < ANSWER_SECONDS:
                return None
            self._settle(prompt.request, over=True)
            return 0
        return len(prompt.tokens) - 1 if state is _State.FOUND else 0

    def load(self, request: str, blocks: list[int]) -> None:
        """vLLM has given a request blocks to be blended into."""
        if self._states.get(request) is _State.FOUND:
            self._settle(request, over=False)
            self._orders.blends.append(Blend(request, blocks))

    def report(self, report: Report) -> None:
        for request, found in report.found.items():
            if self._states.get(request) is _State.ASKED:
                if found:
                    self._states[request] = _State.FOUND
                else:
                    self._settle(request, over=False)

    def end(self, request: str) -> None:
        """It has finished, or was aborted: nothing is wanted of it."""
        if self._states.pop(request, None) is not None:
            self._since.pop(request, None)
            self._orders.over.append(request)

    def orders(self, *, idle: bool) -> Orders:
        """Orders since the last call."""
        orders, self._orders = self._orders, Orders()
        orders.idle = idle
        return orders

    def stop(self) -> None:
        """Blend nothing any more."""
        self._stopped = True

    def _settle(self, request: str, *, over: bool) -> None:
        self._states[request] = _State.SETTLED
        self._since.pop(request, None)
        if over:
            self._orders.over.append(request)


def boundaries_of(params: Any, num_tokens: int) -> list[int] | None:
    """The passage boundaries that a client sends, if they are valid. vLLM's scheduler waits for this in each step.

    params: the request's `kv_transfer_params`. num_tokens: of its prompt.
    """
    given = params.get("kvloom_boundaries") if isinstance(params, dict) else None
    if not isinstance(given, list) or len(given) > num_tokens + 1:
        return None
    if not all(type(one) is int and 0 <= one <= num_tokens for one in given):
        return None
    return sorted(given)
