"""Clusters whose slots move, and servers that take each other's place."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from redis.crc import key_slot

from kvloom import BackendError, PartDownError
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisCluster, RedisSentinel, RedisServer, until
from kvloom_testkit.backends.doubles import RecordingSink, put_all

Open = Callable[..., RedisBackend]
KEYS = [f"k/{number}" for number in range(60)]
BLOBS = {key: key.encode() * 1000 for key in KEYS}


@pytest.fixture
def filled(cluster: RedisCluster, open_backend: Open) -> Iterator[RedisBackend]:
    backend = open_backend(cluster.url, timeout=2)
    put_all(backend, ((key, [blob]) for key, blob in BLOBS.items()))
    yield backend
    backend.delete_many(KEYS)


def slot_of(key: str) -> int:
    return int(key_slot(f"kvloom:{key}".encode()))


def node_of(cluster: RedisCluster, slot: int) -> int:
    return next(n for n in range(3) if 16384 * n // 3 <= slot < 16384 * (n + 1) // 3)


def _raised(verb: Callable[[str], object], key: str) -> Exception | None:
    try:
        verb(key)
    except Exception as error:
        return error
    return None


def all_right(backend: RedisBackend) -> None:
    """Every verb, one by one and many at a time."""
    assert backend.get_many(KEYS) == list(BLOBS.values())
    assert backend.contains_many([*KEYS, "absent"]) == [True] * len(KEYS) + [False]
    for key in KEYS[::7]:
        into = memoryview(bytearray(8))
        assert backend.get(key) == BLOBS[key] and backend.get_range(key, 2, into) and into == BLOBS[key][2:10]
    backend.touch_many(KEYS)
    put_all(backend, ((key, [blob]) for key, blob in BLOBS.items()))
    assert {entry.key for entry in backend.scan("k/")} == set(KEYS)


def test_blobs_are_spread_over_all_nodes(cluster: RedisCluster, filled: RedisBackend) -> None:
    all_right(filled)
    for node in cluster.nodes:
        with contextlib.closing(node.client()) as client:
            assert client.dbsize() > 5


def test_one_node_is_enough_to_find_the_others(cluster: RedisCluster, filled: RedisBackend, open_backend: Open) -> None:
    node = cluster.nodes[1]
    other = open_backend(f"redis+cluster://127.0.0.1:1,{node.host}:{node.port}")
    all_right(other)
    assert other.identity() == filled.identity() is not None


def test_slots_that_have_moved(cluster: RedisCluster, filled: RedisBackend) -> None:
    """MOVED: of one key, and of one among many."""
    moved = sorted({slot_of(key) for key in KEYS if node_of(cluster, slot_of(key)) == 0})
    assert len(moved) > 5
    source, target = cluster.nodes[0], cluster.nodes[2]
    try:
        for slot in moved:
            cluster.begin_moving(slot, source, target)
            assert cluster.move_keys(slot, source, target) >= 1
            cluster.end_moving(slot, target)
        all_right(filled)
    finally:
        for slot in moved:
            cluster.begin_moving(slot, target, source)
            cluster.move_keys(slot, target, source)
            cluster.end_moving(slot, source)
    all_right(filled)


def test_a_slot_that_is_moving(cluster: RedisCluster, filled: RedisBackend) -> None:
    """ASK: half of the keys are there already, and what is new goes there too."""
    tag = next(key for key in KEYS if node_of(cluster, slot_of(key)) == 1)
    slot = slot_of(tag)
    same = [name for name in (f"s/{n}" for n in range(200_000)) if slot_of(name) == slot][:6]
    assert len(same) == 6
    source, target = cluster.nodes[1], cluster.nodes[0]
    put_all(filled, ((key, [key.encode()]) for key in same[:4]))
    cluster.begin_moving(slot, source, target)
    try:
        cluster.move_keys(slot, source, target, most=2)
        assert filled.get_many(same) == [*(key.encode() for key in same[:4]), None, None]
        assert filled.contains_many(same) == [True] * 4 + [False] * 2
        filled.put(same[4], [b"new"])
        assert filled.create(same[5], [b"new too"]) and not filled.create(same[5], [b"again"])
        assert filled.get(same[4]) == b"new" and filled.get(same[5]) == b"new too"
        all_right(filled)
    finally:
        cluster.move_keys(slot, source, target)
        cluster.end_moving(slot, target)
        cluster.begin_moving(slot, target, source)
        cluster.move_keys(slot, target, source)
        cluster.end_moving(slot, source)
    assert filled.get(same[0]) == same[0].encode()
    filled.delete_many(same)
    assert filled.get_many(same) == [None] * 6


def test_slots_move_while_blobs_are_read_and_written(
    cluster: RedisCluster, filled: RedisBackend, tally: Callable[..., None]
) -> None:
    done, wrong, counts = threading.Event(), [], {"reads": 0, "writes": 0, "refusals": 0}

    def work() -> None:
        while not done.is_set():
            for key in KEYS:
                try:
                    if filled.get(key) != BLOBS[key]:
                        wrong.append(key)
                    counts["reads"] += 1
                    filled.put(key, [BLOBS[key]])
                    counts["writes"] += 1
                except (BackendError, OSError):
                    counts["refusals"] += 1

    thread = threading.Thread(target=work)
    thread.start()
    slots = sorted({slot_of(key) for key in KEYS if node_of(cluster, slot_of(key)) == 2})[:8]
    for source, target in ((cluster.nodes[2], cluster.nodes[1]), (cluster.nodes[1], cluster.nodes[2])):
        for slot in slots:
            cluster.begin_moving(slot, source, target)
            while cluster.move_keys(slot, source, target, most=1):
                pass
            cluster.end_moving(slot, target)
    done.set()
    thread.join()
    assert not wrong and counts["reads"] > 100
    tally(slots_moved=2 * len(slots), **counts)


def test_a_user_with_exactly_the_rights_that_are_documented(
    cluster: RedisCluster, filled: RedisBackend, open_backend: Open
) -> None:
    page = Path(__file__).parents[3] / "docs/use/redis.md"
    (rights,) = re.findall(r"ACL SETUSER kvloom on >PASSWORD (.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    for node in cluster.nodes:
        with contextlib.closing(node.client()) as client:
            client.execute_command(
                "ACL", "SETUSER", "kvloom", "on", ">PASSWORD", *rights.split(), "+cluster|slots", "+asking"
            )
    backend = open_backend(cluster.url, username="kvloom", password="PASSWORD")
    backend.check_writable()
    all_right(backend)
    assert backend.create("c", [b"c"]) and backend.hold("evict") and backend.identity() == filled.identity()
    backend.delete("c")


def test_a_node_that_dies_takes_its_keys_and_no_others(open_backend: Open) -> None:
    with RedisCluster(maxmemory="64mb", cluster_require_full_coverage="no") as cluster:
        backend = open_backend(cluster.url, timeout=1)
        put_all(backend, ((key, [blob]) for key, blob in BLOBS.items()))
        cluster.nodes[1].kill()
        time.sleep(0.6)
        for key in KEYS:
            if node_of(cluster, slot_of(key)) == 1:
                began = time.monotonic()
                with pytest.raises(PartDownError):
                    backend.get(key)
                with pytest.raises(PartDownError):
                    backend.put(key, [b"lost"])
                assert not backend.contains(key)
                assert time.monotonic() - began < 5
            else:
                assert backend.get(key) == BLOBS[key] and backend.contains(key)
        cluster.nodes[1].start()

        def takes_all() -> bool:
            with contextlib.suppress(BackendError):
                put_all(backend, ((key, [blob]) for key, blob in BLOBS.items()))
                return True
            return False

        until(takes_all, "the node again")
        assert backend.get_many(KEYS) == list(BLOBS.values())
        for node in cluster.nodes:
            node.kill()
        for verb in (backend.get, backend.contains):
            raised = [_raised(verb, key) for key in KEYS]  # until no server is left that has not failed
            assert isinstance(raised[-1], (BackendError, OSError)) and not isinstance(raised[-1], PartDownError)


def test_a_node_that_hangs_takes_its_keys_of_a_batch_and_no_others(open_backend: Open) -> None:
    with RedisCluster(maxmemory="64mb", cluster_require_full_coverage="no") as cluster:
        backend = open_backend(cluster.url, timeout=1)
        put_all(backend, ((key, [blob]) for key, blob in BLOBS.items()))
        stuck = node_of(cluster, slot_of(KEYS[0]))
        there = [node_of(cluster, slot_of(key)) != stuck for key in KEYS]
        assert True in there

        def read() -> list[bool]:
            sinks, told = [RecordingSink() for _ in KEYS], dict[int, object]()
            backend.get_many_into(list(zip(KEYS, sinks, strict=True)), told.__setitem__)
            assert len(told) == len(KEYS)
            return [told[number] is True for number in range(len(KEYS))]

        cluster.nodes[stuck].freeze()
        try:
            assert read() == backend.contains_many(KEYS) == there
            with mock.patch.object(backend._links, "take", wraps=backend._links.take) as take:
                assert read() == backend.contains_many(KEYS) == there
            assert cluster.nodes[stuck].port not in {call.args[0].port for call in take.call_args_list}, "asked again"
            with pytest.raises((BackendError, OSError)):
                backend.get(KEYS[0])
        finally:
            cluster.nodes[stuck].thaw()
        until(lambda: backend.contains_many(KEYS) == [True] * len(KEYS), "the node again")
        assert read() == [True] * len(KEYS)


def test_a_slot_that_no_node_serves_takes_its_keys_of_a_batch_and_no_others(open_backend: Open) -> None:
    with RedisCluster(maxmemory="64mb", cluster_require_full_coverage="no") as cluster:
        slot = slot_of(KEYS[0])
        for node in cluster.nodes:
            with contextlib.closing(node.client()) as client:
                client.execute_command("CLUSTER", "DELSLOTS", slot)
        backend = open_backend(cluster.url, timeout=1)
        told: dict[int, Exception | None] = {}
        backend.put_many([(key, [blob]) for key, blob in BLOBS.items()], told.__setitem__)
        served = [slot_of(key) != slot for key in KEYS]
        assert [told[number] is None for number in range(len(KEYS))] == served and True in served
        assert backend.contains_many(KEYS) == served
        sinks, read = [RecordingSink() for _ in KEYS], dict[int, object]()
        backend.get_many_into(list(zip(KEYS, sinks, strict=True)), read.__setitem__)
        assert [read[number] is True for number in range(len(KEYS))] == served
        with pytest.raises(PartDownError, match="no node of the cluster serves"):
            backend.get(KEYS[0])
        assert not backend.contains(KEYS[0])
        backend.delete_many(KEYS[1:])
        assert not list(backend.scan("k/"))


def test_a_failover_of_sentinels(open_backend: Open, tally: Callable[..., None]) -> None:
    with (
        RedisServer(maxmemory="64mb", repl_diskless_sync_delay=0) as first,
        RedisServer(maxmemory="64mb", replicaof=f"{first.host} {first.port}") as second,
        RedisSentinel(first) as sentinel,
        contextlib.closing(second.client()) as replica,
        contextlib.closing(sentinel.client()) as watcher,
    ):
        until(lambda: replica.info("replication")["master_link_status"] == "up", "replication")
        until(lambda: watcher.execute_command("SENTINEL", "REPLICAS", "kv"), "the Sentinel's knowledge of the replica")
        backend = open_backend(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/kv/0", timeout=1)
        backend.put("a", [b"blob"])
        until(lambda: replica.dbsize() == 1, "the copy")
        first.kill()
        failed = 0
        until_seconds = time.monotonic() + 20
        while True:
            try:
                assert backend.get("a") == b"blob"
                backend.put("b", [b"another"])
                break
            except (BackendError, OSError):
                failed += 1
                assert time.monotonic() < until_seconds
                time.sleep(0.05)
        assert backend.get("b") == b"another" and replica.get("kvloom:b") == b"another"
        tally(calls_that_failed_before_the_failover=failed)


def test_a_master_that_was_demoted_sends_its_writers_on(open_backend: Open) -> None:
    """It still answers, so no connection is lost: READONLY alone says it."""
    with (
        RedisServer(maxmemory="64mb") as first,
        RedisServer(maxmemory="64mb", replicaof=f"{first.host} {first.port}") as second,
        RedisSentinel(first) as sentinel,
        contextlib.closing(sentinel.client()) as watcher,
    ):
        until(lambda: b"slave" in repr(watcher.execute_command("SENTINEL", "REPLICAS", "kv")).encode(), "the replica")
        backend = open_backend(sentinel.url, timeout=1)
        watcher.execute_command("SENTINEL", "DEBUG", "INFO-PERIOD", "100")
        backend.put("a", [b"one"])
        until(lambda: watcher.execute_command("SENTINEL", "FAILOVER", "kv"), "a failover that was asked for")
        with contextlib.closing(first.client()) as client:
            until(lambda: client.info("replication")["role"] == "slave", "the demotion")
        blob = os.urandom(100_000)
        backend.put("a", [blob])
        with contextlib.closing(second.client()) as client:
            assert client.get("kvloom:a") == blob
        assert backend.get("a") == blob
