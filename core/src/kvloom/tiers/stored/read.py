"""Reading a blob into the pool: verified as it arrives, checked against what was asked for, decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import MappedBlob, StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, KVLoomError, UnreadableBlobError
from kvloom.format import envelope, native_verifier
from kvloom.format.encryption import Protection
from kvloom.memory import Reservation
from kvloom.runtime import Runtime
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.stored.calls import NoRoomError, guarded
from kvloom.tiers.stored.inflight import Wanted
from kvloom.tiers.tier import Layout, Loaded
from kvloom.types import Chunk, ChunkKey

_MOST_OUTLINES = 4096

_Reserve = Callable[[int], Reservation | None]
Viewed = tuple[envelope.Header, Chunk]
"""The header of a mapped blob, and the chunk in it."""
Outcome = tuple[envelope.Header, Loaded | None] | Exception | None
"""The outcome of reading a blob: its header, and its chunk unless it came too late; None if there is no blob.

Else CorruptBlobError, UnreadableBlobError, ExpiredBlobError, NoRoomError, or whatever the backend raised."""


class ExpiredBlobError(KVLoomError):
    """A blob that has outlived the tier's ttl."""


class BlobReader:
    """Turns the blobs of one tier into chunks in memory."""

    def __init__(
        self, layout: Layout, serializers: Sequence[Serializer], memory: MemoryTier, runtime: Runtime, *,
        exact_only: bool, ttl: float | None, protection: Protection | None = None, name: str = "",
    ) -> None:  # fmt: skip
        """serializers: those that blobs may be decoded with; of two of one type, the first. name: the tier's."""
        self._name = name
        self._layout = layout
        self._decoders = {serializer.type: serializer for serializer in reversed(serializers)}
        self._memory = memory
        self._now, self._wall = runtime.now, runtime.wall
        self._exact_only = exact_only
        self._ttl = ttl
        self._protection = protection
        # Others would be mapped first, and read then, to be decrypted or decoded in memory of the pool.
        self.views = protection is None and type(serializers[0]).view is not Serializer.view
        """Blobs as the tier writes them may be used where they lie."""
        self._outlines: dict[tuple[int, ...], tuple[torch.Tensor, int]] = {}
        self._lengths: dict[tuple[int, ...], int] = {}
        """Bytes of the blob of each shape that was read last; 0 if it was encoded."""

    def read(
        self, backend: StorageBackend, wanted: Sequence[Wanted], tell: Callable[[int, Outcome], None], *,
        seconds: float, since: int, chain: Chain = NO_CHAIN, on_wait: Callable[[], None] | None = None,
        record: RequestTrace = NO_TRACE,
    ) -> None:  # fmt: skip
        """Read blobs in one call of the backend, and tell of each, once, as soon as that is known.

        seconds: how long filling the memory of a blob may take. since: a mark of the removals from before; what was
        removed after it is not kept in memory. chain: what they are part of, as `MemoryTier.insert` takes it. on_wait:
        called before this waits for memory that is in use; None: it does not wait, which it may only do where it holds
        no memory for other blobs. record: where it is noted.
        """
        short_of_room = False

        def reserve(nbytes: int) -> Reservation | None:
            nonlocal short_of_room
            # What comes after it must not hold memory that the first without room will wait for.
            reservation = None if short_of_room else self._reserve(nbytes, seconds=seconds, on_wait=on_wait)
            short_of_room = short_of_room or reservation is None
            return reservation

        buffers = [
            _BlobBuffer(
                reserve, str(one.key), protection=self._protection, max_bytes=self.longest(one),
                expected_bytes=self._lengths.get(one.shape, 0),
            )
            for one in wanted
        ]  # fmt: skip
        unreported = set(range(len(wanted)))

        def done(number: int, outcome: bool | Exception) -> None:
            unreported.remove(number)  # a KeyError in a backend that says it twice
            buffer = buffers[number]
            told: Outcome = outcome if isinstance(outcome, Exception) else None
            try:
                if outcome is True:
                    told = self._arrived(buffer, wanted[number], reserve, since=since, chain=chain, record=record)
            except Exception as error:
                told = error
            finally:
                buffer.abandon()  # now, not when a traceback that refers to it is collected
            tell(number, told)

        error: Exception = BackendError("the backend gave no answer for a key")
        try:
            backend.get_many_into([(str(one.key), buffer) for one, buffer in zip(wanted, buffers, strict=True)], done)
        except Exception as caught:
            error = caught
        finally:
            for number in tuple(unreported):
                done(number, error)

    def longest(self, wanted: Wanted) -> int:
        """Return the bytes of the longest blob that such a chunk can have."""
        return self._outline(wanted.shape, wanted.num_tokens)[1] + envelope.MAX_HEADER_BYTES

    def mapped(self, blobs: Sequence[tuple[MappedBlob, Wanted]]) -> list[Viewed | None]:
        """Verify mapped blobs that are not signed; None for one that is damaged, no use here, or has to be decoded."""
        fitting = [len(blob.view) <= self.longest(wanted) for blob, wanted in blobs]
        some = [blob.view for (blob, _), fits in zip(blobs, fitting, strict=True) if fits]
        right = iter(native_verifier.right(some, envelope.MAX_BUFFERS))
        found: list[Viewed | None] = []
        for (blob, wanted), fits in zip(blobs, fitting, strict=True):
            try:
                found.append(self._viewed(blob.view, wanted, right=next(right)) if fits else None)
            except KVLoomError:
                found.append(None)
        return found

    def _viewed(self, blob: memoryview, wanted: Wanted, *, right: bool) -> Viewed | None:
        """right: native code has found all of it right."""
        outline, _ = self._outline(wanted.shape, wanted.num_tokens)
        verifier = envelope.Verifier(blob, key=str(wanted.key), right=right)
        verifier.filled(len(blob))
        header = verifier.finish()
        serializer = self.check(header, wanted.shape, wanted.num_tokens)
        payload = blob[header.header_bytes :]
        if len(payload) != self._layout.nbytes(wanted.shape):
            return None
        tensor = torch.frombuffer(payload, dtype=outline.dtype).view(wanted.shape)
        about = header.description
        like = Chunk(tensor, self._layout.format, about.num_tokens, about.fidelity, about.start)
        viewed = guarded(partial(serializer.view, payload, like))
        if viewed is None:
            return None
        return header, like if viewed is like else replace(like, tensor=viewed.tensor)

    def _arrived(
        self, buffer: _BlobBuffer, wanted: Wanted, reserve: _Reserve, *, since: int, chain: Chain, record: RequestTrace
    ) -> tuple[envelope.Header, Loaded | None]:
        header = buffer.finish()
        serializer = self.check(header, wanted.shape, wanted.num_tokens)
        plain = header.payload_bytes == self._layout.nbytes(wanted.shape)  # others differ in length
        self._lengths[wanted.shape] = header.header_bytes + header.payload_bytes if plain else 0
        loaded = self._decode(wanted.key, header, buffer, serializer, reserve, since=since, chain=chain, record=record)
        return header, loaded

    def _outline(self, shape: tuple[int, ...], num_tokens: int) -> tuple[torch.Tensor, int]:
        """Return a chunk of this shape without bytes, and the largest size of its blob's payload.

        Kept: there are as many as lengths of a prompt's last chunk, at most, and making one takes torch a while.
        """
        outline = self._outlines.get(shape)
        if outline is None:
            tensor = torch.empty(shape, dtype=self._layout.dtype, device="meta")
            like = Chunk(tensor, self._layout.format, num_tokens)
            longest = max(serializer.max_encoded_bytes(like) for serializer in self._decoders.values())
            if len(self._outlines) >= _MOST_OUTLINES:
                self._outlines.clear()
                self._lengths.clear()
            outline = self._outlines[shape] = tensor, longest
        return outline

    def _reserve(self, nbytes: int, *, seconds: float, on_wait: Callable[[], None] | None) -> Reservation | None:
        now = self._now()
        reservation = self._memory.reserve(nbytes, deadline=now + seconds)
        if reservation is None and on_wait is not None:
            on_wait()
            room_by = now + 0.8 * seconds  # so that a lack of memory is not taken for a slow store
            reservation = self._memory.reserve_by(nbytes, room_by, deadline=now + seconds)
        return reservation

    def expired(self, header: envelope.Header) -> bool:
        """Return whether the blob is past its time."""
        return self.outlived(header.description.written)

    def outlived(self, written: float) -> bool:
        """Return whether KV first stored at `written`, in seconds since the epoch, has expired; 0: unknown."""
        return self._ttl is not None and written > 0 and written + self._ttl <= self._wall()

    def check(self, header: envelope.Header, shape: tuple[int, ...], num_tokens: int) -> Serializer:
        """Return the decoder of the blob, or raise CorruptBlobError, ExpiredBlobError or UnreadableBlobError."""
        about = header.description
        here = (shape, str(self._layout.dtype).removeprefix("torch."), self._layout.format.value, num_tokens)
        if (about.shape, about.dtype, about.format, about.num_tokens) != here:
            raise CorruptBlobError("the blob of another shape")
        if self.expired(header):
            raise ExpiredBlobError
        serializer = self._decoders.get(about.serializer)
        if serializer is None:
            raise UnreadableBlobError(f"serializer {about.serializer!r} is not this tier's")
        if self._exact_only and not header.exact:
            raise UnreadableBlobError(f"fidelity {about.fidelity!r}, and the config says exact: true")
        return serializer

    def _decode(
        self, key: ChunkKey, header: envelope.Header, buffer: _BlobBuffer, serializer: Serializer, reserve: _Reserve, *,
        since: int, chain: Chain, record: RequestTrace,
    ) -> Loaded | None:  # fmt: skip
        about, dtype = header.description, self._layout.dtype
        tensor, _ = self._outline(about.shape, about.num_tokens)
        payload = buffer.view[header.header_bytes :]
        if len(payload) == self._layout.nbytes(about.shape):
            tensor = buffer.tensor(about.shape, dtype, offset=header.header_bytes)
        like = Chunk(tensor, self._layout.format, about.num_tokens, about.fidelity, about.start)
        viewed = guarded(partial(serializer.view, payload, like))
        if viewed is not None:
            chunk = like if viewed is like else replace(like, tensor=viewed.tensor)
            reservation = buffer.take()
        else:
            decoded = reserve(like.nbytes)
            if decoded is None:
                raise NoRoomError("no room in memory to decode a chunk")
            reservation = decoded
            chunk = replace(like, tensor=reservation.tensor(about.shape, dtype))
            began = record.now()
            try:
                guarded(partial(serializer.decode, envelope.split(header, payload), chunk))
            except BaseException:
                reservation.abandon()
                raise
            record.note("decode", self._name, began, record.now(), nbytes=like.nbytes, codec=serializer.type)
        block = reservation.seal()
        if block is None:
            return None
        return self._memory.insert(
            key, chunk, block, written=about.written or None, dirty=False, since=since, chain=chain
        )


