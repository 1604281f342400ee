"""Looks up what the tiers hold, and moves nothing: the half of an engine that a scheduler needs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

import torch

from kvloom import keys as keying
from kvloom.contracts.observer import ChunkEvent, CounterKey, Totals
from kvloom.contracts.tokens import TokenDatabase
from kvloom.engine.assembly import Components
from kvloom.errors import BackendError
from kvloom.forks import notify_after_fork
from kvloom.interrupts import shielded_waiting
from kvloom.pipeline.load import Pieces
from kvloom.runtime import close_all
from kvloom.telemetry.events import Callers
from kvloom.telemetry.request_trace import NO_TRACE, OpenRequestTrace, RequestTrace
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.tier import Tier
from kvloom.types import Health, Hit, Segment


class _View:
    """An observer's view of an engine, for as long as the engine exists."""

    def __init__(self, engine: Index) -> None:
        self.instance_id = engine.config.instance_id
        self.fingerprint = engine.fingerprint
        self.spec = engine.spec
        self._stack = weakref.ref(engine._stack)
        self._events = weakref.ref(engine._events)
        self._runtime = engine._runtime

    @shielded_waiting
    def health(self) -> Health:
        stack = self._stack()
        return Health(()) if stack is None else stack.health()

    @shielded_waiting
    def counters(self) -> Mapping[CounterKey, Totals]:
        events = self._events()
        return {} if events is None else events.counters()


