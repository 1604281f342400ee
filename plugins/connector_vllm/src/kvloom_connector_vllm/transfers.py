"""Loads and saves of the worker's half, and the changes of memory that it reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from time import monotonic
from typing import Any

from kvloom import ChunkKey, Engine, Segment, Task, one_line
from kvloom.device import StreamEvent

from .names import Names
from .paged.layers import LayerEvents
from .scheduling.messages import Report
from .scheduling.plan import Move

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Part:
    """KV of one group of layers that has chunks of its own: all of a rank's, or some of its heads."""

    engine: Engine
    names: Names
    block_tokens: int
    memory: Mapping[str, Any] = field(default_factory=dict)
    """The words of the connector's `where` for the engine's memory; set by `Worker.attach`."""


class Transfer:
    """A load or save that was ordered, of one part of a group."""

    __slots__ = (
        "_beginning", "_begun", "cancelled", "cut_off", "failed", "layers", "move", "over", "part", "ready", "segments",
        "task",
    )  # fmt: skip

    def __init__(self, move: Move, part: Part) -> None:
        self.move = move
        self.part = part
        self.segments: Sequence[Segment] = ()
        self.task: Task | None = None
        """None if it has not begun. Once it is over: if it never did."""
        self.layers: LayerEvents | None = None
        """Set for a load during which the step computes."""
        self.ready: StreamEvent | None = None
        """Set for a save on a device: it reads what had been queued there by then."""
        self.over = Event()
        self.cancelled = False
        self.cut_off = False
        """It was cancelled, and its request still needs it."""
        self.failed = False
        """It could not begin."""
        self._beginning = Lock()
        self._begun = Event()

    def begin(self, start: Callable[[], Task]) -> Task | None:
        """Start it, unless it was cancelled."""
        with self._beginning:
            if not self.cancelled:
                self.task = start()
                self._begun.set()
            return self.task

    def wait_for_copies(self, until: float, *, stalled: float) -> bool:
        """Return whether this save has copied all by `until`. stalled: see `Task.wait_for_copies`."""
        if not self._begun.wait(max(0.0, until - monotonic())):
            return False
        task = self.task
        return task is None or task.wait_for_copies(max(0.0, until - monotonic()), stalled=stalled)

    def cancel(self) -> None:
        """Once this has returned, it does not touch the engine's KV any more."""
        with self._beginning:
            self.cancelled = True
        if self.task is None:
            self.end()
        else:
            self.task.cancel()

    def end(self) -> None:
        """Nobody waits for it any longer."""
        if self.layers is not None:
            self.layers.end()
        self.over.set()
        self._begun.set()

    def missing(self) -> set[int]:
        """The blocks of a load that is over that did not get their KV, if its request still wants it."""
        move, mask = self.move, None
        if self.cut_off:
            return set(move.blocks) - {-1}
        if self.cancelled or (self.task is None and not self.failed):
            return set()
        try:
            mask = None if self.task is None else self.task.result().tolist()
        except Exception as error:  # whatever it was, the engine computes these blocks itself
            log.warning("a load for request %s failed: %s", one_line(move.request), one_line(error))
        if self.layers is not None and self.layers.skipped is not None:
            log.error("layer %d was computed without a wait for its KV; set by_layer to false", self.layers.skipped)
            mask = None
        if mask is None:
            return set(move.blocks) - {-1}
        tokens, missing = self.part.block_tokens, set[int]()
        for segment, here in zip(self.segments, mask, strict=True):
            if not here:
                begin, end = segment.start // tokens, segment.end // tokens
                missing.update(move.blocks[begin - move.first_block : end - move.first_block])
        return missing - {-1}


class MemoryChanges:
    """Chunks that came into memory and left it, since the scheduler was last told."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = Lock()
        self._came: dict[ChunkKey, None] = {}
        self._left: dict[ChunkKey, None] = {}
        self._whole = False

    def collect(self) -> None:
        with self._lock:  # the engine gives each change once: two callers must not swap theirs
            changes = self._engine.changes()
            if changes.whole:
                self._whole = True
                self._came, self._left = {}, {}
            for key in changes.left:
                self._came.pop(key, None)
                self._left[key] = None
            for key in changes.came:
                self._left.pop(key, None)
                self._came[key] = None

    def move_to(self, report: Report, rank: int) -> None:
        with self._lock:
            came, left, whole = self._came, self._left, self._whole
            self._came, self._left, self._whole = {}, {}, False
        if whole:
            report.whole.add(rank)
        if came or whole:
            report.came[rank] = list(came)
        if left:
            report.left[rank] = list(left)
