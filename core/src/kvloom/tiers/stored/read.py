"""Reading a blob into the pool: verified as it arrives, checked against what was asked for, decoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from kvloom.bounded import one_line
from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import MappedBlob, StorageBackend
from kvloom.device import device_of
from kvloom.errors import BackendError, CorruptBlobError, KVLoomError, UnreadableBlobError
from kvloom.format import envelope, native_verifier
from kvloom.format.encryption import Protection
from kvloom.memory import Reservation
from kvloom.runtime import Runtime
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.stored.calls import NoRoomError, guarded
from kvloom.tiers.stored.decoding import DeviceDecoder, Job
from kvloom.tiers.stored.inflight import Wanted
from kvloom.tiers.tier import Layout, Loaded
from kvloom.types import Chunk, ChunkKey

log = logging.getLogger(__name__)

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
        self._runtime = runtime
        self._now, self._wall = runtime.now, runtime.wall
        self._making = runtime.lock()
        self._decoders_on: dict[torch.device, DeviceDecoder | None] = {}
        """Those on devices; None where there is no room."""
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
        record: RequestTrace = NO_TRACE, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Read blobs in one call of the backend, and tell of each, once, as soon as that is known.

        seconds: how long filling the memory of a blob may take. since: a mark of the removals from before; what was
        removed after it is not kept in memory. chain: what they are part of, as `MemoryTier.insert` takes it. on_wait:
        called before this waits for memory that is in use; None: it does not wait, which it may only do where it holds
        no memory for other blobs. record: where it is noted. device: where chunks are decoded, by one launch, if their
        serializer can.
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
        encoded: dict[int, tuple[envelope.Header, Serializer, Reservation]] = {}
        decoder: DeviceDecoder | None = None

        def done(number: int, outcome: bool | Exception) -> None:
            nonlocal decoder
            unreported.remove(number)  # a KeyError in a backend that says it twice
            buffer = buffers[number]
            told: Outcome = outcome if isinstance(outcome, Exception) else None
            try:
                if outcome is True:
                    header = buffer.finish()
                    serializer = self.check(header, wanted[number].shape, wanted[number].num_tokens)
                    self._learn_length(header, wanted[number].shape)
                    nbytes = self._layout.nbytes(wanted[number].shape)
                    there = self._decoder_on(device, serializer, nbytes)
                    room = None if there is None else there.reserve(nbytes, deadline=self._now() + seconds)
                    if room is not None:
                        encoded[number], decoder = (header, serializer, room), there
                        return
                    told = header, self._decode(
                        wanted[number].key, header, buffer, serializer, reserve, since=since, chain=chain,
                        record=record,
                    )  # fmt: skip
            except Exception as error:
                told = error
            finally:
                if number not in encoded:
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
        try:
            if encoded:
                assert decoder is not None
                self._decode_there(decoder, encoded, wanted, buffers, tell, since=since, chain=chain, record=record)
        finally:
            for number, (_, _, room) in encoded.items():
                buffers[number].abandon()
                room.abandon()

    def close(self) -> None:
        """Give the memory on devices back."""
        for decoder in tuple(self._decoders_on.values()):
            if decoder is not None:
                decoder.close()

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

    def _learn_length(self, header: envelope.Header, shape: tuple[int, ...]) -> None:
        plain = header.payload_bytes == self._layout.nbytes(shape)  # others differ in length
        self._lengths[shape] = header.header_bytes + header.payload_bytes if plain else 0

    def _decoder_on(self, where: torch.device | None, serializer: Serializer, nbytes: int) -> DeviceDecoder | None:
        """The decoder on this device, with memory for chunks of this size; None if the processor is to decode."""
        if where is None or not serializer.decodes_on(where) or (device := device_of(where)) is None:
            return None
        with self._making:
            if where not in self._decoders_on:
                try:
                    made = DeviceDecoder(where, device, nbytes, self._runtime)
                except RuntimeError as error:
                    log.warning("tier=%s the processor decodes: %s has no room: %s", self._name, where, one_line(error))
                    made = None
                self._decoders_on[where] = made
            return self._decoders_on[where]

    def _decode_there(
        self, decoder: DeviceDecoder, encoded: Mapping[int, tuple[envelope.Header, Serializer, Reservation]],
        wanted: Sequence[Wanted], buffers: Sequence[_BlobBuffer], tell: Callable[[int, Outcome], None], *,
        since: int, chain: Chain, record: RequestTrace,
    ) -> None:  # fmt: skip
        """Decode blobs that have arrived, by one launch, into the memory of a device that is reserved for them."""
        jobs: dict[int, Job] = {}
        began = record.now()
        for number, (header, serializer, room) in encoded.items():
            about = header.description
            tensor = room.tensor(about.shape, self._layout.dtype)
            chunk = Chunk(tensor, self._layout.format, about.num_tokens, about.fidelity, about.start)
            blob = envelope.split(header, buffers[number].view[header.header_bytes :])
            jobs[number] = Job(serializer, blob, chunk)
        decoder.decode([*jobs.values()])
        nbytes, codec = sum(job.into.nbytes for job in jobs.values()), next(iter(jobs.values())).serializer.type
        record.note("decode", self._name, began, record.now(), nbytes=nbytes, codec=codec)
        for number, job in jobs.items():
            header, _, room = encoded[number]
            if job.error is not None:
                room.abandon()
            tell(number, job.error or (header, self._kept(wanted[number].key, header, job.into, room, since, chain)))

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
        return self._kept(key, header, chunk, reservation, since, chain)

    def _kept(
        self, key: ChunkKey, header: envelope.Header, chunk: Chunk, reservation: Reservation, since: int, chain: Chain
    ) -> Loaded | None:
        """The chunk, leased and in memory; None if it came too late."""
        block = reservation.seal()
        written = header.description.written or None
        if block is None:
            return None
        return self._memory.insert(key, chunk, block, written=written, dirty=False, since=since, chain=chain)


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