class Index:
    """Forecasts of what an engine would retrieve. `Engine.open(..., role="index")` gives one.

    It holds no KV and asks the tiers that other processes share. Where ranks hold parts of the KV, a chunk counts as
    stored once every rank has stored its part.

    tokens: 1-D, of any integer dtype, on the CPU: one sequence. mask: bool, as long as `tokens`, like FFFFTTTT, its
    Falses a whole number of chunks; None selects everything. salt: keeps tenants apart; default is the config's.
    search_range: names of tiers.

    Every method raises BackendError once it is closed, and in a child of the process that opened it.
    """

    def __init__(self, parts: Components) -> None:
        """Use `Engine.open`."""
        connector = parts.connector
        self.config = parts.config
        self.spec = parts.spec
        self.connector = connector
        self.fingerprint = keying.fingerprint(parts.spec, connector.format, connector.representation)
        self._tokens = parts.tokens
        self._learns = type(parts.tokens).learn is not TokenDatabase.learn
        self._has_pieces = type(parts.tokens).pieces is not TokenDatabase.pieces
        self._others = tuple(database for _, database in parts.others)
        for its_spec, database in ((parts.spec, parts.tokens), *parts.others):
            database.fingerprint = keying.fingerprint(its_spec, connector.format, connector.representation)
            database.chunk_tokens = parts.config.chunk_tokens
            database.save_tails = parts.config.save_tails
        self._stack = parts.stack
        self._events = parts.events
        self._runtime = parts.runtime
        self._closed = False
        self._gone = ""
        self._not_at_exit: Callable[[], None] = lambda: None
        notify_after_fork(self)

    def _attach_observers(self) -> Self:
        """Attach the observers, once all is open; if one raises, close everything and raise.

        From here on the end of the process closes it too.
        """
        try:
            self._events.watch(_View(self))
        except BaseException:
            self.close()
            raise
        self._not_at_exit = self._runtime.at_exit(self.close)
        return self

    def after_fork_in_child(self, pid: int) -> None:
        """In a forked child: refuse every verb, and have nothing to close."""
        self._closed = True
        self._gone = self._gone or f"this engine was opened in process {pid}; open one in this process"

    @shielded_waiting
    def close(self) -> None:
        """Release everything. Idempotent. An interrupted caller returns at once; closing continues without it."""
        if not self._closed:
            self._closed = True
            self._not_at_exit()
            others = [database.close for database in self._others]
            close_all(self.connector.close, self._tokens.close, *others, self._stack.close, self._events.close)

    def __repr__(self) -> str:
        """The model, and the chunks, bytes and state of each tier."""
        about = f"<{type(self).__name__} {self.spec.model!r}, {self.chunk_tokens} tokens a chunk"
        if self._closed:
            return f"{about}, closed>"
        tiers = [f"{one.name} {one.blobs:,} chunks {one.bytes:,} bytes {one.state}" for one in self.health().tiers]
        return f"{about}; {'; '.join(tiers)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """The tiers by name, in the config's order, for work at the level of chunks."""
        self._check_here()
        return self._stack.tiers

    @property
    def salt(self) -> str:
        """The configured salt, which verbs use where none is given."""
        return self.config.salt

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens in a chunk."""
        return self.config.chunk_tokens

    @shielded_waiting
    def health(self) -> Health:
        """The state of the tiers: paused ones with the reason, content, hanging calls. Asks no backend."""
        self._check_here()
        return self._stack.health()

    @shielded_waiting
    def counters(self) -> Mapping[CounterKey, Totals]:
        """Counters so far: (event, tier, reason) to its totals."""
        self._check_here()
        return self._events.counters()

    def lookup(
        self, tokens: torch.Tensor, search_range: Sequence[str] | None = None, *, salt: str | None = None
    ) -> Hit:
        """Count the leading tokens that the tiers report. Reads no KV, changes nothing; a paused tier has nothing.

        search_range: names of tiers to ask. Raises ValueError if there is no such tier, TypeError if it is one string.
        """
        self._check_names(search_range)
        segments = self.segments(tokens, salt=salt)
        keys = [key for _, _, key in segments]
        if not self._events.sees_requests and not self._others and self._stack.all_in_memory(keys, search_range):
            end = segments[-1].end if segments else 0
            return Hit(end, {self._stack.memory.name: end} if end else {})
        return self._lookup(self._callers(), segments, tokens, search_range, salt)

    @shielded_waiting
    def _lookup(
        self, callers: Callers, segments: Sequence[Segment], tokens: torch.Tensor, search_range: Sequence[str] | None,
        salt: str | None,
    ) -> Hit:  # fmt: skip
        with self._record("lookup", segments, 0, tokens, callers=callers).going_on() as record:
            hit = self._reached(segments, tokens, search_range, salt, record)
            record.served_tokens = hit.tokens
            for name, count in hit.by_tier.items():
                record.gave(name, count)
            return hit

    def _reached(
        self, segments: Sequence[Segment], tokens: torch.Tensor, search_range: Sequence[str] | None, salt: str | None,
        record: RequestTrace,
    ) -> Hit:  # fmt: skip
        """Look up the segments and, if one is missing, the pieces that shorter sequences may have left of it."""
        every = [segments, *(other.segments(tokens, salt=self._salt(salt)) for other in self._others)]
        context = self._stack.context()  # one deadline for both questions
        if self._has_pieces:
            self._stack.loader.leave_time_for_pieces(context)
        located = self._located(every, search_range, context)
        if None in located:
            lacking = located.index(None)
            start = segments[lacking].start
            every = [one.pieces(tokens, start, salt=self._salt(salt)) for one in (self._tokens, *self._others)]
            context.keep_back(0)
            there = zip(every[0], self._located(every, search_range, context), strict=True)
            tiers = {piece: name for piece, name in there if name is not None}
            path = keying.leading(tiers, start)
            record.found(path)
            segments = [*segments[:lacking], *path]
            located = [*located[:lacking], *(tiers[piece] for piece in path)]
        return _hit(segments, located)

    def _pieces(self, tokens: torch.Tensor, salt: str | None) -> Pieces:
        """A function that names the pieces that shorter sequences may have left of a segment of these tokens."""
        return lambda segment: self._tokens.pieces(tokens, segment.start, salt=self._salt(salt))

    def _located(
        self, every: Sequence[Sequence[Segment]], search_range: Sequence[str] | None, context: RequestContext
    ) -> list[str | None]:
        """The tier of each segment; None unless every rank has its part of it. every: the segments of each rank."""
        count = len(every[0])
        located = self._stack.locate([key for some in every for _, _, key in some], search_range, context)  # in one go
        if len(every) > 1:
            located = [None if None in located[i::count] else located[i] for i in range(count)]
        return located

    def segments(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str | None = None
    ) -> list[Segment]:
        """The segments of the selected tokens, with their keys. Raises ValueError for a mask that fits no chunks."""
        self._check_open()
        cut = partial(self._tokens.segments, tokens, mask, salt=self._salt(salt))
        # A database that does not learn has no state that an interrupt could leave half-changed.
        return self._runtime.uninterrupted(cut, leave=True) if self._learns else cut()

    def passage(
        self, tokens: torch.Tensor, *, lead: Sequence[int] = (), context: str = "", salt: str | None = None
    ) -> list[Segment]:
        """The segments of a text that is known by its own tokens, wherever they stand: what blending reuses.

        Starts count from its first token; a short tail is a segment too. lead: the tokens that stood before it when
        its KV was computed (a BOS). context: a word for what else its KV depends on. No prompt is ever answered with
        KV under these keys: `retrieve` has others.
        """
        self._check_open()
        return keying.passage(
            tokens, chunk_tokens=self.config.chunk_tokens, fingerprint=self.fingerprint, salt=self._salt(salt),
            lead=lead, context=context,
        )  # fmt: skip

    def find(
        self, segments: Sequence[Segment], search_range: Sequence[str] | None = None, *, timeout: float | None = None
    ) -> torch.Tensor:
        """Find the segments that the tiers report: a bool mask with one entry per segment, gaps included.

        timeout: seconds, as for `locate`. Raises ValueError and TypeError as that does.
        """
        located = self.locate(segments, search_range, timeout=timeout)
        return torch.tensor([name is not None for name in located], dtype=torch.bool)

    def locate(
        self, segments: Sequence[Segment], search_range: Sequence[str] | None = None, *, timeout: float | None = None
    ) -> list[str | None]:
        """The name of the fastest tier that says it holds each segment, or None.

        timeout: seconds in which all tiers together are to answer, at most their longest deadline, which is the
        default. A tier that has not answered by then counts as one without the segments. Raises as `lookup` does:
        ValueError if there is no such tier, TypeError if `search_range` is one string.
        """
        self._check_open()
        self._check_names(search_range)
        keys = [segment.key for segment in segments]
        if self._stack.all_in_memory(keys, search_range):
            return [self._stack.memory.name] * len(keys)
        seconds = math.inf if timeout is None else timeout

        def ask() -> list[str | None]:
            return self._stack.locate(keys, search_range, self._stack.context(seconds=seconds))

        return self._runtime.uninterrupted(ask, leave=True)

    def _named(self, tokens: torch.Tensor, salt: str | None) -> list[Segment]:
        """The segments of tokens that are to be moved. Emits them to observers of chunks."""
        whole = self.segments(tokens, salt=salt)
        if self._events.sees_chunks:
            # A piece that leaves while the chunk with the same tokens stays would look as if these tokens had left.
            size = self.chunk_tokens if self._has_pieces else 0
            named = tuple(one for one in whole if one.end - one.start >= size)
            if named:
                data = keying.int32_tokens(tokens)[: named[-1].end].tobytes()
                self._events.emit_chunks(ChunkEvent("named", segments=named, tokens=data))
        return whole

    def _selected(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, salt: str | None, *, inside: bool = False
    ) -> tuple[list[Segment], int]:
        """All segments of the tokens, and the index of the first that the mask selects.

        The Falses of a hit may end within a segment, behind a piece of it. The first is then that segment if `inside`;
        else none is selected.
        """
        whole = self._named(tokens, salt)
        try:
            return whole, keying.select(whole, mask, tokens.numel())
        except ValueError:
            if mask is None or not self._has_pieces or tuple(mask.shape) != (tokens.numel(),):
                raise
            skipped = tokens.numel() - int(mask.count_nonzero())
            shorter = self.segments(tokens[:skipped], salt=salt)
            if not bool(mask[skipped:].all()) or not shorter or shorter[-1].end != skipped:
                raise
            first = next(index for index, segment in enumerate(whole) if segment.end > skipped)
            return whole, first if inside else len(whole)

    def _callers(self) -> Callers:
        """The values that the observers remember about this thread, on which a request begins."""
        return self._events.callers() if self._events.sees_requests else ()

    def _record(
        self, verb: str, segments: Sequence[Segment], first: int = 0, tokens: torch.Tensor | None = None, *,
        callers: Callers,
    ) -> RequestTrace:  # fmt: skip
        """The trace of a request that begins now. first: index of the first selected segment. tokens: all of them."""
        if not self._events.sees_requests:
            return NO_TRACE
        num_tokens = tokens.numel() if tokens is not None else segments[-1].end if segments else 0
        return OpenRequestTrace(
            verb, segments, first=first, num_tokens=num_tokens, chunk_tokens=self.config.chunk_tokens,
            events=self._events, callers=callers, runtime=self._runtime,
        )  # fmt: skip

    def _salt(self, salt: str | None) -> str:
        return self.config.salt if salt is None else salt

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError(self._gone or "the engine is closed")

    def _check_here(self) -> None:
        if self._gone:
            raise BackendError(self._gone)

    def _check_names(self, names: Sequence[str] | None) -> None:
        if isinstance(names, str):
            raise TypeError(f"search_range: expected a list of tier names, got {names!r}; write [{names!r}]")
        unknown = [name for name in names or () if name not in self._stack.tiers]
        if unknown:
            raise ValueError(f"search_range: no tier {unknown[0]!r}; this engine has {', '.join(self._stack.tiers)}")


def _hit(segments: Sequence[Segment], located: Sequence[str | None]) -> Hit:
    """The hit: the tokens of the leading segments that a tier has, by tier."""
    hit = 0
    by_tier: dict[str, int] = {}
    for (start, end, _), name in zip(segments, located, strict=True):
        if name is None:
            break
        hit = end
        by_tier[name] = by_tier.get(name, 0) + end - start
    return Hit(hit, by_tier)
