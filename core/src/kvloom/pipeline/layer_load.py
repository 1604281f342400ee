"""Loading: KV on its way into the engine's KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch

from kvloom.bounded import one_line
from kvloom.contracts.connector import Fence, GPUConnector
from kvloom.contracts.observer import Event
from kvloom.device import CurrentStreams
from kvloom.errors import BackendError
from kvloom.interrupts import shielded, shielded_waiting
from kvloom.pipeline.layer_read import LayerRead, Part
from kvloom.pipeline.load import BEHIND, Pieces
from kvloom.pipeline.stack import Stack
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import Chain
from kvloom.types import ChunkKey, Segment

log = logging.getLogger(__name__)


class Loading:
    """KV on its way into the engine's KV, layer by layer. From `Engine.retrieve_layer` and `Engine.load_layers`.

    It runs by itself, at the speed of the tiers; nothing waits for the caller. Each layer of each chunk is verified
    before it is written into the engine's KV.

    `wait(layer)` gives a mask over the tokens: whose KV of this layer and of every layer before it is there. It is a
    prefix of the selected segments, and never grows from layer to layer. It shrinks where a tier turns out not to have
    what it said (corrupt, gone, late), and says so before the layer is used. What the engine has to do then:

    - The tokens that mask lacks are the caller's from the return of `wait` on: nothing writes to them any more.
    - They must be computed from layer 0 on, for nobody has their hidden states at this layer. An engine that cannot
      take tokens into a pass that is under way gives that pass up, keeps the tokens of this mask, and begins again
      behind them; what it has computed so far for later tokens is void, since it was to attend to the lost ones.
    - An engine that can do neither waits for `result()` before it begins, and loses only the overlap.

    A token that the last mask lacks may have KV in some layers all the same. It is right, but there is no promise.
    """

    def __init__(
        self, segments: Sequence[Segment], num_tokens: int, where: Mapping[str, Any], *, chain: Sequence[ChunkKey],
        stack: Stack, connector: GPUConnector, events: EventBus, runtime: Runtime, on_end: Callable[[Loading], None],
        record: RequestTrace = NO_TRACE, pieces: Pieces | None = None,
    ) -> None:  # fmt: skip
        """Use `Engine.retrieve_layer`."""
        self._asked = segments
        self._num_tokens = num_tokens
        self._where = where
        self._chain = chain
        self._stack = stack
        self._connector = connector
        self._events = events
        self._runtime = runtime
        self._on_end = on_end
        # Held while the engine's KV is written, so that whoever ends this waits for a copy but never for a tier.
        self._writing = runtime.lock()
        self._changed = runtime.condition()
        self._context = stack.context(Chain(chain), record)
        self._ended = False
        self._ready = 0
        self._error: BaseException | None = None
        self._fetch = LayerRead(
            stack, segments, connector.shape, self._context, runtime=runtime, events=events, pieces=pieces
        )
        self._segments = self._fetch.segments
        self._ends = list(accumulate(segment.end - segment.start for segment in self._segments))
        """Tokens of each segment and of those before it."""
        self._prefix = self._fetch.prefix
        self._moved = [0] * self._prefix.count(0)
        """Number of leading layers of each chunk that are in the engine's KV."""
        self.hit = self._fetch.hit
        """The forecast: how many leading selected tokens the tiers said they hold, before anything was read.

        Where faster tiers hold the first of them, one that has not answered within a tenth of its deadline has none.
        """
        self.num_layers = self._fetch.num_layers

    def begin(self) -> None:
        """Called once, by the engine."""
        run = partial(self._run, CurrentStreams())
        if self.hit.tokens:
            try:
                self._runtime.spawn(run, name="kvloom-layers")
                return
            except RuntimeError as error:  # the machine has no more threads
                log.warning("layers are loaded before the caller goes on: %s", one_line(error))
        run()

    def wait(self, layer: int) -> torch.Tensor:
        """Return a bool CPU mask `[tokens]`: True if the engine has the KV of `layer` and of all layers before it.

        Waits no longer than the deadline of the slowest tier; what is not there by then counts as lost. Raises
        BackendError if this was closed before, ValueError if there is no such layer, and what the connector raised.
        """
        return self._mask_of(layer, patient=False)

    def _mask_of(self, layer: int, *, patient: bool) -> torch.Tensor:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer: {layer} of {self.num_layers}")
        if self._ready <= layer:
            self._wait(layer, patient=patient)
        return self._mask(self._prefix.count(layer))

    @shielded_waiting
    def _wait(self, layer: int, *, patient: bool) -> None:
        """patient: longer than a deadline, as long as something arrives within each."""
        until = self._runtime.now() + self._stack.deadline
        with self._changed:
            while self._ready <= layer and not self._ended:
                left = (max(until, self._context.until) if patient else until) - self._runtime.now()
                if left <= 0:
                    break
                self._changed.wait(min(left, 3600.0))
        if self._ready <= layer:
            if self._error is not None:
                raise self._error
            if self._ended or self._context.given_up:
                raise BackendError("the loading was closed")
            self._cut(layer)

    def result(self) -> torch.Tensor:
        """The mask of the last layer, bool `[tokens]`: whose KV is there in every layer.

        Waits as `Engine.retrieve` does: once nothing has arrived for the deadline of the slowest tier, what is not
        there counts as lost. Raises what `wait` raises: BackendError, ValueError for a model without layers.
        """
        return self._mask_of(self.num_layers - 1, patient=True)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each layer and its mask, as `wait` gives it."""
        for layer in range(self.num_layers):
            yield layer, self.wait(layer)

    @shielded
    def cancel(self) -> None:
        """Stop as soon as the copy under way, if any, is over; nothing more is written then. Twice is fine."""
        with self._writing:
            self._context.given_up = True
        if not self._ended:  # in a forked child nobody is there to be woken, and no lock to be trusted
            self._fetch.wake()

    @shielded
    def close(self) -> None:
        """Cancel, and give back everything; a backend call under way keeps its memory until it returns."""
        self.cancel()
        with self._changed:
            while not self._ended:
                self._changed.wait(3600.0)

    def after_fork_in_child(self, error: BaseException) -> None:
        """End it in a forked child, where nobody works on it."""
        self._writing, self._changed = self._runtime.lock(), self._runtime.condition()
        self._context.given_up = self._ended = True
        self._error = error

    def __enter__(self) -> Loading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _cut(self, layer: int) -> None:
        """Give up the part of this layer that is not written yet."""
        with self._writing:
            if self._ready <= layer:
                written = next((index for index, layers in enumerate(self._moved) if layers <= layer), len(self._moved))
                self._prefix.cut(written, layer)
        self._fetch.wake()

    def _mask(self, chunks: int) -> torch.Tensor:
        mask = torch.zeros(self._num_tokens, dtype=torch.bool)
        for start, end in self._runs(chunks):
            mask[start:end] = True
        return mask

    def _runs(self, chunks: int) -> Iterator[tuple[int, int]]:
        """The tokens of the first `chunks` segments, those that touch as one run."""
        if not chunks:
            return
        first, last = self._segments[0], self._segments[chunks - 1]
        if last.end - first.start == self._ends[chunks - 1]:
            yield first.start, last.end
        else:
            yield from ((segment.start, segment.end) for segment in self._segments[:chunks])

    def _run(self, streams: CurrentStreams) -> None:
        self._load(streams)
        record = self._context.record
        count = self._prefix.count(self.num_layers - 1) if self._ready == self.num_layers else 0
        record.served_tokens = self._ends[count - 1] if count else 0
        for name, tokens in self.hit.by_tier.items():
            record.gave(name, tokens)
        record.end(self._error)

    def _load(self, streams: CurrentStreams) -> None:
        began = self._runtime.now()
        try:
            with streams.current():
                self._fetch.begin()
                for group in self._fetch.groups:
                    if not self._move(group):
                        break
                    if group.stop == self.num_layers:
                        self._account(began)
                    with self._changed:
                        self._ready = group.stop
                        self._changed.notify_all()
        except BaseException as error:  # the caller's to see, whatever it is
            self._error = error
        finally:
            try:
                self._fetch.close()
            finally:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                self._on_end(self)

    def _move(self, group: range) -> bool:
        """Write a group of layers of every chunk that is still in play; False if this was cancelled."""
        for run in self._fetch.runs(group):
            with self._writing:
                if self._context.given_up:
                    return False
                self._write(run)
                self._fetch.drop_damaged(run)
                for part in run:
                    self._moved[part.index] = part.layers.stop
            self._context.progress()  # what a copy takes is no tier's fault
        return not self._context.given_up

    def _write(self, run: Sequence[Part]) -> None:
        began = self._context.record.now()
        fences: list[Fence | None] = []
        layers, last = run[0].layers, self.num_layers - 1
        if len(layers) == self.num_layers and run[-1].index < self._prefix.count(last):
            segments, chunks = [part.segment for part in run], [part.chunk for part in run]
            fences.append(self._connector.write(segments, chunks, **self._where))
        else:
            for layer in layers:
                parts = [part for part in run if part.index < self._prefix.count(layer)]
                if not parts:
                    break
                segments, chunks = [part.segment for part in parts], [part.layer(layer) for part in parts]
                fences.append(self._connector.write_layer(layer, segments, chunks, **self._where))
        for fence in fences:
            if fence is not None:
                fence.wait()
        nbytes = sum(part.chunk.nbytes for part in run)
        self._context.record.note("copy", "", began, self._context.record.now(), nbytes=nbytes, chunks=len(run))

    def _account(self, began: float) -> None:
        count, whole = self._prefix.count(self.num_layers - 1), self._fetch.whole
        moved = self._segments[:count]
        self._stack.touch([*self._chain, *(segment.key for segment in moved[whole:])], count=False)
        if moved:
            num_tokens = self._ends[count - 1]
            nbytes = sum(self._stack.layout.nbytes(self._connector.shape(one.end - one.start)) for one in moved)
            seconds = self._runtime.now() - began
            self._events.emit(Event("retrieved", "", num_tokens, count, nbytes, seconds))
        if lacking := self._asked[min(count, whole) :]:
            lost, *behind = lacking
            loader = self._stack.loader
            why = loader.why(lost.key, self._context) if self._prefix.count(0) == count else "part-way"
            loader.missed([lost], why, served=moved[whole:])
            loader.missed(behind, BEHIND)
