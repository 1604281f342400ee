"""Reading a stored blob by ranges: the header, then the bytes of single layers, each verified by its own checksum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import StorageBackend
from kvloom.format import envelope
from kvloom.memory import Reservation
from kvloom.tiers.stored.calls import guarded
from kvloom.types import Chunk, MemoryFormat

WHOLE_BYTES = 1 << 20
"""Chunks up to this size are read whole: layers that small are not worth a call each."""
RANGE_BYTES = 2 << 20
"""Layers that lie side by side are read together up to this size: below it, the call costs more than the bytes."""


def reads_ranges(backend: StorageBackend) -> bool:
    """Return whether the backend reads a part of a blob without reading all of it."""
    return type(backend).get_range is not StorageBackend.get_range


@dataclass(frozen=True, slots=True)
class LayeredBlob:
    """A blob whose layers can be read one by one: what its buffers are, and where."""

    header: envelope.Header
    serializer: Serializer
    buffers: Sequence[Sequence[int]]
    """For each layer the numbers of the buffers that hold it."""
    offsets: Sequence[int]
    """Offset of each buffer, in bytes from the beginning of the blob."""

    @property
    def raw(self) -> bool:
        """The buffers are the layers' bytes, those of the first plane before those of the next."""
        return self.header.description.serializer == "raw"


@dataclass(frozen=True, slots=True)
class LayerBuffer:
    """Memory for some layers of a chunk: `tensor` is `[planes, layers, tokens, hidden]`, without a gap."""

    reservation: Reservation
    tensor: torch.Tensor
    first: int
    """The layer that comes first."""
    chunk_shape: tuple[int, ...]
    """The shape of the whole chunk, which may have more layers."""

    @classmethod
    def of(
        cls, reservation: Reservation, chunk_shape: tuple[int, ...], dtype: torch.dtype, layers: range | None = None
    ) -> LayerBuffer:
        """In a reservation that is long enough. layers: default all."""
        planes, num_layers, tokens, hidden = chunk_shape
        layers = range(num_layers) if layers is None else layers
        tensor = reservation.tensor((planes, len(layers), tokens, hidden), dtype)
        return cls(reservation, tensor, layers.start, chunk_shape)

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
        return self.reservation.view[start : start + len(layers) * step]


def layer_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one plane of one layer of a chunk `[planes, layers, tokens, hidden]`."""
    return int(shape[2]) * int(shape[3]) * dtype.itemsize


def layered(header: envelope.Header, serializer: Serializer, like: Chunk) -> LayeredBlob | None:
    """The layers of a blob that `serializer` decodes; None if it has to be read whole. like: on the meta device."""
    if not serializer.by_layer or header.payload_bytes > serializer.max_encoded_bytes(like):
        return None
    buffers = guarded(partial(serializer.layer_buffers, header.lengths, like, header.description.params))
    if buffers is None or len(buffers) != like.tensor.shape[1]:
        return None
    if not all(0 <= number < len(header.lengths) for numbers in buffers for number in numbers):
        return None
    offsets = [header.header_bytes, *header.lengths]
    return LayeredBlob(header, serializer, buffers, list(accumulate(offsets))[:-1])


def groups(num_layers: int, nbytes: int) -> list[range]:
    """Return the layers to read together if one (plane of one) has `nbytes` bytes; with 0, nothing is read: each alone.

    The first comes alone, for it is waited for; then more and more at a time, until a range is long enough.
    """
    most = max(1, RANGE_BYTES // nbytes) if nbytes else 1
    parts, start, size = [], 0, 1
    while start < num_layers:
        parts.append(range(start, min(start + size, num_layers)))
        start += size
        size = min(2 * size, most)
    return parts


def read_layers(backend: StorageBackend, blob: LayeredBlob, place: LayerBuffer, layers: range) -> int:
    """Read `layers` of a blob into their place, all planes; how many, from the first on, are right.

    Raises whatever backend and serializer raise.
    """
    return _read_raw(backend, blob, place, layers) if blob.raw else _read_encoded(backend, blob, place, layers)


def _read_raw(backend: StorageBackend, blob: LayeredBlob, place: LayerBuffer, layers: range) -> int:
    """Straight to where the layers belong."""
    header, num_layers = blob.header, len(blob.buffers)
    right = len(layers)
    step = place.layer_bytes
    for plane in range(place.chunk_shape[0]):
        first = plane * num_layers + layers.start
        into = place.rows(plane, layers[:right])
        if not right or not backend.get_range(header.description.key, blob.offsets[first], into):
            return 0
        for number in range(right):
            if not header.right(first + number, into[number * step : (number + 1) * step]):
                right = number
                break
    return right


def _read_encoded(backend: StorageBackend, blob: LayeredBlob, place: LayerBuffer, layers: range) -> int:
    header = blob.header
    numbers = sorted({number for layer in layers for number in blob.buffers[layer]})
    arrived: dict[int, memoryview] = {}
    for run in _runs(numbers):
        lengths = header.lengths[run.start : run.stop]
        scratch = memoryview(torch.empty(sum(lengths), dtype=torch.uint8).numpy().data)
        if scratch.nbytes and not backend.get_range(header.description.key, blob.offsets[run.start], scratch):
            return 0
        for number, end, length in zip(run, accumulate(lengths), lengths, strict=True):
            part = scratch[end - length : end]
            if header.right(number, part):
                arrived[number] = part
    right = 0
    while right < len(layers) and all(number in arrived for number in blob.buffers[layers[right]]):
        right += 1
    if right:
        wanted = sorted({number for layer in layers[:right] for number in blob.buffers[layer]})
        about = header.description
        tensor = place.layers(layers[:right])
        into = Chunk(tensor, MemoryFormat(about.format), about.num_tokens, about.fidelity, about.start)
        encoded = [arrived[number] for number in wanted]
        guarded(partial(blob.serializer.decode_layers, encoded, layers[:right], into))
    return right


def _runs(numbers: Sequence[int]) -> list[range]:
    """Ascending numbers as runs of neighbours."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
