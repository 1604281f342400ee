"""Traces of requests, recorded while they run, for observers that see requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.contracts.observer import Request, Step
from kvloom.types import tokens_of

if TYPE_CHECKING:
    from kvloom.runtime import Runtime
    from kvloom.telemetry.events import Callers, EventBus
    from kvloom.types import Segment


class RequestTrace:
    """The trace of a request that no observer wants to see: does nothing."""

    served_tokens = 0
    """Number of tokens delivered or stored. Set it before the end."""

    def now(self) -> float:
        """The time at which a step begins or ends, for `note`. Without a trace no clock is read."""
        return 0.0

    def note(
        self, name: str, tier: str, began: float, ended: float, *, nbytes: int, chunks: int = 1, codec: str = ""
    ) -> None:
        """Record a step. From any thread."""

    def gave(self, tier: str, tokens: int) -> None:
        """Record that a tier delivered this many tokens."""

    def found(self, pieces: Sequence[Segment]) -> None:
        """Record the pieces that are delivered in place of a chunk that no tier has."""

    def hold(self) -> None:
        """Mark that a part continues after the call has ended; call `release` when it is over."""

    def release(self) -> None: ...

    def end(self, error: BaseException | None = None) -> None:
        """Mark that the call, or its task, is over. Once. error: the raised error."""

    @contextmanager
    def going_on(self) -> Iterator[RequestTrace]:
        """A context that lasts as long as the verb, or its task."""
        try:
            yield self
        except BaseException as error:
            self.end(error)
            raise
        self.end()


NO_TRACE = RequestTrace()


@dataclass(slots=True)
class _Sum:
    """The sum of the steps of one kind in one tier."""

    began: float
    ended: float
    busy: float = 0.0
    chunks: int = 0
    bytes: int = 0


class OpenRequestTrace(RequestTrace):
    """The trace of a running request. Observers are notified once it and all its writes are over."""

    def __init__(
        self, verb: str, segments: Sequence[Segment], *, first: int, num_tokens: int, chunk_tokens: int,
        events: EventBus, callers: Callers, runtime: Runtime,
    ) -> None:  # fmt: skip
        """segments: the whole chain; those from `first` on are selected. callers: from the caller's thread."""
        self._verb = verb
        self._segments = segments
        self._first = first
        self._num_tokens = num_tokens
        self._chunk_tokens = chunk_tokens
        self._events = events
        self._now = runtime.now
        self._began = runtime.now()
        self._wall = runtime.wall() - self._began
        self._callers = callers
        self._changing = runtime.lock()
        self._sums: dict[tuple[str, str, str], _Sum] = {}
        self._sources: dict[str, int] = {}
        self._seconds = 0.0
        self._error = ""
        self._pieces: tuple[Segment, ...] = ()
        self._held = 1
        self.served_tokens = 0

    def now(self) -> float:
        return self._now()

    def note(
        self, name: str, tier: str, began: float, ended: float, *, nbytes: int, chunks: int = 1, codec: str = ""
    ) -> None:
        with self._changing:
            one = self._sums.setdefault((name, tier, codec), _Sum(began, ended))
            one.began, one.ended = min(one.began, began), max(one.ended, ended)
            one.busy += ended - began
            one.chunks += chunks
            one.bytes += nbytes

    def gave(self, tier: str, tokens: int) -> None:
        with self._changing:
            self._sources[tier] = self._sources.get(tier, 0) + tokens

    def found(self, pieces: Sequence[Segment]) -> None:
        self._pieces = tuple(pieces)

    def hold(self) -> None:
        with self._changing:
            self._held += 1

    def release(self) -> None:
        with self._changing:
            self._held -= 1
            over = self._held == 0
        if over:
            self._events.emit_request(self._request(), self._callers)

    def end(self, error: BaseException | None = None) -> None:
        self._seconds = self._now() - self._began
        self._error = "" if error is None else type(error).__name__
        self.release()

    def _request(self) -> Request:
        selected = self._segments[self._first :]
        return Request(
            self._verb,
            self._wall + self._began,
            self._seconds,
            tokens_of(selected),
            self.served_tokens,
            tuple(segment.key for segment in self._segments),
            tuple(segment.end for segment in self._segments),
            self._first,
            self._num_tokens,
            self._chunk_tokens,
            dict(self._sources),
            tuple(
                Step(name, tier, self._wall + one.began, one.ended - one.began, one.busy, one.chunks, one.bytes, codec)
                for (name, tier, codec), one in self._sums.items()
            ),
            self._error,
            self._pieces,
        )  # fmt: skip
