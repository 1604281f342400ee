"""The frame of every blob that leaves the process: its description, its key, and a checksum of every byte.

    0   8  magic "KVLOOM\\r\\n"        40  16  header checksum (xxh3-128 of the header with this field zero)
    8   2  format version            56  16  key id              | zero, unless the blob
    10  2  flags                     72  24  nonce               | is signed: then the
    12  4  header bytes              96  16  authentication tag  | version is 2
    16  4  description bytes         112  .  description, canonical JSON
    20  4  number of buffers           .  .  table: length (8) and xxh3-128 (16) of each buffer
    24  8  payload bytes               .  .  zeros up to a whole number of 4 KiB pages
    32  8  (zero)                           then the payload: the buffers, one after the other

All numbers are little-endian. The payload is page-aligned for O_DIRECT. Nothing is ever unpickled. In a signed blob
(flag 1) the table has tags in place of checksums, and the header has its own tag, computed while its checksum and tag
fields are zero; flag 2 means that the buffers are encrypted too (`kvloom.format.encryption`).
"""

from __future__ import annotations

import hmac
import json
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

import xxhash

from kvloom.errors import CorruptBlobError, LaterVersionError, UnreadableBlobError
from kvloom.format import native_verifier
from kvloom.format.encryption import ENCRYPTED, NONCE_BYTES, SIGNED, TAG_BYTES, BlobKey, Check, Protection
from kvloom.format.native_verifier import NativeVerifier
from kvloom.types import EXACT, Buffer, Buffers, canonical_json

MAGIC = b"KVLOOM\r\n"
VERSION = 2
"""The latest that is read."""
PLAIN_VERSION = 1
"""The version of unsigned blobs, which every release can read."""
ALIGN_BYTES = 4096

_FIXED = struct.Struct("<8sHHIIIQ8x16s16s24s16s")
_ROW = struct.Struct("<Q16s")

MAX_DESCRIPTION_BYTES = 16 << 10
"""The longest description, canonical JSON. One without `params` has some 400 bytes."""
MAX_BRACKETS = 256
"""Lists and mappings in a description, at most: nothing in it is nested deeper than that."""
MAX_BUFFERS = 4096
"""Buffers of one blob, at most: 1,024 layers of two planes with two buffers each."""


def longest_header(buffers: int) -> int:
    """Length of the longest header of a blob with this many buffers, in bytes."""
    return -(-(_FIXED.size + MAX_DESCRIPTION_BYTES + _ROW.size * buffers) // ALIGN_BYTES) * ALIGN_BYTES


MAX_HEADER_BYTES = longest_header(MAX_BUFFERS)
"""The longest header of a chunk's blob: 116 KiB."""
_MOST_TEXT = 1024
"""Characters of one text of a description."""
_MOST_NUMBER = 1 << 53
_MOST_SECONDS = 1 << 37
"""A time in the year 6325: later times cannot be written as dates everywhere."""
_CHECKSUM_AT = 40
_TAG_AT = 96
_END = re.compile(rb'(null|0|[1-9][0-9]{0,14}),"written":(0|[1-9][0-9]{0,10})}')
"""The end of a canonical description behind `"start":`, with numbers below `_MOST_NUMBER` and `_MOST_SECONDS`."""
_MOST_ALIKE = 64


class Description(NamedTuple):
    """The content of a blob."""

    key: str
    serializer: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    num_tokens: int
    fidelity: str
    params: Mapping[str, Any] = {}
    written: int = 0
    """The time at which the KV was first stored, in whole seconds since the epoch; 0 if unknown."""
    start: int | None = None
    """The position of the first token in its sequence; None if that is not known."""


class Header(NamedTuple):
    """A header that passed its checksum."""

    description: Description
    lengths: tuple[int, ...]
    """Lengths of the payload's buffers, in bytes."""
    digests: tuple[bytes, ...]
    header_bytes: int
    payload_bytes: int
    blob_key: BlobKey | None = None
    """The key of a signed blob, whose tags are `digests`."""

    def check(self, number: int, *, decrypt: bool = True) -> Check:
        """For the bytes of buffer `number`, to be compared with its digest."""
        return _Checksum() if self.blob_key is None else self.blob_key.check(number, decrypt=decrypt)

    def right(self, number: int, buffer: memoryview) -> bool:
        """Verify buffer `number`, and decrypt it in place."""
        check = self.check(number)
        check.update(buffer)
        return check.right(self.digests[number])

    @property
    def exact(self) -> bool:
        """The KV in it is exactly what was stored, bit for bit."""
        return self.description.fidelity == EXACT


class _Checksum:
    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, part: memoryview) -> None:
        self._state.update(part)

    def right(self, digest: bytes) -> bool:
        return self._state.digest() == digest