class _BlobBuffer:
    """Memory of the pool that a backend fills with a blob, verified as it fills."""

    def __init__(
        self, reserve: _Reserve, key: str, *, max_bytes: int, expected_bytes: int, protection: Protection | None
    ) -> None:
        self.max_bytes = max_bytes
        self.expected_bytes = expected_bytes
        self._protection = protection
        self._reserve = reserve
        self._key = key
        self._reservation: Reservation | None = None
        self._verifier: envelope.Verifier | None = None

    def reserve(self, num_bytes: int) -> memoryview:
        if num_bytes == 0:
            raise CorruptBlobError("an empty blob")
        if num_bytes > self.max_bytes:  # before memory is emptied for it
            raise CorruptBlobError(f"{num_bytes} bytes, which no blob of such a chunk has")
        self.abandon()  # a backend that has lost its connection may begin anew
        self._reservation = self._reserve(num_bytes)
        if self._reservation is None:
            raise NoRoomError(f"no room in memory for a blob of {num_bytes} bytes")
        self._verifier = envelope.Verifier(self._reservation.view, key=self._key, protection=self._protection)
        return self._reservation.view

    def filled(self, num_bytes: int) -> None:
        assert self._verifier is not None
        self._verifier.filled(num_bytes)

    def native_filled(self) -> tuple[int, int] | None:
        assert self._verifier is not None
        return self._verifier.native_filled()

    def finish(self) -> envelope.Header:
        if self._verifier is None:
            raise CorruptBlobError("an empty blob")
        return self._verifier.finish()

    @property
    def view(self) -> memoryview:
        assert self._reservation is not None
        return self._reservation.view

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, offset: int) -> torch.Tensor:
        """The memory from byte `offset`."""
        assert self._reservation is not None
        return self._reservation.tensor(shape, dtype, offset=offset)

    def take(self) -> Reservation:
        """The memory, which is the caller's from now on."""
        assert self._reservation is not None
        reservation, self._reservation = self._reservation, None
        return reservation

    def abandon(self) -> None:
        """Give the memory back, unless it was taken."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.abandon()
