"""An engine's background work: tasks that load, save and prefetch, on threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvloom.contracts.observer import Event
from kvloom.device import CurrentStreams
from kvloom.errors import BackendError
from kvloom.pipeline.task import Stalls, Task
from kvloom.runtime import Runtime, Workers
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.request_trace import RequestTrace
from kvloom.types import Segment, tokens_of

THREADS = 4
"""Number of threads for saves and prefetches, and of those for loads."""
MOST_TASKS = 1024
"""Maximum number of tasks that wait or run. A task beyond it ends at once, with nothing moved."""


class Background:
    """The tasks of one engine that are not over yet."""

    def __init__(self, engine: object, events: EventBus, runtime: Runtime) -> None:
        self._engine = engine  # work under way keeps the engine alive, so that it is closed before the process ends
        self.workers = Workers(runtime, name="kvloom-engine", threads=THREADS)
        self._stalls = Stalls(runtime, THREADS)
        self.loaders = Workers(runtime, name="kvloom-load", threads=THREADS)
        """Threads for loads only, so that no load queues behind saves that wait for room."""
        self._events = events
        self._runtime = runtime
        self._tasks: dict[Task, bool] = {}
        """The tasks under way; True for one that prefetches, which `close` cancels."""
        self._waiting: dict[Task, Event] = {}
        """Saves that have not begun, each with the event to emit if it never does."""

    def start(
        self, segments: Sequence[Segment], work: Callable[[Task], torch.Tensor], record: RequestTrace, *,
        awaited: bool = False, ahead: bool = False,
    ) -> Task:  # fmt: skip
        """Begin `work`, which returns a bool for each segment. awaited: a caller waits for it. ahead: it
        prefetches, and `close` cancels it.

        With `MOST_TASKS` under way, or without a thread, it ends at once with nothing moved, and counts as dropped.
        """
        task, streams = Task(self._runtime, self._stalls), CurrentStreams()
        num_tokens = tokens_of(segments)

        def dropped(reason: str) -> Task:
            self._events.emit(Event("dropped", tokens=num_tokens, chunks=len(segments), reason=reason))
            task.run(lambda _: torch.zeros(len(segments), dtype=torch.bool))
            record.end()
            return task

        if len(self._tasks) >= MOST_TASKS:
            return dropped("too many tasks")
        self._tasks[task] = ahead
        if not awaited and not ahead:
            reason = "closed before it was stored"
            self._waiting[task] = Event("dropped", tokens=num_tokens, chunks=len(segments), reason=reason)

        def on_streams(task: Task) -> torch.Tensor:
            with streams.current():
                return work(task)

        def run() -> None:
            self._waiting.pop(task, None)
            task.run(on_streams)
            self._tasks.pop(task, None)

        try:
            (self.loaders if awaited else self.workers).submit(run)
        except BackendError:
            self._waiting.pop(task, None)
            self._tasks.pop(task, None)
            return dropped("no thread")
        return task

    def after_fork_in_child(self, error: BaseException) -> None:
        """In a forked child: cancel everything, because the parent's threads do not exist here."""
        for task in tuple(self._tasks):
            task.after_fork_in_child(error)

    def close(self, seconds: float, error: BaseException) -> None:
        """Finish saves and wait for loads under way, up to `seconds` each; cancel the rest with `error`."""
        for task, ahead in tuple(self._tasks.items()):
            if ahead:
                task.cancel()
        self.loaders.close(seconds)
        self.workers.close(seconds, finish=True)
        for event in tuple(self._waiting.values()):
            self._events.emit(event)
        for task in tuple(self._tasks):
            task.cancel()
            task.fail(error)