def seal(
    description: Description, buffers: Sequence[Buffer], protection: Protection | None = None, *,
    max_buffers: int = MAX_BUFFERS, reuse: bool = False,
) -> Buffers:  # fmt: skip
    """The framed blob: a page-aligned header, then `buffers` as they are: nothing is copied.

    Of a blob that is encrypted they are copies; with `reuse` only until this thread seals the next one with it. Raises
    ValueError if no reader would take the header: see `MAX_DESCRIPTION_BYTES`, `MAX_BRACKETS` and `MAX_BUFFERS`.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    text = _canonical(description)
    if len(text) > MAX_DESCRIPTION_BYTES or _brackets(text) > MAX_BRACKETS:
        raise ValueError(f"serializer {description.serializer}: its params make the header too long")
    if len(views) > max_buffers:
        raise ValueError(f"serializer {description.serializer}: {len(views)} buffers; a blob has at most {max_buffers}")
    blob_key = None if protection is None else protection.begin(reuse=reuse)
    if blob_key is None:
        digests = [xxhash.xxh3_128_digest(view) for view in views]
        version, flags, key_id, nonce = PLAIN_VERSION, 0, bytes(16), bytes(NONCE_BYTES)
    else:
        views, digests = blob_key.sealed(views)
        version, flags, key_id, nonce = VERSION, blob_key.flags, blob_key.key_id, blob_key.nonce
    length = _FIXED.size + len(text) + _ROW.size * len(views)
    header_bytes = -(-length // ALIGN_BYTES) * ALIGN_BYTES
    header = mmap.mmap(-1, header_bytes)  # the cheapest page-aligned zeros there are
    _FIXED.pack_into(
        header, 0, MAGIC, version, flags, header_bytes, len(text), len(views), sum(map(len, views)), bytes(16),
        key_id, nonce, bytes(TAG_BYTES),
    )  # fmt: skip
    header[_FIXED.size : _FIXED.size + len(text)] = text
    at = _FIXED.size + len(text)
    for view, digest in zip(views, digests, strict=True):
        _ROW.pack_into(header, at, len(view), digest)
        at += _ROW.size
    if blob_key is not None:
        header[_TAG_AT : _TAG_AT + TAG_BYTES] = blob_key.header_tag(memoryview(header))
    checksum = xxhash.xxh3_128_digest(header)
    header[_CHECKSUM_AT : _CHECKSUM_AT + 16] = checksum
    return [memoryview(header), *views]


def header_bytes(page: memoryview) -> int:
    """The length of the header that starts with `page` (4 KiB), as the header states it. Raises CorruptBlobError."""
    magic, _, _, length, *_ = _FIXED.unpack_from(page)
    if magic != MAGIC or not ALIGN_BYTES <= length <= MAX_HEADER_BYTES:
        raise CorruptBlobError("byte 0: not a kvloom blob")
    return int(length)


def parse(
    data: memoryview, *, key: str, protection: Protection | None = None, max_buffers: int = MAX_BUFFERS,
    checked: bool = False,
) -> Header | None:  # fmt: skip
    """The header at the start of `data`, or None if `data` is too short to tell.

    protection: which blobs are taken: those signed with one of its keys; None: those that are not signed. checked: its
    checksum was found right before. Raises CorruptBlobError if it is no header, fails its checksum or its tag, or
    belongs to another key; UnreadableBlobError if it is of the other kind or of another key; LaterVersionError if a
    later version of kvloom wrote it.
    """
    if len(data) < _FIXED.size:
        return None
    magic, version, flags, header_bytes, text_bytes, count, payload_bytes, checksum, *_ = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise CorruptBlobError("byte 0: not a kvloom blob")
    table_at = _FIXED.size + text_bytes
    fits = (
        table_at + _ROW.size * count <= header_bytes <= longest_header(max_buffers) and header_bytes % ALIGN_BYTES == 0
    )
    if not fits or text_bytes > MAX_DESCRIPTION_BYTES or count > max_buffers:
        raise CorruptBlobError("byte 12: impossible header sizes")
    if len(data) < header_bytes:
        return None
    # Sizes and checksum keep their places in every version, so that damage and later versions can be distinguished.
    if not checked and _checksum(data[:header_bytes]) != checksum:
        raise CorruptBlobError(f"byte {_CHECKSUM_AT}: header checksum")
    # Where blobs are signed, nothing that is not has a say: it is not even a later version's.
    blob_key = None if protection is None else _signed(data[:header_bytes], protection, version, flags)
    if version > VERSION:
        raise LaterVersionError(f"format version {version}; this process reads up to {VERSION}")
    if flags & ~(SIGNED | ENCRYPTED):
        raise LaterVersionError(f"flags {flags:#x}")
    if flags and blob_key is None:
        raise UnreadableBlobError("it is signed, and this tier has no key: give it `protect`")
    description = _describe(bytes(data[_FIXED.size : table_at]), key)
    if description.key != key:
        raise CorruptBlobError(f"byte {_FIXED.size}: the blob of another key")
    rows = list(_ROW.iter_unpack(data[table_at : table_at + _ROW.size * count]))
    lengths = tuple(row[0] for row in rows)
    if sum(lengths) != payload_bytes or payload_bytes >= _MOST_NUMBER:
        raise CorruptBlobError("byte 24: impossible payload size")
    return Header(description, lengths, tuple(row[1] for row in rows), header_bytes, payload_bytes, blob_key)


def _checksum(header: memoryview) -> bytes:
    state = xxhash.xxh3_128(header[:_CHECKSUM_AT])
    state.update(bytes(16))
    state.update(header[_CHECKSUM_AT + 16 :])
    return state.digest()


def _signed(header: memoryview, protection: Protection, version: int, flags: int) -> BlobKey:
    """The key that signed a header. Raises CorruptBlobError or UnreadableBlobError if none of ours did."""
    *_, key_id, nonce, tag = _FIXED.unpack_from(header)
    blob_key = protection.open(flags, key_id, nonce)
    zeroed = (header[:_CHECKSUM_AT], bytes(16), header[_CHECKSUM_AT + 16 : _TAG_AT], bytes(TAG_BYTES))
    expected = blob_key.header_tag(*zeroed, header[_TAG_AT + TAG_BYTES :])
    if hmac.compare_digest(expected, tag):
        return blob_key
    if version > VERSION:  # which may sign in another way: it is not ours to delete
        raise UnreadableBlobError(f"format version {version}, and not signed as this process signs")
    raise CorruptBlobError(f"byte {_TAG_AT}: not signed with the tier's key")


def _describe(text: bytes, key: str) -> Description:
    """Parse a description. Those of a tier's chunks differ in key, start and time only: the rest is parsed once."""
    before, _, rest = text.partition(b'"key":%b' % encode_basestring_ascii(key).encode())
    behind, _, end = rest.rpartition(b',"start":')
    like, numbers = _alike.get((before, behind)), _END.fullmatch(end)
    if like is None or numbers is None:
        description = _parsed(text)
        if numbers is not None and not description.params and _canonical(description) == text:
            if len(_alike) >= _MOST_ALIKE:
                _alike.clear()
            _alike[before, behind] = description
        return description
    start, written = numbers.groups()
    return Description(
        key, like.serializer, like.shape, like.dtype, like.format, like.num_tokens, like.fidelity, {}, int(written),
        None if start == b"null" else int(start),
    )  # fmt: skip


