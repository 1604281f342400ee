"""Decoding on a device: compressed bytes go over the bus, and chunks are made in a part of the pool that is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kvloom.contracts.serializer import Place, Serializer
from kvloom.device import Device
from kvloom.errors import CorruptBlobError, UnreadableBlobError
from kvloom.memory import Pool, Reservation, pages_of
from kvloom.runtime import Runtime
from kvloom.tiers.stored.calls import DeviceFailedError, NoRoomError, guarded
from kvloom.types import Buffers, Chunk

MOST_BYTES = 256 << 20
"""Bytes of device memory for the chunks of one tier, if two chunks are not more."""


@dataclass(eq=False)
class Job:
    """A blob in host memory, and the chunk on the device that it is decoded into."""

    serializer: Serializer
    blob: Buffers
    into: Chunk
    error: Exception | None = field(default_factory=lambda: NoRoomError("the launch was broken off"))
    """Once it is done: CorruptBlobError, UnreadableBlobError or LocalError; None if the chunk is right."""


class DeviceDecoder:
    """Decodes on one device, on a stream of its own. What several threads bring while it is at work is one launch."""

    def __init__(self, where: torch.device, device: Device, chunk_bytes: int, runtime: Runtime) -> None:
        """Takes memory for chunks. Raises RuntimeError if the device has no room for it."""
        self._where, self._device = where, device
        self._stream = device.stream()
        with device.on(self._stream):
            self._pool = Pool(max(MOST_BYTES, 2 * pages_of(chunk_bytes)), runtime, device=where)
        self._launching = runtime.lock()
        self._waiting: deque[Job] = deque()

    def close(self) -> None:
        """Give the memory back, once what is in it is not used any more."""
        self._pool.close()

    def reserve(self, nbytes: int, *, deadline: float) -> Reservation | None:
        """Memory on the device, or None if all of it is in use, or there is not that much.

        Nobody waits for it: chunks that come early keep theirs until those before them have come.
        """
        return self._pool.reserve(nbytes, deadline=deadline)

    def decode(self, jobs: Sequence[Job]) -> None:
        """Return when all are done, each with its error or none."""
        self._waiting.extend(jobs)
        with self._launching:  # whoever had it before has done ours too, unless they came too late
            batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
            for serializer in dict.fromkeys(job.serializer for job in batch):
                self._run([job for job in batch if job.serializer is serializer])

    def _run(self, batch: Sequence[Job]) -> None:
        try:
            error = self._decoded(batch)
        except Exception as raised:
            error = DeviceFailedError(f"{self._where}: {raised}")
        if error is not None and len(batch) > 1:
            for job in batch:  # which of them it is
                self._run([job])
        else:
            for job in batch:
                job.error = error

    def _decoded(self, batch: Sequence[Job]) -> Exception | None:
        """Decode by one launch. Returns the error of its blobs, and raises that of the device."""
        place = Place(self._where, self._stream)
        blobs, into = [job.blob for job in batch], [job.into for job in batch]
        with self._device.on(self._stream):
            try:
                guarded(partial(batch[0].serializer.decode_many, blobs, into, place))
            except (CorruptBlobError, UnreadableBlobError) as raised:
                self._stream.synchronize()  # nothing uses memory that is given back; a device that failed says so again
                full = isinstance(raised.__cause__, torch.OutOfMemoryError)
                return NoRoomError(str(raised)) if full else raised
        return None
