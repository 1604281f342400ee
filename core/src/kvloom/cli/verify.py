"""Telling what a blob in a store is worth, and putting a corrupt one aside, beside engines that use the store."""

from __future__ import annotations

import enum
import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom import envelope
from kvloom.cli.store import QUARANTINE, said
from kvloom.errors import BackendError, CorruptBlobError, UnreadableBlobError

if TYPE_CHECKING:
    from kvloom.contracts.storage import StorageBackend
    from kvloom.protection import Protection

MAX_BLOB_BYTES = 1 << 30
"""A blob beyond this is not read: memory stays within this for each thread."""


class Verdict(enum.Enum):
    """What became of a blob."""

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
    """What was done about a corrupt one: quarantined, deleted, kept, replaced (or removed: by an engine, meanwhile)."""


class _TooLong(Exception):
    pass


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
        """Judge a blob. Only what is corrupt twice is called so: it may have been replaced while it was read."""
        for _ in range(2):
            buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, mmap.PAGESIZE)
            landing = Landing(key, buffer, self._protection)
            try:
                if not self._backend.get_into(key, landing):
                    finding = Finding(key, Verdict.GONE)
                else:
                    finding = self._judge(key, landing.finish())
                break
            except CorruptBlobError as error:
                finding = Finding(key, Verdict.CORRUPT, landing.num_bytes, str(error))
            except UnreadableBlobError as error:
                finding = Finding(key, Verdict.UNREADABLE, landing.num_bytes, str(error))
                break
            except _TooLong:
                text = f"{landing.num_bytes} bytes, more than is read here ({MAX_BLOB_BYTES})"
                finding = Finding(key, Verdict.UNREADABLE, reason=text)
                break
            except Exception as error:
                finding = Finding(key, Verdict.FAILED, reason=said(error))
                break
            finally:
                self._buffers.append(landing.buffer)
        return finding

    def _judge(self, key: str, header: envelope.Header) -> Finding:
        num_bytes = header.header_bytes + header.payload_bytes
        serializer = header.description.serializer
        if self._serializers is not None and serializer not in self._serializers:
            return Finding(key, Verdict.UNREADABLE, num_bytes, f"serializer {serializer!r} is not this tier's")
        return Finding(key, Verdict.OK, num_bytes)


class Landing:
    """Where a backend puts a blob: memory that may be used again, verified as it fills."""

    def __init__(self, key: str, buffer: mmap.mmap, protection: Protection | None = None) -> None:
        self.buffer = buffer
        self._protection = protection
        self.num_bytes = 0
        self._key = key
        self._verifier: envelope.Verifier | None = None

    def reserve(self, num_bytes: int) -> memoryview:
        self.num_bytes = num_bytes
        if num_bytes == 0:
            raise CorruptBlobError("an empty blob")
        if num_bytes > MAX_BLOB_BYTES:
            raise _TooLong
        if num_bytes > len(self.buffer):
            self.buffer = mmap.mmap(-1, num_bytes)
        view = memoryview(self.buffer)[:num_bytes]
        self._verifier = envelope.Verifier(view, key=self._key, protection=self._protection)
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
        return memoryview(self.buffer)[header.header_bytes : self.num_bytes]


def put_aside(backend: StorageBackend, key: str, *, copy: bool, protection: Protection | None) -> str:
    """Delete a corrupt blob, with `copy` after a copy of it is under `quarantine/`; what was done, in a word.

    What is there is compared with what was judged right before it goes. A version that is written in that very moment
    may go with it, which makes a miss; none is served wrong. Raises BackendError with what is in the way.
    """
    try:
        before = _content(backend.get, key)
        if before is None or _sound(before, key, protection):
            return "replaced"
        if copy:
            backend.put(QUARANTINE + key, [before])
        if _content(backend.get, key) != before:
            return "replaced"
        backend.delete_many([key])
    except CorruptBlobError as error:  # the store has no bytes to give
        if copy:
            raise BackendError(f"cannot be moved: {error}") from error
        backend.delete_many([key])
    return "quarantined" if copy else "deleted"


def _content(get: Callable[[str], bytes | bytearray | memoryview | None], key: str) -> bytes | None:
    blob = get(key)
    return None if blob is None else bytes(blob)


def _sound(blob: bytes, key: str, protection: Protection | None) -> bool:
    """Good, or nothing that may be judged here."""
    try:
        envelope.unseal(blob, key=key, protection=protection, decrypt=False)
    except UnreadableBlobError:
        return True
    except CorruptBlobError:
        return False
    return True
