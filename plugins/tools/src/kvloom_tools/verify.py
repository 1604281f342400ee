"""Telling what a blob in a store is worth, and putting a corrupt one aside, beside engines that use the store."""

from __future__ import annotations

import enum
import mmap
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from kvloom import BackendError, CorruptBlobError, UnreadableBlobError, envelope
from kvloom_tools.stores import QUARANTINE, said

if TYPE_CHECKING:
    from kvloom import StorageBackend
    from kvloom.inspection import Protection

MAX_BLOB_BYTES = 1 << 30
"""A blob beyond this is not read: memory stays within this for each thread, whatever is done with what is found."""


class Verdict(enum.Enum):
    """The result for a blob."""

    OK = "ok"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """Another version's or another serializer's: no business of ours."""
    GONE = "gone"
    """Deleted between the listing and the reading."""
    FAILED = "failed"
    """The store did not give it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one blob."""

    key: str
    verdict: Verdict
    bytes: int = 0
    reason: str = ""
    action: str = ""
    """The action on a corrupt blob: quarantined, deleted, kept, replaced (or removed: by an engine, meanwhile)."""


class TooLongError(BackendError):
    """A blob of more bytes than are read here."""


class Examiner:
    """Reads blobs and judges them. Used from several threads; a call that is given up keeps its memory to itself."""

    def __init__(
        self, backend: StorageBackend, serializers: Collection[str] | None, protection: Protection | None
    ) -> None:  # fmt: skip
        """serializers: those that are not unreadable here; None for any. protection: of the tier."""
        self._backend = backend
        self._protection = protection
        self._serializers = serializers
        self._buffers: list[mmap.mmap] = []

    def examine(self, key: str) -> Finding:
        """Verify a blob. It is corrupt only if a second read is, too: it may have been replaced during the first."""
        for _ in range(2):
            sink = VerifyingSink(key, self._take(), self._protection)
            try:
                if not self._backend.get_into(key, sink):
                    finding = Finding(key, Verdict.GONE)
                else:
                    finding = self._judge(key, sink.finish())
                break
            except CorruptBlobError as error:
                finding = Finding(key, Verdict.CORRUPT, sink.num_bytes, str(error))
            except UnreadableBlobError as error:
                finding = Finding(key, Verdict.UNREADABLE, sink.num_bytes, str(error))
                break
            except TooLongError as error:
                finding = Finding(key, Verdict.UNREADABLE, reason=str(error))
                break
            except Exception as error:
                finding = Finding(key, Verdict.FAILED, reason=said(error))
                break
            finally:
                self._buffers.append(sink.buffer)
        return finding

    def put_aside(self, key: str, *, copy: bool, most: int) -> str:
        """`put_aside`, in memory that was used before."""
        content = Content(self._take())
        try:
            return put_aside(self._backend, key, content, copy=copy, most=most, protection=self._protection)
        finally:
            self._buffers.append(content.buffer)

    def _take(self) -> mmap.mmap:
        try:
            return self._buffers.pop()
        except IndexError:  # all are in use
            return mmap.mmap(-1, mmap.PAGESIZE)

    def _judge(self, key: str, header: envelope.Header) -> Finding:
        num_bytes = header.header_bytes + header.payload_bytes
        serializer = header.description.serializer
        if self._serializers is not None and serializer not in self._serializers:
            return Finding(key, Verdict.UNREADABLE, num_bytes, f"serializer {serializer!r} is not this tier's")
        return Finding(key, Verdict.OK, num_bytes)


class Content:
    """Reusable memory for a backend to read any content into."""

    max_bytes = MAX_BLOB_BYTES

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> memoryview:
        self.num_bytes = num_bytes
        if num_bytes > self.max_bytes:
            raise TooLongError(f"{num_bytes} bytes, more than is read here ({self.max_bytes})")
        if num_bytes > len(self.buffer):
            self.buffer = mmap.mmap(-1, num_bytes)
        return self.content

    def filled(self, num_bytes: int) -> None:
        """The first `num_bytes` bytes have arrived."""

    @property
    def content(self) -> memoryview:
        return memoryview(self.buffer)[: self.num_bytes]


class VerifyingSink(Content):
    """Memory for a backend to read a blob into, verified as it fills."""

    def __init__(
        self, key: str, buffer: mmap.mmap, protection: Protection | None = None, *, decrypt: bool = True
    ) -> None:  # fmt: skip
        """decrypt: as `envelope.Verifier` takes it."""
        super().__init__(buffer)
        self._protection = protection
        self._decrypt = decrypt
        self._key = key
        self._verifier: envelope.Verifier | None = None

    def reserve(self, num_bytes: int) -> memoryview:
        if num_bytes == 0:
            raise CorruptBlobError("an empty blob")
        view = super().reserve(num_bytes)
        self._verifier = envelope.Verifier(view, key=self._key, protection=self._protection, decrypt=self._decrypt)
        return view

    def filled(self, num_bytes: int) -> None:
        assert self._verifier is not None
        self._verifier.filled(num_bytes)

    def finish(self) -> envelope.Header:
        """The header, once every byte was verified. Raises CorruptBlobError."""
        if self._verifier is None:
            raise CorruptBlobError("an empty blob")
        return self._verifier.finish()

    def payload(self, header: envelope.Header) -> memoryview:
        return self.content[header.header_bytes :]


def put_aside(
    backend: StorageBackend, key: str, content: Content, *, copy: bool, most: int, protection: Protection | None
) -> str:
    """Delete a corrupt blob, with `copy` after a copy of it is under `quarantine/`; what was done, in a word.

    most: how many bytes of it are copied, from its beginning: what has holes takes up less than it is long, and the
    copy has none. What is there is compared with what was judged right before it goes. A version that is written in
    that very moment may go with it, which makes a miss; none is served wrong. Raises BackendError with what is in the
    way.
    """
    try:
        if not backend.get_into(key, content) or _sound(content.content, key, protection):
            return "replaced"
        before = xxhash.xxh3_128_digest(content.content)
        if copy:
            backend.put(QUARANTINE + key, [content.content[:most]])
        if not backend.get_into(key, content) or xxhash.xxh3_128_digest(content.content) != before:
            return "replaced"
        backend.delete_many([key])
    except CorruptBlobError as error:  # the store has no bytes to give
        if copy:
            raise BackendError(f"cannot be moved: {error}") from error
        backend.delete_many([key])
    return "quarantined" if copy else "deleted"


def _sound(blob: memoryview, key: str, protection: Protection | None) -> bool:
    """Good, or nothing that may be judged here."""
    try:
        envelope.unseal(blob, key=key, protection=protection, decrypt=False)
    except UnreadableBlobError:
        return True
    except CorruptBlobError:
        return False
    return True
