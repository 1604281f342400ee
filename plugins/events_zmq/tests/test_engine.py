"""Engines tell subscribers where KV is: what is stored, what goes, and who was told what."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq_support import SECONDS, Subscriber, subscriber

from kvloom import ChunkEvent, ChunkKey, ConfigError, Engine, EngineConfig, Segment, chain, check_config
from kvloom_events_zmq import publisher as publisher_module
from kvloom_events_zmq.naming import Names, block_hashes
from kvloom_events_zmq.observer import EventsLostError, ZmqEventsObserver
from kvloom_events_zmq.publisher import Publisher, Settings
from kvloom_events_zmq.wire import AllBlocksCleared, BlockRemoved, BlockStored
from kvloom_testkit.faults import free_port
from kvloom_testkit.subjects import SPEC

CHUNK = 16


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(seed))


def kv_of(count: int) -> torch.Tensor:
    return torch.ones(SPEC.blob_shape(count), dtype=SPEC.torch_dtype)


def config(tmp_path: Path | None = None, capacity: str = "8MiB", **events: Any) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = [{"type": "memory", "capacity": capacity}]
    if tmp_path is not None:
        tiers.append({"type": "disk", "path": str(tmp_path), "capacity": "1GiB"})
    events.setdefault("endpoint", f"tcp://127.0.0.1:{free_port()}")
    observers = [{"type": "events_zmq", **events}]
    return {"connector": "plain", "chunk_tokens": CHUNK, "tiers": tiers, "observers": observers}


def ready(engine: Engine, sub: Subscriber) -> None:
    """Wait until the subscription has reached the publisher: what is sent before is not received."""
    sub.socket.rcvtimeo = 100
    for _ in range(10 * SECONDS):
        engine.clear()
        try:
            sub.batch()
            break
        except zmq.Again:
            continue
    engine._events.flush(SECONDS)
    while True:
        try:
            sub.batch()
        except zmq.Again:
            break
    sub.socket.rcvtimeo = 1000 * SECONDS


def int_hash(key: ChunkKey) -> int:
    return int.from_bytes(key.digest, "big") & ((1 << 64) - 1)


def stored_and_removed(found: list[Any], kind: type) -> dict[int, str]:
    return {number: one.medium for one in found if isinstance(one, kind) for number in one.block_hashes}


def test_what_is_stored_and_removed_is_told_with_its_tokens(tmp_path: Path) -> None:
    settings_ = config(tmp_path)
    endpoint = settings_["observers"][0]["endpoint"]
    tokens = tokens_of(3 * CHUNK + 5)
    with Engine.open(settings_, SPEC) as engine, subscriber(endpoint) as sub:
        ready(engine, sub)
        segments = engine.segments(tokens)
        engine.store(tokens, kv=kv_of(len(tokens)))
        engine.flush()
        found: list[Any] = sub.events(6)
        assert all(isinstance(one, BlockStored) for one in found)
        for medium, tier in (("CPU", "memory"), ("STORAGE", "disk")):
            told = {one.block_hashes[0]: one for one in found if (one.medium, one.ownership) == (medium, tier)}
            parent = None
            for start, end, key in segments:
                one = told.pop(int_hash(key))
                assert (one.parent_block_hash, one.block_size, one.lora_id) == (parent, CHUNK, None)
                assert one.token_ids == tokens[start:end].tolist()
                parent = int_hash(key)
            assert not told
        engine.remove(tokens)
        gone: list[Any] = sub.events(4)
        assert all(isinstance(one, BlockRemoved) for one in gone)
        hashes = sorted(number for one in gone for number in one.block_hashes)
        assert hashes == sorted(2 * [int_hash(segment.key) for segment in segments])
        engine.clear()
        assert sub.events(1) == [AllBlocksCleared()]


def test_what_memory_evicts_is_told() -> None:
    chunk_bytes = kv_of(CHUNK).nbytes
    settings_ = config(capacity=str(4 * chunk_bytes))
    with Engine.open(settings_, SPEC) as engine, subscriber(settings_["observers"][0]["endpoint"]) as sub:
        ready(engine, sub)
        for seed in range(4):
            engine.store(tokens_of(4 * CHUNK, seed), kv=kv_of(4 * CHUNK))
        assert engine._events.flush(SECONDS)
        assert engine.memory is not None
        expected = {int_hash(key) for key in engine.memory.chunks()}
        there: set[Any] = set()
        gone = 0
        while there != expected or not gone:
            for one in sub.batch()[1].events:
                assert isinstance(one, BlockStored | BlockRemoved)
                if isinstance(one, BlockStored):
                    there.update(one.block_hashes)
                else:
                    there.difference_update(one.block_hashes)
                    gone += len(one.block_hashes)
        assert expected


def test_what_comes_back_from_a_tier_is_told(tmp_path: Path) -> None:
    tokens = tokens_of(2 * CHUNK)
    with Engine.open(config(tmp_path), SPEC) as engine:
        engine.store(tokens, kv=kv_of(len(tokens)))
    settings_ = config(tmp_path)
    with Engine.open(settings_, SPEC) as engine, subscriber(settings_["observers"][0]["endpoint"]) as sub:
        ready_without_clearing(sub, engine)
        engine.retrieve(tokens, kv=kv_of(len(tokens)))
        found = stored_and_removed(sub.events(2), BlockStored)
        assert found == {int_hash(segment.key): "CPU" for segment in engine.segments(tokens)}


def ready_without_clearing(sub: Subscriber, engine: Engine) -> None:
    sub.socket.rcvtimeo = 100
    for seed in range(1000, 1000 + 10 * SECONDS):
        other = tokens_of(CHUNK, seed)
        engine.store(other, kv=kv_of(CHUNK))
        engine.flush()
        try:
            sub.events(2)
            break
        except zmq.Again:
            continue
    sub.socket.rcvtimeo = 1000 * SECONDS


def test_salts_are_kept_to_oneself_unless_asked_for() -> None:
    for salted in (False, True):
        settings_ = config(salted=salted)
        with Engine.open(settings_, SPEC) as engine, subscriber(settings_["observers"][0]["endpoint"]) as sub:
            ready(engine, sub)
            for salt, seed in (("tenant", 1), ("", 2)):
                engine.store(tokens_of(CHUNK, seed), salt=salt, kv=kv_of(CHUNK))
            first: Any = sub.events(1)[0]
            assert first.token_ids == tokens_of(CHUNK, 1 if salted else 2).tolist()
            assert (first.extra_keys is not None) == salted
            assert "tenant" not in repr(first)


def test_a_subscriber_asks_for_what_it_missed() -> None:
    replay = f"tcp://127.0.0.1:{free_port()}"
    settings_ = config(replay_endpoint=replay, batch=2, topic="kv@here")
    with Engine.open(settings_, SPEC) as engine:
        engine.store(tokens_of(5 * CHUNK), kv=kv_of(5 * CHUNK))
        assert engine._events.flush(SECONDS)
        with subscriber(settings_["observers"][0]["endpoint"], replay, "kv@here") as sub:
            batches: list[Any] = []
            while sum(len(batch.events) for _, batch in batches) < 5:
                batches = sub.replay(0)
            numbers = [number for number, _ in batches]
            assert numbers == list(range(len(numbers))) and all(len(batch.events) <= 2 for _, batch in batches)
            later = sub.replay(numbers[1])
            assert [number for number, _ in later] == numbers[1:]


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"observers\.0.*endpoint: cannot bind {endpoint}.*free port"):
            Engine.open(config(endpoint=endpoint), SPEC)
        with pytest.raises(ConfigError, match=r"replay_endpoint: cannot bind"):
            Engine.open(config(replay_endpoint=endpoint), SPEC)
    with pytest.raises(ConfigError, match=r"observers\.0\.endpoint.*tcp://ADDRESS:PORT"):
        Engine.open(config(endpoint="127.0.0.1:5557"), SPEC)


def test_a_relative_path_begins_where_the_configuration_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 'observers: [{type: events_zmq, endpoint: "ipc://kv/events", replay_endpoint: "ipc://~/replay"}]'
    (tmp_path / "kv.yaml").write_text(block)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (observer,) = check_config(EngineConfig.from_file(tmp_path / "kv.yaml")).observers
    assert observer.config.endpoint == f"ipc://{tmp_path}/kv/events"
    assert observer.config.replay_endpoint == f"ipc://{tmp_path}/home/replay"
    for as_it_is in ("ipc:///run/kv", "ipc://@kv", "tcp://127.0.0.1:5557"):
        assert ZmqEventsObserver.Config(endpoint=as_it_is).endpoint == as_it_is
    for none in ("ipc://", "ipc://*", "tcp"):
        with pytest.raises(ValueError, match="not an endpoint"):
            ZmqEventsObserver.Config(endpoint=none)
    for port in ("", ":", ":65536", ":99999", ":5557x", ":-1", ":５５５７"):
        with pytest.raises(ValueError, match="has no port"):
            ZmqEventsObserver.Config(replay_endpoint=f"tcp://127.0.0.1{port}")
    for port in ("0", "*", "9", "5557", "65535", "59999"):
        assert ZmqEventsObserver.Config(endpoint=f"tcp://[::1]:{port}")


def test_engines_of_a_process_share_an_endpoint_and_give_it_back() -> None:
    settings_ = config()
    one, two = Engine.open(settings_, SPEC), Engine.open(settings_, SPEC)
    one.close()
    with subscriber(settings_["observers"][0]["endpoint"]) as sub:
        ready(two, sub)
    two.close()
    Engine.open(settings_, SPEC).close()
    changed = config(endpoint=settings_["observers"][0]["endpoint"], topic="another")
    with Engine.open(settings_, SPEC), pytest.raises(ConfigError, match="other settings"):
        Engine.open(changed, SPEC)


def test_an_index_and_other_ranks_leave_the_port_alone(tmp_path: Path) -> None:
    settings_ = config(tmp_path)
    endpoint = settings_["observers"][0]["endpoint"]
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with Engine.open(settings_, SPEC, role="index"):
        socket.create_server((host, int(port))).close()
    second = type(SPEC)(
        **{**{name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__}, "world_size": 2, "rank": 1}
    )
    with Engine.open(settings_, second) as engine:
        socket.create_server((host, int(port))).close()
        engine.store(tokens_of(CHUNK), kv=kv_of(CHUNK))


def stored(tokens: int) -> BlockStored:
    return BlockStored([1], None, [2**31 - 1] * tokens, tokens, None, "CPU", None)


def test_what_waits_has_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MOST_WAITING_BYTES", 100_000)
    monkeypatch.setattr(publisher_module, "_BATCH_BYTES", 9_000)
    taken = Publisher._take
    monkeypatch.setattr(Publisher, "_take", lambda _: [])
    publisher = Publisher(Settings("tcp://127.0.0.1:*", None, "", 10, 1000, 1000, 10, None))
    try:
        assert publisher.publish([stored(1000)] * 30) == 11, "5 bytes a token, and some 90 an event"
        assert publisher.publish([stored(5000)]) == 1 and publisher.publish([stored(1)]) == 0
        sizes = []
        while batch := taken(publisher):
            sizes.append(len(batch))
        assert sizes == [2] * 9 + [2] and publisher._waiting_bytes == 0
        assert publisher.publish([stored(5000)]) == 0
    finally:
        publisher.close()


def test_events_that_a_slow_subscriber_does_not_get_are_counted() -> None:
    observer = ZmqEventsObserver(ZmqEventsObserver.Config(endpoint="tcp://127.0.0.1:*", hwm=2), SPEC)
    publisher = observer.publisher
    assert publisher is not None
    with subscriber(publisher.endpoint) as quick, zmq.Context() as context, context.socket(zmq.SUB) as slow:
        slow.rcvhwm = slow.rcvbuf = 1
        slow.connect(publisher.endpoint)
        slow.subscribe(b"")
        while not (slow.poll(50) and quick.socket.poll(50)):  # until both are there
            publisher.publish([AllBlocksCleared()])
        publisher.publish([stored(1)])
        while not isinstance(quick.batch()[1].events[-1], BlockStored):
            pass
        number = -1
        while not publisher.missed:
            publisher.publish([stored(100_000)])
            number, _ = quick.batch()
        with pytest.raises(EventsLostError, match=r"KV events did not reach a subscriber.*hwm"):
            observer.on_chunks(ChunkEvent("cleared"))
        assert quick.batch()[0] == number + 1, "who reads gets everything"
        slow.linger = 0
    observer.close()


def test_nobody_waits_and_what_is_too_much_is_counted() -> None:
    observer = ZmqEventsObserver(ZmqEventsObserver.Config(endpoint="tcp://127.0.0.1:*", max_waiting=3), SPEC)
    publisher = observer.publisher
    assert publisher is not None
    segments = chain(tokens_of(5 * CHUNK), chunk_tokens=CHUNK, fingerprint="f" * 32)
    with subscriber(publisher.endpoint) as sub:
        while True:  # until the subscription is there
            observer.on_chunks(ChunkEvent("cleared"))
            if sub.socket.poll(50):
                break
        number, _ = sub.batch()
        while sub.socket.poll(200):
            number, _ = sub.batch()
        observer.on_chunks(ChunkEvent("named", segments=tuple(segments), tokens=bytes(4 * 5 * CHUNK)))
        with pytest.raises(EventsLostError, match=r"2 KV events.*max_waiting"):
            observer.on_chunks(ChunkEvent("stored", "memory", True, tuple(segment.key for segment in segments)))
        assert publisher.lost == 2
        found = []
        while len(found) < 3:
            last, batch = sub.batch()
            found += batch.events
        assert last > number + 1  # a gap, which says that something is missing
    observer.close()


def test_a_child_harms_nobody() -> None:
    settings_ = config()
    with Engine.open(settings_, SPEC) as engine, subscriber(settings_["observers"][0]["endpoint"]) as sub:
        ready(engine, sub)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                engine.close()
                with Engine.open(config(), SPEC) as own:  # at an endpoint of its own
                    own.store(tokens_of(CHUNK, 7), kv=kv_of(CHUNK))
                    status = 0 if own._events.flush(SECONDS) else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        engine.store(tokens_of(CHUNK), kv=kv_of(CHUNK))
        (one,) = sub.events(1)
        assert isinstance(one, BlockStored) and one.token_ids == tokens_of(CHUNK).tolist()


def test_chunks_are_blocks_of_the_routers_size() -> None:
    settings_ = config(block_tokens=4, hashes="bytes", data_parallel_rank=3)
    with Engine.open(settings_, SPEC) as engine, subscriber(settings_["observers"][0]["endpoint"]) as sub:
        ready(engine, sub)
        tokens = tokens_of(2 * CHUNK)
        engine.store(tokens, kv=kv_of(len(tokens)))
        found: list[Any] = []
        while len(found) < 2:
            _, batch = sub.batch()
            assert batch.data_parallel_rank == 3
            found += batch.events
        keys = [segment.key for segment in engine.segments(tokens)]
        by_parent = {one.parent_block_hash: one for one in found}
        assert list(by_parent) == [None, keys[0].digest] or set(by_parent) == {None, keys[0].digest}
        assert by_parent[None].block_hashes[-1] == keys[0].digest
        assert all((one.block_size, len(one.block_hashes), len(one.token_ids)) == (4, 4, CHUNK) for one in found)
        engine.remove(tokens)
        gone = {number for one in sub.events(2) for number in one.block_hashes}  # type: ignore[attr-defined]
        assert gone == {number for one in found for number in one.block_hashes}


@settings(max_examples=50)
@given(count=st.integers(1, 20), form=st.sampled_from(["int", "bytes"]))
def test_blocks_of_different_chunks_differ(count: int, form: Any) -> None:
    one, two = (chain(tokens_of(CHUNK, seed), chunk_tokens=CHUNK, fingerprint="f" * 32)[0].key for seed in (1, 2))
    both = block_hashes(one, count, form) + block_hashes(two, count, form)
    assert len(set(both)) == 2 * count
    assert block_hashes(one, count, form)[-1] == (one.digest if form == "bytes" else int_hash(one))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 20_000))
def test_what_is_remembered_is_bounded_and_right(seeds: list[int], room: int) -> None:
    names = Names(room)
    for seed in seeds:
        tokens = tokens_of(2 * CHUNK, seed)
        segments: list[Segment] = chain(tokens, chunk_tokens=CHUNK, fingerprint="f" * 32)
        data = tokens.to(torch.int32).numpy().tobytes()
        names.learn(segments, data)
        assert names._bytes <= room and len(names._named) * 4 * CHUNK <= room
        for (start, end, key), parent in zip(segments, [None, segments[0].key], strict=True):
            known = names.of(key)
            assert known is None or known == (parent, start, data[4 * start : 4 * end])
        assert room < 4000 or all(names.of(segment.key) for segment in segments)


class Interrupted:
    """An ear that is rung by `close` at the last moment before it listens."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher, self.ear = publisher, publisher._ear

    def fileno(self) -> int:
        return self.ear.fileno()

    def recv(self, most: int) -> bytes:
        self.publisher._closing = True
        self.publisher._ring()
        return self.ear.recv(most)

    def close(self) -> None:
        self.ear.close()


