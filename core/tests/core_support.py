"""Support for the core's tests: small KV, a backend with switches, and the plugin that provides it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from layers_codec import LossyStreamsSerializer, StreamsSerializer

from kvloom import (
    Buffer,
    Buffers,
    Chunk,
    ChunkEvent,
    ChunkKey,
    Config,
    Entry,
    Event,
    GPUConnector,
    KVSpec,
    MappedBlob,
    MemoryFormat,
    Observer,
    ReadDone,
    Request,
    Serializer,
    Sink,
    StorageBackend,
    Watched,
    WriteDone,
    hookimpl,
)
from kvloom.builtin.dict_backend import DictBackend
from kvloom.builtin.plain import PlainConnector
from kvloom.builtin.raw import RawSerializer
from kvloom.memory import pages_of
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.index.ledger import Ledger, Victim

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
CHUNK = 4
CHUNK_BYTES = 2 * 2 * CHUNK * 8 * 2


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(seed))


def kv_of(count: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(2, 2, count, 8, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


def matches(got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor) -> bool:
    """The masked tokens are those of `want`, and the others were not touched (zero)."""
    return torch.equal(got[:, :, mask], want[:, :, mask]) and not got[:, :, ~mask].any()


class Shelf(DictBackend):
    """Dictionaries that outlive the engine, found again by name; and switches to make them fail."""

    type = "shelf"
    persistent = True
    shared = True
    shelves: ClassVar[dict[str, Shelf]] = {}

    class Config(Config):
        shelf: str = "default"

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config)
        old = Shelf.shelves.get(config.shelf)
        if old is not None:
            self._blobs = old._blobs
        Shelf.shelves[config.shelf] = self
        self.before: Callable[[str, str], None] = lambda verb, key: None

    def put(self, key: str, blob: Buffers) -> None:
        self.before("put", key)
        super().put(key, blob)

    def get(self, key: str) -> Buffer | None:
        self.before("get", key)
        return super().get(key)

    def contains(self, key: str) -> bool:
        self.before("contains", key)
        return super().contains(key)

    def delete(self, key: str) -> None:
        self.before("delete", key)
        super().delete(key)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Whole pages, as what is written counts: whether the first listing comes before a put changes no account."""
        for key, nbytes, *times in super().scan(prefix):
            yield Entry(key, pages_of(nbytes), *times)

    @property
    def blobs(self) -> dict[str, bytes]:
        return {key: blob for key, blob in list(self._blobs.items()) if not key.startswith("spec/")}


class Crate(Shelf):
    """A shelf that is read and written in batches, from the last key to the first."""

    type = "crate"
    threads = 2

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config, spec)
        self.batches: list[list[str]] = []
        """Keys of the batches that were read."""
        self.puts: list[list[str]] = []
        """Keys of the batches that were written."""
        self.outcomes: Callable[[str, Exception | None], Sequence[Exception | None]] = lambda key, outcome: [outcome]
        """The outcome that it reports of a blob that was put."""
        self.all_at_once = False
        """They come from the first to the last, and it says nothing of any before all have come."""

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        self.batches.append([key for key, _ in requests])
        numbered = list(enumerate(requests))
        outcomes = list(self._outcomes(numbered)) if self.all_at_once else self._outcomes(numbered[::-1])
        for number, outcome in outcomes:
            done(number, outcome)

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        self.puts.append([key for key, _ in requests])
        for number, (key, blob) in reversed(list(enumerate(requests))):
            self.before("batch", key)
            outcome: Exception | None = None
            try:
                self.put(key, blob)
            except Exception as error:
                outcome = error
            for each in self.outcomes(key, outcome):
                done(number, each)

    def delete_many(self, keys: Sequence[str]) -> None:
        self.before("delete_many", " ".join(keys))
        super().delete_many(keys)

    def _outcomes(self, requests: Sequence[tuple[int, tuple[str, Sink]]]) -> Iterator[tuple[int, bool | Exception]]:
        for number, (key, sink) in requests:
            self.before("batch", key)
            try:
                yield number, self.get_into(key, sink)
            except Exception as error:
                yield number, error


class Pane:
    """A blob of a window. `before` runs when it is asked about, with how often it was."""

    def __init__(self, window: Window, key: str, blob: bytes) -> None:
        self.window, self.key, self.blob = window, key, blob
        self.view = memoryview(bytearray(blob))
        self.asked = 0
        self.closed = False

    def current(self) -> bool:
        assert not self.closed
        self.asked += 1
        self.window.before_asked(self)
        return self.window._blobs.get(self.key) is self.blob

    def gone(self) -> bool:
        return self.key not in self.window._blobs

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.view[:] = bytes(len(self.view))


class Window(Shelf):
    """A shelf in the memory of this machine."""

    type = "window"

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config, spec)
        self.panes: list[Pane] = []
        self.before_asked: Callable[[Pane], None] = lambda pane: None

    def damage(self, key: str) -> None:
        """Both the blob and what others see of it."""
        self._blobs[key] = bytes(100)
        for pane in self.panes:
            if pane.key == key:
                pane.view[100:] = bytes(len(pane.view) - 100)

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        self.before("map", key)
        blob = self._blobs.get(key)
        if blob is None or len(blob) > most_bytes:
            return None
        self.panes.append(Pane(self, key, blob))
        return self.panes[-1]


