"""The frame round every blob that leaves the process: what it is, whose it is, and a checksum of every byte.

    0   8  magic "KVLOOM\\r\\n"        40  16  header checksum (xxh3-128 of the header with this field zero)
    8   2  format version            56  16  key id            (reserved: zero)
    10  2  flags (zero)              72  24  nonce             (reserved: zero)
    12  4  header bytes              96  16  authentication tag (reserved: zero)
    16  4  description bytes         112  .  description, canonical JSON
    20  4  number of buffers           .  .  table: length (8) and xxh3-128 (16) of each buffer
    24  8  payload bytes               .  .  zeros up to a whole number of 4 KiB pages
    32  8  (zero)                           then the payload: the buffers, one after the other

All numbers are little-endian. The payload is page-aligned for O_DIRECT. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kvloom.errors import CorruptBlobError, LaterVersionError
from kvloom.types import EXACT, Buffer, Buffers, canonical_json

MAGIC = b"KVLOOM\r\n"
VERSION = 1
ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 1 << 24

_FIXED = struct.Struct("<8sHHIIIQ8x16s16s24s16s")
_ROW = struct.Struct("<Q16s")
_CHECKSUM_AT = 40
_RESERVED = (bytes(16), bytes(16), bytes(24), bytes(16))


@dataclass(frozen=True, slots=True)
class Description:
    """What a blob holds."""

    key: str
    serializer: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    num_tokens: int
    fidelity: str
    params: Mapping[str, Any] = field(default_factory=dict)
    written: int = 0
    """When the KV was first stored, in whole seconds since the epoch; 0 if that is not known."""
    start: int | None = None
    """The position of the first token in its sequence; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header that passed its checksum."""

    description: Description
    lengths: tuple[int, ...]
    digests: tuple[bytes, ...]
    header_bytes: int
    payload_bytes: int

    @property
    def exact(self) -> bool:
        return self.description.fidelity == EXACT


def seal(description: Description, buffers: Sequence[Buffer]) -> Buffers:
    """The framed blob: a page-aligned header, then `buffers` as they are (nothing is copied)."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    text = canonical_json({name: getattr(description, name) for name in Description.__slots__}).encode()
    length = _FIXED.size + len(text) + _ROW.size * len(views)
    header_bytes = -(-length // ALIGN_BYTES) * ALIGN_BYTES
    header = mmap.mmap(-1, header_bytes)  # the cheapest page-aligned zeros there are
    _FIXED.pack_into(
        header, 0, MAGIC, VERSION, 0, header_bytes, len(text), len(views), sum(map(len, views)), *_RESERVED
    )
    header[_FIXED.size : _FIXED.size + len(text)] = text
    at = _FIXED.size + len(text)
    for view in views:
        _ROW.pack_into(header, at, len(view), xxhash.xxh3_128_digest(view))
        at += _ROW.size
    checksum = xxhash.xxh3_128_digest(header)
    header[_CHECKSUM_AT : _CHECKSUM_AT + 16] = checksum
    return [memoryview(header), *views]


def header_bytes(page: memoryview) -> int:
    """How long the header is that starts with `page` (4 KiB), as far as it says. Raises CorruptBlobError."""
    magic, _, _, length, *_ = _FIXED.unpack_from(page)
    if magic != MAGIC or not ALIGN_BYTES <= length <= MAX_HEADER_BYTES:
        raise CorruptBlobError("byte 0: not a kvloom blob")
    return int(length)


def parse(data: memoryview, *, key: str) -> Header | None:
    """The header at the start of `data`, or None if `data` is too short to tell.

    Raises CorruptBlobError if it is no header, fails its checksum or belongs to another key; LaterVersionError if a
    later version of kvloom wrote it.
    """
    if len(data) < _FIXED.size:
        return None
    magic, version, _, header_bytes, text_bytes, count, payload_bytes, checksum, *_ = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise CorruptBlobError("byte 0: not a kvloom blob")
    table_at = _FIXED.size + text_bytes
    if not (table_at + _ROW.size * count <= header_bytes <= MAX_HEADER_BYTES and header_bytes % ALIGN_BYTES == 0):
        raise CorruptBlobError("byte 12: impossible header sizes")
    if len(data) < header_bytes:
        return None
    # Sizes and checksum keep their places in every version, so that damage is told from progress.
    state = xxhash.xxh3_128(data[:_CHECKSUM_AT])
    state.update(bytes(16))
    state.update(data[_CHECKSUM_AT + 16 : header_bytes])
    if state.digest() != checksum:
        raise CorruptBlobError(f"byte {_CHECKSUM_AT}: header checksum")
    if version > VERSION:
        raise LaterVersionError(f"format version {version}; this process reads up to {VERSION}")
    description = _describe(bytes(data[_FIXED.size : table_at]))
    if description.key != key:
        raise CorruptBlobError(f"byte {_FIXED.size}: the blob of another key")
    rows = list(_ROW.iter_unpack(data[table_at : table_at + _ROW.size * count]))
    lengths = tuple(row[0] for row in rows)
    if sum(lengths) != payload_bytes:
        raise CorruptBlobError("byte 24: impossible payload size")
    return Header(description, lengths, tuple(row[1] for row in rows), header_bytes, payload_bytes)


def _describe(text: bytes) -> Description:
    # The checksum was right, so this is what was written: what it does not say in our words is not damage. Fields that
    # are not known here are a later release's, which may add what an older one can do without.
    try:
        fields = {name: value for name, value in json.loads(text).items() if name in Description.__slots__}
        return Description(**{**fields, "shape": tuple(fields["shape"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LaterVersionError("a description that this process cannot read") from error


class Verifier:
    """Checks a framed blob while it arrives, each part while it is still in the processor's cache."""

    def __init__(self, data: memoryview, *, key: str) -> None:
        self._data = data
        self._key = key
        self._header: Header | None = None
        self._row = 0
        self._row_end = 0
        self._at = 0
        self._state = xxhash.xxh3_128()

    def filled(self, num_bytes: int) -> None:
        """The first `num_bytes` bytes of the blob are there. Raises as `parse` does, or CorruptBlobError."""
        if self._header is None:
            self._header = parse(self._data[:num_bytes], key=self._key)
            if self._header is None:
                return
            self._at = self._row_end = self._header.header_bytes
            self._row_end += self._header.lengths[0] if self._header.lengths else 0
        lengths = self._header.lengths
        while self._row < len(lengths):
            end = min(num_bytes, self._row_end)
            self._state.update(self._data[self._at : end])
            self._at = end
            if end < self._row_end:
                return
            if self._state.digest() != self._header.digests[self._row]:
                raise CorruptBlobError(f"byte {end - lengths[self._row]}: payload checksum, buffer {self._row}")
            self._state.reset()
            self._row += 1
            self._row_end += lengths[self._row] if self._row < len(lengths) else 0

    def finish(self) -> Header:
        """The header, once every byte was verified. Raises CorruptBlobError if the blob is too short or too long."""
        header = self._header
        if header is None or self._row < len(header.lengths):
            raise CorruptBlobError(f"byte {len(self._data)}: the blob is cut short")
        if len(self._data) != header.header_bytes + header.payload_bytes:
            raise CorruptBlobError(
                f"byte {header.header_bytes + header.payload_bytes}: bytes behind the end of the blob"
            )
        return header


def unseal(data: Buffer, *, key: str) -> tuple[Header, memoryview]:
    """The verified header and payload of a framed blob. Raises as `parse` does."""
    view = memoryview(data).cast("B")
    verifier = Verifier(view, key=key)
    verifier.filled(len(view))
    header = verifier.finish()
    return header, view[header.header_bytes :]


def split(header: Header, payload: memoryview) -> list[memoryview]:
    """The payload as the buffers that `encode` returned."""
    buffers, at = [], 0
    for length in header.lengths:
        buffers.append(payload[at : at + length])
        at += length
    return buffers
