"""Messages between the two halves, each step of vLLM. Plain values: they may go from process to process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt that may be blended."""

    request: str
    tokens: list[int]
    """Not to be changed: it may be the engine's own list."""
    salt: str | None
    boundaries: list[int] | None
    """The boundaries of its passages, if the client sends them."""


class Blend(NamedTuple):
    """A prompt's blocks in vLLM's pages, to be filled but for the last token."""

    request: str
    blocks: list[int]


@dataclass
class Orders:
    """From the scheduler's half to the worker's."""

    asked: list[Prompt] = field(default_factory=list)
    """Is enough of it stored?"""
    blends: list[Blend] = field(default_factory=list)
    """Prompts to blend, which were asked about before."""
    over: list[str] = field(default_factory=list)
    """Requests that are finished or dropped."""
    idle: bool = False
    """Nothing is computed in this step."""


@dataclass
class Report:
    """From the worker's half to the scheduler's: of prompts that were asked about, whether to blend them."""

    found: dict[str, bool] = field(default_factory=dict)