def eventually(done: Callable[[], Any]) -> bool:
    until = time.monotonic() + 60
    while not done() and time.monotonic() < until:
        time.sleep(0.002)
    return bool(done())


class Gate:
    """Lets nobody through until it is opened."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.waiting = 0

    def __call__(self, verb: str, key: str) -> None:
        self.waiting += 1
        self._event.wait(60)

    def reached(self, calls: int = 1) -> None:
        """Wait until that many have come to it; fail if they do not, as where a deadline ended one before."""
        assert eventually(lambda: self.waiting >= calls), f"{self.waiting} of {calls} calls came to the gate"

    def open(self) -> None:
        self._event.set()


class Said:
    """A call that was answered at once."""

    done = True

    def __init__(self, value: Any) -> None:
        self.value = value

    def peek(self) -> Any:
        return self.value


class Serving:
    """Calls of a tier that asks at once."""

    def serves(self, context: object) -> bool:
        return True

    def begin(self, verb: str, function: Callable[[], Any], context: object) -> Said:
        return Said(function())

    def answer(self, verb: str, call: Said, context: object, *, seconds: float = 0.0) -> Any:
        return call.value


class LossySerializer(Serializer):
    """Keeps the sign of every value and nothing else."""

    type = "signs"
    lossless = False
    formats = frozenset({MemoryFormat.KV_BLOB})

    def encode(self, chunk: Chunk) -> Buffers:
        return [(chunk.tensor > 0).to(torch.uint8).numpy().tobytes()]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        signs = torch.frombuffer(bytearray(blob[0]), dtype=torch.uint8).view(into.tensor.shape)
        into.tensor.copy_(signs * 2.0 - 1.0)


class PaddedSerializer(RawSerializer):
    """Raw bytes and 2 MiB of zeros, as it says beforehand."""

    type = "padded"

    def encode(self, chunk: Chunk) -> Buffers:
        return [*super().encode(chunk), bytes(2 << 20)]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(blob[:-1], into)

    view = Serializer.view

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return chunk.nbytes + (2 << 20)


class PagesConnector(PlainConnector):
    """Claims to move opaque pages."""

    type = "pages"
    format = MemoryFormat.KV_PAGES


class PromptLedger(Ledger):
    """The ledger of a store that deletes victims as soon as they are named."""

    def admit(self, key: ChunkKey, nbytes: int, chain: Chain = NO_CHAIN) -> list[Victim] | None:
        victims = super().admit(key, nbytes, chain)
        self.deleted(victims or ())
        return victims

    def release(self, nbytes: int) -> list[Victim]:
        victims = super().release(nbytes)
        self.deleted(victims)
        return victims

    def expire(self, limit: int = 256) -> list[Victim]:
        victims = super().expire(limit)
        self.deleted(victims)
        return victims

    def recover(self, entries: Iterable[Entry]) -> list[Victim]:
        victims = super().recover(entries)
        self.deleted(victims)
        return victims


@hookimpl
def kvloom_serializers() -> list[type[Serializer]]:
    return [LossySerializer, PaddedSerializer, StreamsSerializer, LossyStreamsSerializer]


@hookimpl
def kvloom_gpu_connectors() -> list[type[GPUConnector]]:
    return [PagesConnector]


@hookimpl
def kvloom_storage_backends() -> list[type[StorageBackend]]:
    return [Shelf, Crate, Window]


class Watcher(Observer):
    """Keeps what it is told of chunks, and which of them are where now."""

    type = "watcher"
    sees_chunks = True
    made: ClassVar[list[Watcher]] = []

    def __init__(self, config: Any = None, spec: KVSpec | None = None) -> None:
        super().__init__(config or self.Config(), spec)
        self.told: list[ChunkEvent] = []
        self.there: dict[str, set[ChunkKey]] = {}
        Watcher.made.append(self)

    def on_event(self, event: Event) -> None:
        """Sums are of no interest."""

    def on_chunks(self, event: ChunkEvent) -> None:
        self.told.append(event)
        there = self.there.setdefault(event.tier, set())
        if event.name == "stored":
            there.update(event.keys)
        else:
            there.difference_update(event.keys)


class Blinkered(Watcher):
    """Did not ask for chunks."""

    type = "blinkered"
    sees_chunks = False


class WitnessConfig(Config):
    refuses: bool = False


class Witness(Observer):
    """Keeps what it is told of requests, with the name of the thread that each began on."""

    type = "witness"
    sees_requests = True
    Config = WitnessConfig
    made: ClassVar[list[Witness]] = []

    def __init__(self, config: Any = None, spec: KVSpec | None = None) -> None:
        super().__init__(config or self.Config(), spec)
        self.seen: list[tuple[Request, object]] = []
        self.watched: Any = None
        self.trouble: Exception | None = None
        self.before: Callable[[], None] = lambda: None
        Witness.made.append(self)

    def on_event(self, event: Event) -> None:
        """Sums are of no interest."""

    def watch(self, engine: Watched) -> None:
        if self.config.refuses:
            raise OSError(98, "address in use")
        self.watched = engine

    def caller(self) -> object:
        return threading.current_thread().name

    def on_request(self, request: Request, caller: object) -> None:
        self.before()
        if self.trouble is not None:
            raise self.trouble
        self.seen.append((request, caller))


@hookimpl
def kvloom_observers() -> list[type[Observer]]:
    return [Watcher, Blinkered, Witness]
