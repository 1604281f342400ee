"""The fault proxies do what they say, and an engine behind them serves right KV or counts a miss."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_store import Provided, TinyBackend, serving

from kvloom import Buffers, Engine, KVSpec, ReadDone, Registry, Sink, StorageBackend, WriteDone
from kvloom.builtin.dict_backend import DictBackend
from kvloom_testkit import BackendConformance, faults
from kvloom_testkit.faults import Delays, FailsOn, Flips, Hangs, Proxy, TcpProxy, Truncates, behind
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend
from kvloom_testkit.requirements import claims

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
CHUNK, COUNT = 4, 16
TOKENS = torch.arange(COUNT)
KV = torch.randn(2, 2, COUNT, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
Wrap = Callable[[StorageBackend], StorageBackend]


class BatchingDirectoryBackend(CompleteDirectoryBackend):
    """Notes the batches that it is given."""

    type = "batching_directory"

    def __init__(self, config: Any, spec: Any = None) -> None:
        super().__init__(config, spec)
        self.batches: list[tuple[str, list[str]]] = []

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        self.batches.append(("get_many_into", [key for key, _ in requests]))
        super().get_many_into(requests, done)

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        self.batches.append(("put_many", [key for key, _ in requests]))
        super().put_many(requests, done)


DIRECTORIES = pytest.mark.parametrize("directory", [CompleteDirectoryBackend, BatchingDirectoryBackend])


def is_chunk(key: str) -> bool:
    return not key.startswith("spec/")


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    """An engine with one tier of a class; settings as in YAML."""
    engines: list[Engine] = []
    mine = EntryPoint("tiny_store", "tiny_store", "kvloom.v1")

    def open(cls: type[StorageBackend], **settings: Any) -> Engine:
        Provided.classes = [cls]
        registry = Registry.discover(entry_points=[*entry_points(group="kvloom.v1", name="builtin"), mine])
        tier = {"type": cls.type, "deadline": "5s", **settings}
        config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [tier]}
        engines.append(Engine.open(config, SPEC, registry=registry))
        return engines[-1]

    yield open
    for engine in engines:
        engine.close()


def store(engine: Engine) -> None:
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)


def retrieve(engine: Engine) -> list[bool]:
    """Per chunk, whether it was retrieved; asserts that what was is right, and that nothing else was touched."""
    got = torch.zeros_like(KV)
    mask = engine.retrieve(TOKENS, kv=got)
    assert torch.equal(got[:, :, mask], KV[:, :, mask]) and not got[:, :, ~mask].any()
    return mask[::CHUNK].tolist()


def count(engine: Engine, name: str) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == name)


BAD_READS: dict[str, Wrap] = {
    "fails once": lambda inner: FailsOn(inner, 2, verbs=faults.READS, keys=is_chunk),
    "fails for good": lambda inner: FailsOn(inner, 1, for_good=True, verbs=faults.READS, keys=is_chunk),
    "flips the payload": lambda inner: Flips(inner, -1, keys=is_chunk),
    "flips the header": lambda inner: Flips(inner, 20, keys=is_chunk),
    "loses the last byte": lambda inner: Truncates(inner, -1, keys=is_chunk),
    "keeps ten bytes": lambda inner: Truncates(inner, 10, keys=is_chunk),
    "keeps nothing": lambda inner: Truncates(inner, 0, keys=is_chunk),
}


@DIRECTORIES
@pytest.mark.parametrize("wrap", BAD_READS.values(), ids=BAD_READS.keys())
def test_bad_reads_are_counted_misses_and_never_wrong(
    open_engine: Callable[..., Engine], tmp_path: Path, wrap: Wrap, directory: type[StorageBackend]
) -> None:
    store(open_engine(directory, path=str(tmp_path)))
    engine = open_engine(behind(directory, wrap), path=str(tmp_path))
    assert not all(retrieve(engine))
    assert count(engine, "missed") >= 1 and count(engine, "corrupt") + count(engine, "tier_error") >= 1


BAD_WRITES: dict[str, Wrap] = {
    "fails once": lambda inner: FailsOn(inner, 2, verbs=faults.WRITES, keys=is_chunk),
    "flips": lambda inner: Flips(inner, -1, verbs=faults.WRITES, keys=is_chunk),
    "truncates": lambda inner: Truncates(inner, -100, verbs=faults.WRITES, keys=is_chunk),
}


@DIRECTORIES
@pytest.mark.parametrize("wrap", BAD_WRITES.values(), ids=BAD_WRITES.keys())
def test_bad_writes_are_found_when_they_are_read(
    open_engine: Callable[..., Engine], tmp_path: Path, wrap: Wrap, directory: type[StorageBackend]
) -> None:
    store(open_engine(behind(directory, wrap), path=str(tmp_path)))
    engine = open_engine(directory, path=str(tmp_path))
    assert not all(retrieve(engine)) and count(engine, "missed") >= 1


def test_a_write_whose_answer_was_lost_is_there(open_engine: Callable[..., Engine], tmp_path: Path) -> None:
    def wrap(inner: StorageBackend) -> StorageBackend:
        return FailsOn(inner, 1, late=True, verbs=faults.WRITES, keys=is_chunk)

    store(open_engine(behind(CompleteDirectoryBackend, wrap), path=str(tmp_path)))
    assert retrieve(open_engine(CompleteDirectoryBackend, path=str(tmp_path)))[0]


def test_calls_that_hang_are_given_up_and_go_on_when_they_are_released(
    open_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    store(open_engine(CompleteDirectoryBackend, path=str(tmp_path)))
    made: list[Hangs] = []

    def wrap(inner: StorageBackend) -> StorageBackend:
        made.append(Hangs(inner, verbs=faults.READS, keys=is_chunk))
        return made[-1]

    engine = open_engine(behind(CompleteDirectoryBackend, wrap), path=str(tmp_path), deadline="100ms")
    assert retrieve(engine) == [False] * (COUNT // CHUNK) and made[0].hung.is_set()
    made[0].release()
    assert made[0].get("absent") is None


def test_delays_take_their_time_and_change_nothing() -> None:
    backend = Delays(DictBackend(DictBackend.Config()), 0.05, verbs={"get"})
    backend.put("key", [b"blob"])
    before = time.monotonic()
    assert backend.get("key") == b"blob" and time.monotonic() - before >= 0.05
    backend.seconds = 60.0
    assert backend.contains("key"), "not a verb that is meant"


def test_fails_on_counts_from_one_and_once() -> None:
    backend = FailsOn(DictBackend(DictBackend.Config()), 2, verbs={"contains"}, error=lambda: TimeoutError("late"))
    assert backend.contains("key") is False
    with pytest.raises(TimeoutError):
        backend.contains("key")
    assert backend.contains("key") is False and backend.calls == 3
    backend = FailsOn(DictBackend(DictBackend.Config()), 1, for_good=True)
    for _ in range(3):
        with pytest.raises(OSError):
            backend.put("key", [b"blob"])
    backend.works = True
    backend.put("key", [b"blob"])


def test_an_unknown_verb_is_refused() -> None:
    with pytest.raises(ValueError, match="no fetch"):
        Delays(DictBackend(DictBackend.Config()), 1.0, verbs={"fetch"})


def test_what_is_behind_a_proxy_claims_the_same() -> None:
    for cls in (DictBackend, CompleteDirectoryBackend, BatchingDirectoryBackend):
        proxied = behind(cls, Proxy)
        for name in ("type", "persistent", "shared", "bounded", "threads", "Config"):
            assert getattr(proxied, name) == getattr(cls, name)
        for name in ("create", "hold", "identity", "touch_many", "scan", "get_many_into", "put_many"):
            assert claims(proxied, name, StorageBackend) == claims(cls, name, StorageBackend)


# -- batches -----------------------------------------------------------------------------------------------------------

KEYS = ["a", "b", "c", "d"]


class Shelf:
    """A sink."""

    def __init__(self) -> None:
        self.memory = memoryview(b"")
        self.told: list[int] = []

    def reserve(self, num_bytes: int) -> memoryview:
        self.memory = memoryview(bytearray(num_bytes))
        return self.memory

    def filled(self, num_bytes: int) -> None:
        self.told.append(num_bytes)


@pytest.fixture
def inner(tmp_path: Path) -> BatchingDirectoryBackend:
    return BatchingDirectoryBackend(BatchingDirectoryBackend.Config(path=tmp_path))


def put(backend: StorageBackend) -> dict[int, Exception | None]:
    outcomes: dict[int, Exception | None] = {}
    backend.put_many([(key, [key.encode() * 9]) for key in KEYS], outcomes.__setitem__)
    return outcomes


def got(backend: StorageBackend) -> dict[str, bytes | str | None]:
    """What a batch gives: blobs, None for those that are missing, the names of errors."""
    sinks = [Shelf() for _ in KEYS]
    outcomes: dict[int, bool | Exception] = {}
    backend.get_many_into(list(zip(KEYS, sinks, strict=True)), outcomes.__setitem__)
    return {
        KEYS[number]: type(outcome).__name__ if isinstance(outcome, Exception) else bytes(sinks[number].memory) or None
        for number, outcome in sorted(outcomes.items())
    }


RIGHT = {key: key.encode() * 9 for key in KEYS}


@pytest.mark.parametrize(
    "wrap",
    [Proxy, lambda inner: Delays(inner, 0.01), lambda inner: Flips(inner, verbs=())],
    ids=["plain", "slow", "alters"],
)
def test_a_batch_passes_as_a_batch(inner: BatchingDirectoryBackend, wrap: Wrap) -> None:
    assert put(wrap(inner)) == dict.fromkeys(range(4)) and got(wrap(inner)) == RIGHT
    assert inner.batches == [("put_many", KEYS), ("get_many_into", KEYS)]


def test_one_request_of_a_batch_fails(inner: BatchingDirectoryBackend) -> None:
    outcomes = put(FailsOn(inner, 2, verbs={"put_many"}))
    assert [number for number, outcome in outcomes.items() if isinstance(outcome, OSError)] == [1] and len(
        outcomes
    ) == 4
    assert inner.batches == [("put_many", ["a", "c", "d"])] and not inner.contains("b")
    put(inner)
    assert got(FailsOn(inner, 3)) == {**RIGHT, "c": "OSError"}
    assert got(FailsOn(inner, 2, for_good=True)) == {**dict.fromkeys(KEYS, "OSError"), "a": RIGHT["a"]}
    assert got(FailsOn(inner, 1, keys=lambda key: key == "d")) == {**RIGHT, "d": "OSError"}


def test_the_outcome_of_one_request_is_lost(inner: BatchingDirectoryBackend) -> None:
    outcomes = put(FailsOn(inner, 2, late=True))
    assert isinstance(outcomes[1], OSError) and [outcomes[number] for number in (0, 2, 3)] == [None] * 3
    assert got(inner) == RIGHT and inner.batches[0] == ("put_many", KEYS)
    assert got(FailsOn(inner, 4, late=True)) == {**RIGHT, "d": "OSError"}


def test_a_batch_hangs_half_way(inner: BatchingDirectoryBackend) -> None:
    backend = Hangs(inner, keys=lambda key: key in "bc")
    outcomes: dict[int, Exception | None] = {}
    requests = [(key, [b"blob"]) for key in KEYS]
    thread = threading.Thread(target=backend.put_many, args=(requests, outcomes.__setitem__))
    thread.start()
    assert backend.hung.wait(20) and outcomes == {0: None, 3: None} and not inner.contains("b")
    backend.release()
    thread.join(20)
    assert outcomes == dict.fromkeys(range(4)) and inner.contains("b")


def test_blobs_of_a_batch_are_altered(inner: BatchingDirectoryBackend) -> None:
    put(Flips(inner, verbs=faults.WRITES, keys=lambda key: key == "b"))
    flipped = {**RIGHT, "b": b"b" * 8 + b"c"}
    assert got(inner) == flipped
    assert got(Flips(inner, 0, keys=lambda key: key == "d")) == {**flipped, "d": b"e" + b"d" * 8}
    assert got(Truncates(inner, 2, verbs={"get_many_into"})) == {key: blob[:2] for key, blob in flipped.items()}
    inner.delete("a")
    assert got(Truncates(inner, 2))["a"] is None
    assert [batch for _, batch in inner.batches] == [KEYS] * len(inner.batches)


Proxied = behind(CompleteDirectoryBackend, Proxy)


class TestProxied(BackendConformance):
    """A proxy that does nothing is as good as what is behind it."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: Proxied(Proxied.Config(path=tmp_path))


