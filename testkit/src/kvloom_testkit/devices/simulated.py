"""A device whose work is done as late, and in as unlikely an order, as the rules of streams allow."""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvloom.device import Stream, stand_in

_threads = threading.local()
"""`device`: the one that the thread has made its current one."""


class SimulatedDevice:
    """In the place of a GPU: its memory is the host's, and a seed decides when queued work is done.

    The rules are those of CUDA's streams. Work on one stream is done in order; on two, in any order that events do not
    forbid. The host goes on until it waits for an event or a stream. What is queued reads its arguments when it runs:
    memory that was given back too early holds something else by then, and memory of `empty` is given to somebody who
    uses the same stream as soon as its tensor is gone, whatever copies are queued.

    Host memory counts as pinned, but for what is named in `pageable`. CUDA promises little about copies of that: they
    are done when the call returns, or have read by then what they copy later, or do everything later.

    A device of one thread's use, or of several: calls are done one at a time.
    """

    def __init__(
        self, seed: int, *, pageable: Callable[[torch.Tensor], bool] = lambda tensor: False,
        holds: Callable[[torch.Tensor], bool] = lambda tensor: False, beside: SimulatedDevice | None = None,
    ) -> None:  # fmt: skip
        """holds: which memory counts as the device's, besides what `empty` gives. beside: another of the same host."""
        self._random = random.Random(seed)
        self._eager = self._random.choice((0.0, 0.1, 0.5, 0.9))
        """The probability that a call finds some more work done."""
        self._pageable = pageable
        self._holds = holds
        self._memory: list[tuple[int, int, torch.Tensor]] = []
        """First address, address after the last, and the memory, of what `empty` gave and somebody still has."""
        self._lock = threading.RLock() if beside is None else beside._lock
        self._streams: list[_Stream] = [] if beside is None else beside._streams
        self._currents = threading.local()
        self.legacy = self.stream()
        """The current stream of a thread that has chosen none."""
        self.queued = 0
        """Number of batches of copies, and launches, so far."""
        self.copies = 0
        """Number of batches of copies among them; a single copy is one."""
        self.bus_bytes = 0
        """Bytes of copies from the host's memory into that of `empty`, and back."""
        self.allocations = 0
        """Number of calls of `empty`."""
        self.used = False
        """Something was made or queued on it: a process that does so has a context there."""

    @contextmanager
    def installed(self) -> Iterator[SimulatedDevice]:
        """Connectors find it as the device of tensors in host memory."""
        with host_of([self]):
            yield self

    # -- as `kvloom.device.Device` -------------------------------------------------------------------------------------

    def stream(self) -> _Stream:
        with self._lock:
            made = _Stream(self)
            self._streams.append(made)
            self.used = True
            return made

    def current(self) -> _Stream:
        return getattr(self._currents, "stream", self.legacy)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, device = self.current(), getattr(_threads, "device", None)
        self._currents.stream, _threads.device = stream, self
        try:
            yield
        finally:
            self._currents.stream, _threads.device = before, device

    def empty(self, nbytes: int) -> torch.Tensor:
        memory, stream = torch.zeros(nbytes, dtype=torch.uint8), self.current()
        left = self._random.randint(1, 255)
        stream.add(lambda: memory.fill_(left))  # by who had it before, and is not done with it
        given = memory.numpy()[:]  # a tensor of it, and its views, have a storage of their own, whose end shows
        with self._lock:
            self._memory.append((memory.data_ptr(), memory.data_ptr() + memory.numel(), memory))
        self.allocations, self.used = self.allocations + 1, True
        # By weak references: its owner may be what keeps this device, and would never go.
        weakref.finalize(given, _give_back, weakref.ref(self), memory, weakref.ref(stream)).atexit = False
        return torch.from_numpy(given)

    def holds(self, memory: torch.Tensor) -> bool:
        return self._own(memory) is not None or self._holds(memory)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copy_batch([to], [source])

    def copy_batch(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.copies, self.queued, self.used = self.copies + 1, self.queued + 1, True
        pairs = list(zip(to, sources, strict=True))
        if len(pairs) > 1:
            self._random.shuffle(pairs)
        for pair in pairs:
            self._copy(*pair)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        kept, staged = False, False
        own_to, own_source = self._own(to), self._own(source)
        for memory, own in ((to, own_to), (source, own_source)):
            if own is None and self._pageable(memory):
                kept, staged = self._random.choice(((True, False), (False, memory is source), (False, False)))
        into, taken = _unowned(to, own_to), source.clone() if staged else _unowned(source, own_source)
        self.bus_bytes += to.nbytes if (own_to is None) != (own_source is None) else 0
        self.current().add(lambda: into.copy_(taken))
        if kept:
            self.current().synchronize()

    def queue(self, work: Callable[[], object]) -> object:
        self.queued, self.used = self.queued + 1, True
        self.current().add(work)
        return None

    def pin(self, memory: torch.Tensor) -> int:
        return 0

    def unpin(self, memory: torch.Tensor) -> None:
        pass

    # -- inside --------------------------------------------------------------------------------------------------------

    def _own(self, memory: torch.Tensor) -> torch.Tensor | None:
        """The memory of `empty` that it is part of."""
        at = memory.data_ptr()
        with self._lock:
            for first, end, own in self._memory:
                if first <= at < end:
                    return own
        return None

    def _given_back(self, memory: torch.Tensor, stream: _Stream) -> None:
        """Somebody else uses it, on the stream on which it was taken."""
        with self._lock:
            self._memory = [one for one in self._memory if one[2] is not memory]
            stream.work.append(lambda: memory.fill_(0xD5))

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
        able = [stream for stream in self._streams if stream.work and stream.able]
        if able:
            self._random.choices(able, [stream.pace for stream in able])[0].go_on()
        return bool(able)


def _unowned(tensor: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """The same memory; if it is the device's, `own`, a copy of it does not keep it from being given back."""
    offset = 0 if own is None else tensor.data_ptr() - own.data_ptr()
    if own is None or offset % tensor.element_size():
        return tensor
    storage, size = own.untyped_storage(), tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, offset // size, tensor.shape, tensor.stride())


@contextmanager
def host_of(devices: Sequence[SimulatedDevice], *, default: int = 0) -> Iterator[None]:
    """Connectors find these devices by their numbers. Tensors in host memory, which have no number, are on the
    thread's current device: the one of its innermost `on`, else the one of number `default`."""

    def find(where: torch.device) -> SimulatedDevice:
        current: SimulatedDevice = getattr(_threads, "device", None) or devices[default]
        return current if where.index is None else devices[where.index]

    with stand_in(find, devices):
        yield


def _give_back(to: weakref.ref[SimulatedDevice], memory: torch.Tensor, used_by: weakref.ref[_Stream]) -> None:
    device, stream = to(), used_by()
    if device is not None and stream is not None:
        device._given_back(memory, stream)


class _Stream:
    def __init__(self, on: SimulatedDevice) -> None:
        self._device = on
        self.pace = on._random.choice((1.0, 1.0, 0.03))
        """Rate at which it goes on, beside others: some are far behind."""
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
