"""A device whose work is done as late, and in as unlikely an order, as the rules of streams allow."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvloom.device import Stream, stand_in


class SimulatedDevice:
    """In the place of a GPU: its memory is the host's, and a seed decides when queued work is done.

    The rules are those of CUDA's streams. Work on one stream is done in order; on two, in any order that events do not
    forbid. The host goes on until it waits for an event or a stream. What is queued reads its arguments when it runs:
    memory that was given back too early holds something else by then. Host memory counts as pinned, but for what is
    named in `pageable`: copies from and to it are done when the call returns.

    A device of one thread's use, or of several: calls are done one at a time.
    """

    def __init__(
        self, seed: int, *, pageable: Callable[[torch.Tensor], bool] = lambda tensor: False,
        holds: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:  # fmt: skip
        """holds: which memory counts as the device's, besides what `empty` gives."""
        self._random = random.Random(seed)
        self._eager = self._random.choice((0.0, 0.1, 0.5, 0.9))
        """The probability that a call finds some more work done."""
        self._pageable = pageable
        self._holds = holds
        self._lock = threading.RLock()
        self._streams: list[_Stream] = []
        self._currents = threading.local()
        self.legacy = self.stream()
        """The current stream of a thread that has chosen none."""
        self.queued = 0
        """Number of copies and launches so far."""

    @contextmanager
    def installed(self) -> Iterator[SimulatedDevice]:
        """Connectors find it as the device of tensors in host memory."""
        with stand_in(self):
            yield self

    # -- as `kvloom.device.Device` -------------------------------------------------------------------------------------

    def stream(self) -> _Stream:
        with self._lock:
            made = _Stream(self)
            self._streams.append(made)
            return made

    def current(self) -> _Stream:
        return getattr(self._currents, "stream", self.legacy)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._currents.stream = self.current(), stream
        try:
            yield
        finally:
            self._currents.stream = before

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        left = self._random.randint(1, 255)
        self.current().add(lambda: memory.fill_(left))  # by who had it before, and is not done with it
        return memory

    def holds(self, memory: torch.Tensor) -> bool:
        return self._holds(memory)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.queue(lambda: to.copy_(source))
        if self._pageable(to) or self._pageable(source):
            self.current().synchronize()

    def queue(self, work: Callable[[], object]) -> object:
        self.queued += 1
        self.current().add(work)
        return None

    def pin(self, memory: torch.Tensor) -> int:
        return 0

    def unpin(self, memory: torch.Tensor) -> None:
        pass

    # -- inside --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do everything that is queued."""
        with self._lock:
            while self._step():
                pass
            assert not any(stream.work for stream in self._streams), "a stream waits for what will never be"

    def passed(self) -> None:
        """Time goes by: some work may be done."""
        with self._lock:
            while self._random.random() < self._eager and self._step():
                pass

    def until(self, done: Callable[[], bool]) -> None:
        """The host waits. Whatever could be done meanwhile may be done before."""
        with self._lock:
            while not done():
                assert self._step(), "the host waits for what will never be"

    def _step(self) -> bool:
        """Do the next piece of one stream; False if no stream can go on."""
        able = [stream for stream in self._streams if stream.able]
        if able:
            self._random.choice(able).go_on()
        return bool(able)


class _Stream:
    def __init__(self, on: SimulatedDevice) -> None:
        self._device = on
        self.work: deque[Callable[[], object] | _Event] = deque()

    def add(self, work: Callable[[], object] | _Event) -> None:
        with self._device._lock:
            self.work.append(work)
        self._device.passed()

    def wait_event(self, event: _Event) -> None:
        self.add(event)

    def record_event(self) -> _Event:
        event = _Event(self._device)
        self.add(event.happen)
        return event

    def synchronize(self) -> None:
        event = self.record_event()
        event.synchronize()

    @property
    def able(self) -> bool:
        """There is work that waits for no event."""
        return bool(self.work) and (not isinstance(self.work[0], _Event) or self.work[0].happened)

    def go_on(self) -> None:
        work = self.work.popleft()
        if not isinstance(work, _Event):
            with torch.inference_mode():  # whatever mode the thread is in that lets time go by
                work()


class _Event:
    def __init__(self, on: SimulatedDevice) -> None:
        self._device = on
        self.happened = False

    def happen(self) -> None:
        self.happened = True

    def query(self) -> bool:
        self._device.passed()
        return self.happened

    def synchronize(self) -> None:
        self._device.until(lambda: self.happened)