# -- networks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny() -> Iterator[tuple[TcpProxy, dict[str, bytes], Callable[..., TinyBackend]]]:
    """A proxy in front of a store, what is in the store, and how to open a backend that goes through the proxy."""
    with serving() as (port, blobs), TcpProxy("127.0.0.1", port) as proxy:

        def make(**settings: float) -> TinyBackend:
            return TinyBackend(TinyBackend.Config(port=proxy.port, **settings))

        yield proxy, blobs, make


Tiny = tuple[TcpProxy, dict[str, bytes], Callable[..., TinyBackend]]


def test_a_proxy_without_faults_passes_everything_on(tiny: Tiny) -> None:
    proxy, blobs, make = tiny
    blob = bytes(range(256)) * 4000
    make().put("key", [blob[:10], blob[10:]])
    assert blobs["key"] == blob and make().get("key") == blob and proxy.connections == 2


def test_an_answer_is_cut(tiny: Tiny) -> None:
    proxy, blobs, make = tiny
    blobs["key"] = bytes(300_000)
    proxy.answers.cut_after_bytes = 200_000
    with pytest.raises(ConnectionError):
        make().get("key")
    proxy.answers.cut_after_bytes = None
    assert make().get("key") == blobs["key"]


def test_a_request_is_cut(tiny: Tiny) -> None:
    proxy, blobs, make = tiny
    proxy.requests.cut_after_bytes = 100_000
    with pytest.raises((OSError, ValueError)):
        make().put("key", [bytes(300_000)])
    assert blobs == {}