def test_a_ring_of_close_that_is_heard_together_with_another_is_not_lost() -> None:
    publisher = Publisher(Settings("tcp://127.0.0.1:*", None, "", 10, 10, 10, 10, None))
    publisher._ear = Interrupted(publisher)  # type: ignore[assignment]
    publisher.publish([])
    publisher._thread.join(10)
    assert not publisher._thread.is_alive()
    publisher._bell.close()
    publisher._ear.close()


def test_events_of_a_publisher_whose_thread_has_failed_are_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher(Settings("tcp://127.0.0.1:*", None, "", 10, 10, 10, 10, 1 << 64))  # no number of msgpack's
    assert publisher.publish([AllBlocksCleared()]) == 0
    publisher._thread.join(10)
    assert publisher.publish([AllBlocksCleared()]) == 1 and publisher.lost == 1
    assert isinstance(publisher.failure, OverflowError)
    (said,) = [one for one in caplog.records if one.name == "kvloom.events_zmq"]
    assert said.getMessage().endswith("no more KV events are published") and said.exc_info[1] is publisher.failure  # type: ignore[index]
    publisher.close()


def test_the_error_of_a_publisher_that_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = ZmqEventsObserver(ZmqEventsObserver.Config(endpoint="tcp://127.0.0.1:*"))
    publisher = observer.publisher
    assert publisher is not None and publisher.failure is None
    monkeypatch.setattr(publisher, "_send", lambda events: {}["gone"])
    observer.on_chunks(ChunkEvent("cleared", prefix="a/"))
    publisher._thread.join(10)
    with pytest.raises(EventsLostError, match=r"^1 KV events are not published: its thread failed: KeyError: 'gone'$"):
        observer.on_chunks(ChunkEvent("cleared", prefix="a/"))
    observer.close()


@pytest.mark.parametrize("name", ["hwm", "data_parallel_rank", "batch", "max_waiting", "replay_batches"])
def test_numbers_that_zeromq_cannot_count_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\n.*less than or equal to 2147483647"):
        ZmqEventsObserver.Config(**{name: 1 << 31})


def test_nobody_can_send_it_much() -> None:
    publisher = Publisher(Settings("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "", 10, 10, 10, 10, None))
    try:
        assert publisher._router is not None
        assert {publisher._router.socket.maxmsgsize, publisher._pub.socket.maxmsgsize} == {4096}
    finally:
        publisher.close()