_alike: dict[tuple[bytes, bytes], Description] = {}
"""Descriptions without params, by what is before and behind the key in their canonical JSON, up to their start."""


def _parsed(text: bytes) -> Description:
    # The checksum was right, so this is what was written. Fields that are not known here are a later release's, which
    # may add what an older one can do without; it gives none of these another type without another version.
    try:
        if _brackets(text) > MAX_BRACKETS:
            raise ValueError("nested too deeply")
        fields = {name: value for name, value in json.loads(text).items() if name in Description._fields}
        description = Description(**{**fields, "shape": tuple(fields["shape"])})
        _check_types(description)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableBlobError("a description that this process cannot read") from error
    return description


def _canonical(description: Description) -> bytes:
    return canonical_json(description._asdict()).encode()


def _brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _check_types(about: Description) -> None:
    """Raise TypeError unless every field has its type: other values must not be compared, hashed or kept."""
    texts = (about.key, about.serializer, about.dtype, about.format, about.fidelity)
    numbers = (*about.shape, about.num_tokens, about.written, 0 if about.start is None else about.start)
    if not all(type(text) is str and len(text) <= _MOST_TEXT for text in texts):
        raise TypeError("a field is not a short text")
    if not all(type(number) is int and 0 <= number < _MOST_NUMBER for number in numbers):
        raise TypeError("a field is not a whole number")
    if about.written >= _MOST_SECONDS:
        raise TypeError("a time that is none")
    if type(about.params) is not dict:
        raise TypeError("params are not a mapping")


