"""Devices, their streams and events, and work that is queued on them: CUDA through torch, imported on use.

A connector gets its device from `device_of`, and the kit puts its `SimulatedDevice` there, on which work is done as
late, and in as unlikely an order, as the rules of streams allow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from kvloom.numa import Node, node_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "CudaDevice",
    "CurrentStreams",
    "Device",
    "Driver",
    "Stream",
    "StreamEvent",
    "device_of",
    "driver",
    "forget_error",
    "is_stream",
    "numa_node",
    "stand_in",
    "stream_of_launch",
    "synchronize",
]

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process


class StreamEvent(Protocol):
    """A point in a stream, like `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Block until everything queued before it is done."""

    def query(self) -> bool:
        """Return whether everything queued before it is done."""


class Stream(Protocol):
    """A queue of work that is done in order, like `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> None:
        """Have work queued from now on wait for the event."""

    def record_event(self) -> StreamEvent: ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """One GPU. Work is queued on the calling thread's current stream of it."""

    def stream(self) -> Stream:
        """A new stream. Only events order it with other streams."""

    def current(self) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """A context in which this stream and its device are the thread's current ones."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory on the device, uint8 `[nbytes]`. Work queued on the current stream before may still use it.

        Keep the tensor until the work that uses it is done: once it is deleted, others get the memory.
        """

    def holds(self, memory: torch.Tensor) -> bool:
        """Return whether memory is on this device."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy, of parts that are contiguous in both. Pinned memory is read and written when the copy runs; for
        other memory of the host the caller may be kept until it has."""

    def copy_batch(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queue copies, in any order among themselves: `copy` of each, by one call. They do not overlap."""

    def queue(self, work: Callable[[], object]) -> object:
        """Queue what `work` does on the device. What it reads in host memory may be read when it runs. Returns what
        has to be kept until it is done."""

    def pin(self, memory: torch.Tensor) -> int:
        """Page-lock memory of the host that stays where it is. Returns 0, or an error's number."""

    def unpin(self, memory: torch.Tensor) -> None: ...


class CudaDevice:
    """A GPU, through torch."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch, self._device = torch, device
        self._index = device.index  # torch takes a number five times as fast as its own device
        self._cuda: Any = torch.cuda

    def stream(self) -> Stream:
        made: Stream = self._cuda.Stream(self._device)
        return made

    def current(self) -> Stream:
        current: Stream = self._cuda.current_stream(self._index)
        return current

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        entered: AbstractContextManager[object] = self._cuda.stream(stream)
        return entered

    def empty(self, nbytes: int) -> torch.Tensor:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)

    def holds(self, memory: torch.Tensor) -> bool:
        return memory.is_cuda

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        for one, other in _pieces(to, source):
            one.copy_(other, non_blocking=True)

    def copy_batch(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = [pair for given in zip(to, sources, strict=True) for pair in _pieces(*given)]
        # Its loop is in C++: for each copy it takes the interpreter a microsecond or two less.
        if pairs:
            self._torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs], non_blocking=True)

    def queue(self, work: Callable[[], object]) -> object:
        with self._cuda.device(self._index):  # else a launch goes to the thread's current device, 0 at first
            return work()

    def pin(self, memory: torch.Tensor) -> int:
        with self._cuda.device(self._device):
            error = int(self._cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
            if error:
                forget_error(self._device)
            return error

    def unpin(self, memory: torch.Tensor) -> None:
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _pieces(to: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a copy that are contiguous. Others torch would copy twice, by way of memory that is not pinned."""
    if to.is_contiguous() and source.is_contiguous():
        yield to, source
    else:
        for one, other in zip(to, source, strict=True):
            yield from _pieces(one, other)


_makers: dict[str, Callable[[Any], Device]] = {"cuda": CudaDevice}
"""Constructors by the type of the torch device."""
_stand_ins: list[Device] = []


def device_of(where: torch.device) -> Device | None:
    """The device that memory is on; None for the host's, where nothing is queued."""
    make = _makers.get(where.type)
    return None if make is None else make(where)


@contextmanager
def stand_in(find: Callable[[torch.device], Device], devices: Sequence[Device]) -> Iterator[None]:
    """For tests: a context in which `find` chooses one of `devices` as the device of memory of the host."""
    before = _makers.copy(), _stand_ins.copy()
    _makers["cpu"] = find
    _stand_ins[:] = devices
    try:
        yield
    finally:
        _makers.clear()
        _makers.update(before[0])
        _stand_ins[:] = before[1]


def synchronize(where: torch.device) -> None:
    """Wait for what the thread's current stream has queued; nothing on the host."""
    device = device_of(where)
    if device is not None:
        device.current().synchronize()


def is_stream(found: object) -> bool:
    """Return whether `found` is a `torch.cuda.Stream`."""
    import torch

    return isinstance(found, torch.cuda.Stream)


def forget_error(where: torch.device | int) -> None:
    """CUDA keeps a thread's last error, and torch raises it at the thread's next launch, whatever that is."""
    import torch

    with suppress(RuntimeError, AssertionError):  # the latter from a torch without CUDA
        torch.zeros(1, device=torch.device("cuda", where) if isinstance(where, int) else where)


@contextmanager
def stream_of_launch(where: torch.device) -> Iterator[int]:
    """A context with the handle of the current stream of `where`, in which its device is the current one, as launches
    need it. 0 on the host."""
    if where.type != "cuda":
        yield 0
        return
    import torch

    cuda: Any = torch.cuda
    with cuda.device(where.index):
        yield int(cuda.current_stream().cuda_stream)


class Driver(Protocol):
    """The part of `torch.cuda` that page-locks memory."""

    def is_initialized(self) -> bool: ...

    def current_device(self) -> int: ...

    def device(self, index: int) -> AbstractContextManager[object]: ...

    def cudart(self) -> Any: ...


def driver() -> Driver | None:
    """CUDA, initialised or not; None if torch was built without it."""
    import torch

    cuda: Any = torch.cuda
    backend: Any = torch.backends.cuda
    return cuda if backend.is_built() else None


def numa_node(index: int) -> Node | None:
    """The NUMA node of a GPU; None where there is one node, or it is not told. Makes no context."""
    import torch

    found = torch.cuda.get_device_properties(index)
    domain, bus, place = (getattr(found, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
    return node_of(f"{domain:04x}:{bus:02x}:{place:02x}.0")


class CurrentStreams:
    """The current device, and the current streams, of the thread that makes this. Initialises nothing.

    Every thread has its own, by default those of device 0. Work that another thread continues needs them: else it would
    not wait for what this thread has queued, and would allocate on another device.
    """

    __slots__ = ("_stand_ins", "_streams")

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        # The thread's current device, which is that of memory without a number, comes last and stays it.
        current = device_of(torch.device("cpu")) if torch is not None and _stand_ins else None
        ordered = sorted(_stand_ins, key=lambda device: device is current)
        self._stand_ins = tuple((device, device.current()) for device in ordered)
        self._streams: tuple[Any, ...] = ()
        if torch is not None and torch.cuda.is_initialized():
            here = torch.cuda.current_device()
            others = (device for device in range(torch.cuda.device_count()) if device != here)
            chosen = [torch.cuda.current_stream(device) for device in others]
            # To enter one makes a context on its device: where nothing was chosen, the default is in force anyway.
            chosen = [stream for stream in chosen if stream != torch.cuda.default_stream(stream.device)]
            self._streams = (*chosen, torch.cuda.current_stream(here))  # the last one's device stays the current one

    def __bool__(self) -> bool:
        return bool(self._streams or self._stand_ins)

    @contextmanager
    def current(self) -> Iterator[None]:
        """A context in which they are the calling thread's."""
        if not self:
            yield
            return
        import torch

        with ExitStack() as entered:
            for stream in self._streams:
                entered.enter_context(torch.cuda.stream(stream))
            for device, its in self._stand_ins:
                entered.enter_context(device.on(its))
            yield
