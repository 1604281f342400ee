"""Messages between the scheduler's half and the workers: orders for each step, and reports on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloom import ChunkKey

from .plan import Step


@dataclass(slots=True)
class Report:
    """The workers' report after a step: one rank's, or several merged."""

    saved: Counter[int] = field(default_factory=Counter)
    """By number of the save, how many ranks are done reading."""
    came: dict[int, list[ChunkKey]] = field(default_factory=dict)
    """By rank, what its memory holds now and did not before."""
    left: dict[int, list[ChunkKey]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    """Ranks whose `came` is their complete content."""
    loaded: set[str] = field(default_factory=set)
    """Requests whose loads are over."""
    failed: set[str] = field(default_factory=set)
    """Those that did not get everything."""
    failures: dict[int, int] = field(default_factory=dict)
    """By rank, how many loads had failed by then."""
    ascertained: int = 0
    """The last `Step.uncertain` that is over."""

    def add(self, other: Report) -> Report:
        self.saved.update(other.saved)
        self.came |= other.came
        self.left |= other.left
        self.whole |= other.whole
        self.loaded |= other.loaded
        self.failed |= other.failed
        self.failures |= other.failures
        self.ascertained = max(self.ascertained, other.ascertained)
        return self

    def __bool__(self) -> bool:
        return bool(self.saved or self.came or self.left or self.whole or self.loaded or self.ascertained)


@dataclass(frozen=True, slots=True)
class Orders:
    """The scheduler's orders to the workers for a step."""

    step: Step
    failures: Mapping[int, int] = field(default_factory=dict)
    """By rank, failed loads that the scheduler knows of: saves planned without this knowledge are skipped."""
    clear: bool = False
    """Memory is to be emptied before anything else."""
    idle: bool = False
    """Nothing is computed in this step."""
    patient: bool = False
    """A request waits for what another engine is storing."""