class Verifier:
    """Checks a framed blob while it arrives, each part while it is still in the processor's cache.

    Encrypted buffers are decrypted in place, unless `decrypt` is False.
    """

    def __init__(
        self, data: memoryview, *, key: str, protection: Protection | None = None, decrypt: bool = True,
        max_buffers: int = MAX_BUFFERS, right: bool = False,
    ) -> None:  # fmt: skip
        """right: `native_verifier.right` has said so of all of it."""
        self._data = data
        self._right = right
        self._max_buffers = max_buffers
        self._key = key
        self._protection = protection
        self._decrypt = decrypt
        self._header: Header | None = None
        self._row = 0
        self._row_end = 0
        self._at = 0
        self._check: Check | None = None
        self._native: NativeVerifier | None = None

    def native_filled(self) -> tuple[int, int] | None:
        """As `NativeSink.native_filled`: for blobs that are not signed, where the native library is installed."""
        found = None if self._protection is not None else native_verifier.library()
        if found is None:
            return None
        self._native = NativeVerifier(found, self._data, self._max_buffers)
        return self._native.filled

    def filled(self, num_bytes: int) -> None:
        """The first `num_bytes` bytes of the blob are there.

        Raises as `parse` does: CorruptBlobError, LaterVersionError, UnreadableBlobError.
        """
        if self._header is None:
            right = self._right or (self._native is not None and self._native.right)
            self._header = parse(
                self._data[:num_bytes], key=self._key, protection=self._protection, max_buffers=self._max_buffers,
                checked=right,
            )  # fmt: skip
            if self._header is None:
                return
            if right:
                self._row = len(self._header.lengths)
                return
            self._at = self._row_end = self._header.header_bytes
            self._row_end += self._header.lengths[0] if self._header.lengths else 0
        header = self._header
        while self._row < len(header.lengths):
            end = min(num_bytes, self._row_end)
            check = self._check = self._check or header.check(self._row, decrypt=self._decrypt)
            check.update(self._data[self._at : end])
            self._at = end
            if end < self._row_end:
                return
            if not check.right(header.digests[self._row]):
                raise CorruptBlobError(f"byte {end - header.lengths[self._row]}: payload checksum, buffer {self._row}")
            self._check = None
            self._row += 1
            self._row_end += header.lengths[self._row] if self._row < len(header.lengths) else 0

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


def unseal(
    data: Buffer, *, key: str, protection: Protection | None = None, decrypt: bool = True,
    max_buffers: int = MAX_BUFFERS,
) -> tuple[Header, memoryview]:  # fmt: skip
    """The verified header and payload of a framed blob. Raises as `parse` does.

    An encrypted blob must be writable, unless it is only to be verified: `decrypt=False`.
    """
    view = memoryview(data).cast("B")
    verifier = Verifier(view, key=key, protection=protection, decrypt=decrypt, max_buffers=max_buffers)
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
