"""Memory for chunks that are filled layer by layer: held for longer than a copy takes, so there is a bound to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvloom.memory import Block, Reservation, pages_of
from kvloom.runtime import Runtime
from kvloom.tiers.memory.tier import MemoryTier


class StagingBuffers:
    """Hands out memory for whole chunks: at most half of the pool at any time, so that everybody else goes on."""

    def __init__(self, memory: MemoryTier, runtime: Runtime) -> None:
        self._memory = memory
        self._runtime = runtime
        self._lock = runtime.lock()
        self._left = memory.pool.capacity // 2
        self._forgotten: deque[int] = deque()

    def take(self, nbytes: int, *, until: float | None = None) -> StagingBuffer | None:
        """Memory for `nbytes` bytes, evicting what it takes, or None.

        until: wait so long for memory that is in use; but nobody waits for the bound.
        """
        size = pages_of(nbytes)
        while self._forgotten:
            try:
                self.give(self._forgotten.popleft())
            except IndexError:  # another thread was quicker
                break
        with self._lock:
            if size > self._left:
                return None
            self._left -= size
        reservation = self._memory.reserve(nbytes) if until is None else self._memory.reserve_by(nbytes, until)
        if reservation is None:
            self.give(size)
            return None
        return StagingBuffer(reservation, self._runtime, self, counted=size)

    def passing(self, nbytes: int) -> StagingBuffer | None:
        """Memory that KV only passes through, which does not count."""
        reservation = self._memory.reserve(nbytes)
        return None if reservation is None else StagingBuffer(reservation, self._runtime, None)

    def await_passing(self, nbytes: int, until: float, *, stopped: Callable[[], bool]) -> StagingBuffer | None:
        """`passing`, waiting until `until` or until `stopped()` for what is in use to be given back."""
        pool = self._memory.pool
        while True:
            freed = pool.times_freed
            room = self.passing(nbytes)
            if room is not None or stopped() or not self._memory.may_get(nbytes):
                return room
            if self._runtime.now() >= until:
                break
            pool.wait_for_room(until, freed)
        reservation = self._memory.reserve_by(nbytes, until)  # now what should have been written before goes as well
        return None if reservation is None else StagingBuffer(reservation, self._runtime, None)

    def give(self, size: int) -> None:
        """`size` bytes of the pool are no longer held. Called by rooms."""
        with self._lock:
            self._left += size

    def give_later(self, size: int) -> None:
        """`give`, from wherever garbage is collected: takes no lock."""
        self._forgotten.append(size)


class StagingBuffer:
    """A reservation with several holders: whoever asked for it, and each backend call that still may write to it.

    It goes back to the pool when the last of them lets go, or all of them have been forgotten.
    """

    def __init__(
        self, reservation: Reservation, runtime: Runtime, rooms: StagingBuffers | None, *, counted: int = 0
    ) -> None:
        """counted: the bytes that `rooms` has counted for it; the reservation may be longer."""
        self.reservation = reservation
        self._lock = runtime.lock()
        self._holders = 1
        self._counted = counted
        self._rooms = rooms

    def enter(self) -> bool:
        """Become a holder; False if there is none left, and the memory is somebody else's."""
        with self._lock:
            held = self._holders > 0
            self._holders += held
        return held

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last:
            self.reservation.abandon()
            self._settle()

    def seal(self) -> Block | None:
        """The filled memory as a block. The caller is the only holder, and no longer one afterwards."""
        assert self._holders == 1, "sealed while a call may still write to it"
        self._holders = 0
        block = self.reservation.seal()
        self._settle()
        return block

    def _settle(self) -> None:
        rooms, self._rooms = self._rooms, None
        if rooms is not None:
            rooms.give(self._counted)

    def __del__(self) -> None:
        rooms: StagingBuffers | None = getattr(self, "_rooms", None)  # whoever made it may have been interrupted
        if rooms is not None:
            rooms.give_later(self._counted)


@dataclass(frozen=True, slots=True)
class StagingPlace:
    """Where some layers of a chunk lie in a room: `tensor` is `[planes, layers, tokens, hidden]`, without a gap."""

    room: StagingBuffer
    tensor: torch.Tensor
    first: int
    """The layer that comes first."""
    chunk_shape: tuple[int, ...]
    """The shape of the whole chunk, which may have more layers."""

    @classmethod
    def of(
        cls, room: StagingBuffer, chunk_shape: tuple[int, ...], dtype: torch.dtype, layers: range | None = None
    ) -> StagingPlace:
        """In a room that is long enough; layers: default all."""
        planes, num_layers, tokens, hidden = chunk_shape
        layers = range(num_layers) if layers is None else layers
        tensor = room.reservation.tensor((planes, len(layers), tokens, hidden), dtype)
        return cls(room, tensor, layers.start, chunk_shape)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one plane of one layer."""
        return layer_bytes(self.chunk_shape, self.tensor.dtype)

    def layers(self, layers: range) -> torch.Tensor:
        """These layers, as a view `[planes, len(layers), tokens, hidden]`."""
        return self.tensor[:, layers.start - self.first : layers.stop - self.first]

    def rows(self, plane: int, layers: range) -> memoryview:
        """The bytes of one plane of these layers. Only for who fills them: once they are sealed, nobody may."""
        step = self.layer_bytes
        start = (plane * self.tensor.shape[1] + layers.start - self.first) * step
        return self.room.reservation.view[start : start + len(layers) * step]


def layer_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one plane of one layer of a chunk `[planes, layers, tokens, hidden]`."""
    return int(shape[2]) * int(shape[3]) * dtype.itemsize
