"""Writing a chunk as a blob: encoded, framed, given room, put, and counted as what it turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import StorageBackend
from kvloom.format import envelope
from kvloom.format.encryption import Protection
from kvloom.memory import pages_of
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import Chain
from kvloom.tiers.index.ledger import Fidelity, Ledger, Victim
from kvloom.tiers.stored.maintenance import Maintenance
from kvloom.tiers.tier import Loaded
from kvloom.types import EXACT, Buffers, ChunkKey


class Written(NamedTuple):
    """Result of writing a chunk."""

    nbytes: int
    fits: bool
    """False: it is larger than what the tier may hold beside what comes before it, and was not written."""
    kept: bool
    """False: it was removed while it was being written."""


class BlobWriter:
    """Writes chunks to one tier. Keeps no state between calls."""

    def __init__(
        self, backend: StorageBackend, serializer: Serializer, ledger: Ledger, maintenance: Maintenance, *,
        protection: Protection | None = None, name: str = "",
    ) -> None:  # fmt: skip
        """name: the tier's."""
        self._name = name
        self._backend = backend
        self._serializer = serializer
        self._protection = protection
        self._ledger = ledger
        self._maintenance = maintenance

    def write(
        self,
        key: ChunkKey,
        loaded: Loaded,
        *,
        chain: Chain,
        removed: Callable[[], bool],
        record: RequestTrace = NO_TRACE,
    ) -> Written:
        """Write a chunk. Raises what serializer and backend raise.

        chain: nothing of it goes for what is behind it. removed: whether the chunk has been removed meanwhile.
        """
        if removed():
            return Written(0, fits=True, kept=False)
        began = record.now()
        framed = self._framed(key, loaded)
        codec, kv_bytes = self._serializer.type, loaded.chunk.nbytes
        record.note("encode", self._name, began, record.now(), nbytes=kv_bytes, codec=codec)
        nbytes = sum(memoryview(part).nbytes for part in framed)
        victims = self._ledger.admit(key, pages_of(nbytes), chain)
        if victims is None:
            return Written(nbytes, fits=False, kept=False)
        self._put(key, framed, victims, pages_of(nbytes), removed)
        if removed():
            self._retract(key, pages_of(nbytes))
            return Written(nbytes, fits=True, kept=False)
        fidelity = Fidelity.EXACT if self._serializer.fidelity == EXACT else Fidelity.LOSSY
        self._ledger.note(key, fidelity, nbytes=pages_of(nbytes), written=loaded.written or None)
        self._maintenance.owes_no_more(key)
        self._maintenance.trim(key, chain)
        return Written(nbytes, fits=True, kept=True)

    def _framed(self, key: ChunkKey, loaded: Loaded) -> Buffers:
        chunk, serializer = loaded.chunk, self._serializer
        description = envelope.Description(
            str(key),
            serializer.type,
            tuple(chunk.tensor.shape),
            str(chunk.tensor.dtype).removeprefix("torch."),
            chunk.format.value,
            chunk.num_tokens,
            serializer.fidelity,
            serializer.params,
            int(loaded.written),
            chunk.start,
        )
        return envelope.seal(description, serializer.encode(chunk), self._protection)

    def _put(
        self, key: ChunkKey, framed: Buffers, victims: Sequence[Victim], nbytes: int, removed: Callable[[], bool]
    ) -> None:
        try:
            try:
                self._maintenance.put(key, framed, victims)
            except Exception as error:
                if not self._maintenance.make_room(error, nbytes):
                    raise
                self._backend.put(str(key), framed)
        except BaseException:
            if removed():  # and it may be there all the same
                self._retract(key, nbytes)
            else:
                self._reconsider(key, nbytes, Fidelity.UNKNOWN)
            raise

    def _retract(self, key: ChunkKey, nbytes: int) -> None:
        try:
            self._backend.delete(str(key))
        except BaseException:
            self._reconsider(key, nbytes, Fidelity.UNREADABLE)  # until it is gone: counted, and not served
            self._maintenance.owes(key)
            raise
        self._ledger.forget([key])

    def _reconsider(self, key: ChunkKey, nbytes: int, fidelity: Fidelity) -> None:
        if self._maintenance.still_there([key])[0]:
            self._ledger.note(key, fidelity, nbytes=nbytes)
        else:
            self._ledger.forget([key])