def test_a_bit_is_turned_round(tiny: Tiny) -> None:
    proxy, blobs, make = tiny
    blobs["key"] = bytes(100_000)
    proxy.answers.flip_at = len("100000\n") + 70_000
    got = make().get("key")
    assert got is not None and [at for at, byte in enumerate(bytes(got)) if byte] == [70_000]
    proxy.answers.flip_at, proxy.answers.flip_each = None, 30_007
    got = make().get("key")
    assert got is not None and [at for at, byte in enumerate(bytes(got)) if byte] == [29_999, 60_006, 90_013]


def test_a_black_hole_answers_nothing_and_a_delay_late(tiny: Tiny) -> None:
    proxy, blobs, make = tiny
    blobs["key"] = b"blob"
    proxy.answers.black_hole = True
    with pytest.raises(TimeoutError):
        make(timeout_seconds=0.1).get("key")
    proxy.answers.black_hole = False
    proxy.answers.delay_seconds = 0.1
    before = time.monotonic()
    assert make().get("key") == b"blob" and time.monotonic() - before >= 0.1


def test_the_proxy_ends_with_its_block_whoever_is_connected() -> None:
    with serving() as (port, _), TcpProxy("127.0.0.1", port) as proxy:
        connection = socket.create_connection(("127.0.0.1", proxy.port))
        connection.sendall(b"half a line")
    with connection:
        connection.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    assert "kvloom-tcp-proxy" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    "answers",
    [
        {"cut_after_bytes": 100},
        {"cut_after_bytes": 4200},
        {"flip_at": 100},
        {"flip_at": 4150},
        {"black_hole": True},
    ],
    ids=str,
)
def test_an_engine_over_a_bad_network_misses_and_is_never_wrong(
    open_engine: Callable[..., Engine], tiny: Tiny, answers: dict[str, Any]
) -> None:
    proxy, blobs, _ = tiny
    store(open_engine(TinyBackend, port=proxy.port))
    assert retrieve(open_engine(TinyBackend, port=proxy.port)) == [True] * (COUNT // CHUNK)
    engine = open_engine(TinyBackend, port=proxy.port, timeout_seconds=0.2)
    for name, value in answers.items():
        setattr(proxy.answers, name, value)
    assert not all(retrieve(engine))
    assert count(engine, "missed") >= 1 and len(blobs) >= 1
