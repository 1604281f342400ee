"""Values in the server, kvloom's and others'."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvloom import BackendError, CorruptBlobError
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisServer
from kvloom_testkit.backends.doubles import put_all

Open = Callable[..., RedisBackend]


def test_one_key_of_the_server_per_blob(server: RedisServer, open_backend: Open) -> None:
    backend = open_backend(server.url, prefix="one:")
    backend.put("a/b", [b"bl", b"ob"])
    with contextlib.closing(server.client()) as client:
        assert client.keys("one:*") == [b"one:a/b"]
        assert client.get("one:a/b") == b"blob" and client.pttl("one:a/b") == -1
    backend.delete("a/b")


def test_the_server_expires_blobs_after_their_last_write(server: RedisServer, open_backend: Open) -> None:
    backend = open_backend(server.url, prefix="brief:", expire="300ms")
    backend.put("a", [b"blob"])
    assert backend.create("b", [b"blob"])
    put_all(backend, [("c", [b"blob"]), ("d", [b"blob"])])
    with contextlib.closing(server.client()) as client:
        assert all(0 < client.pttl(f"brief:{key}") <= 300 for key in "abcd")
    backend.touch_many(["a"])
    time.sleep(0.4)
    assert backend.get_many(["a", "b", "c", "d"]) == [None] * 4 and list(backend.scan()) == []
    assert backend.create("b", [b"blob"])


def test_prefixes_share_nothing(server: RedisServer, open_backend: Open) -> None:
    """Not even where one is the beginning of another, or where patterns are in them."""
    stores = [open_backend(server.url, prefix=prefix) for prefix in ("p:", "p:p:", "p:pp:", "pp:")]
    for number, store in enumerate(stores):
        store.put("p/key", [b"%d" % number])
    for number, store in enumerate(stores):
        assert [entry.key for entry in store.scan()] == ["p/key"]
        assert store.get("p/key") == b"%d" % number
    stores[0].delete("p/key")
    assert [store.contains("p/key") for store in stores] == [False, True, True, True]
    assert len({store.identity() for store in stores}) == 4


@pytest.mark.parametrize("pattern", ["*", "a*", "?", "[a-z]", "[^b]", "\\", "a\\", "a?b", "^"])
def test_a_prefix_of_a_listing_is_no_pattern(server: RedisServer, open_backend: Open, pattern: str) -> None:
    backend = open_backend(server.url, prefix="text:")
    backend.put("a/b", [b"blob"])
    assert list(backend.scan(pattern)) == []
    assert [entry.key for entry in backend.scan("a/")] == ["a/b"]


def test_what_is_no_blob_is_not_listed_and_says_so_when_read(server: RedisServer, open_backend: Open) -> None:
    backend = open_backend(server.url, prefix="odd:")
    with contextlib.closing(server.client()) as client:
        client.rpush("odd:list", "x")
        client.set("odd:not a key", "x")
        client.set(b"odd:\xff\xfe", "x")
    assert list(backend.scan()) == []
    for read in (
        backend.get,
        lambda key: backend.get_many([key]),
        lambda key: backend.get_range(key, 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(CorruptBlobError, match="another type than a string"):
            read("list")
    backend.put("list", [b"blob"])
    assert backend.get("list") == b"blob"


def test_a_blob_that_no_server_takes_is_refused_before_it_is_sent(open_backend: Open) -> None:
    with RedisServer(proto_max_bulk_len="1mb", maxmemory="64mb") as server:
        backend = open_backend(server.url)
        backend.put("a", [bytes(1 << 20)])
        for put in (
            lambda: backend.put("b", [bytes(1 << 20), b"x"]),
            lambda: backend.create("b", [bytes((1 << 20) + 1)]),
            lambda: put_all(backend, [("c", [b"c"]), ("b", [bytes((1 << 20) + 1)])]),
        ):
            with pytest.raises(BackendError, match="a blob has 1048577 bytes, the server accepts at most 1048576"):
                put()
        assert backend.contains_many(["a", "b", "c"]) == [True, False, True]
        with contextlib.closing(server.client()) as client:
            assert client.info("clients")["connected_clients"] == 2, "the connection was not lost"


def test_two_processes_write_one_key(server: RedisServer, open_backend: Open) -> None:
    backend = open_backend(server.url, prefix="both:")
    code = (
        "import sys\nfrom kvloom_backend_redis.backend import RedisBackend\n"
        "backend = RedisBackend(RedisBackend.Config(url=sys.argv[1], prefix='both:'))\n"
        "for n in range(100): backend.put('k', [bytes([n % 2 + 2]) * 300_000])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, server.url]) as other:
        reads = 0
        while other.poll() is None or reads < 100:
            backend.put("k", [bytes([reads % 2]) * 200_000])
            blob = bytes(backend.get("k") or b"")
            assert len(set(blob)) == 1 and len(blob) == (300_000 if blob[0] >= 2 else 200_000), "a torn blob"
            reads += 1
    assert other.returncode == 0


def test_one_of_many_creates(server: RedisServer, open_backend: Open) -> None:
    backends = [open_backend(server.url, prefix="first:") for _ in range(3)]
    for turn in range(20):
        with ThreadPoolExecutor(12) as pool:
            told = list(pool.map(lambda n, turn=turn: backends[n % 3].create(f"k{turn}", [b"%d" % n]), range(12)))
        assert told.count(True) == 1 and backends[0].get(f"k{turn}") == b"%d" % told.index(True)


def test_a_lease_is_renewed_and_is_lost_when_the_server_forgets_it(open_backend: Open) -> None:
    with RedisServer(maxmemory="64mb") as server, contextlib.closing(server.client()) as client:
        first, second = open_backend(server.url), open_backend(server.url)
        assert first.hold("evict")
        time.sleep(2.6)
        assert client.pttl("kvloom:+hold-evict") > 5000 and not second.hold("evict")
        client.delete("kvloom:+hold-evict")
        assert second.hold("evict")
        time.sleep(2.6)  # the first one has asked for more
        assert not first.hold("evict")
        second.close()
        assert first.hold("evict") and client.get("kvloom:+hold-evict") is not None
        client.delete("kvloom:+hold-evict")
        third = open_backend(server.url)
        assert third.hold("evict")
        first.close()
        assert client.get("kvloom:+hold-evict") is not None, "another's by now"
        third.close()
        assert client.keys("*hold*") == []


def test_a_child_has_connections_of_its_own(server: RedisServer, open_backend: Open) -> None:
    backend = open_backend(server.url)

    def connection() -> object:
        return backend._exchange.ask(b"any", b"CLIENT", b"ID")

    mine = connection()
    assert connection() == mine, "the same one again"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if connection() not in (mine, None) else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connection() == mine, "which its child has not closed"


def test_connections_are_as_many_as_there_are_calls_at_once(server: RedisServer, open_backend: Open) -> None:
    backend = open_backend(server.url)
    with contextlib.closing(server.client()) as client:
        before = client.info("clients")["connected_clients"]
        for number in range(50):
            backend.get(f"absent/{number}")
        assert client.info("clients")["connected_clients"] <= before
        together = threading.Barrier(6)

        def read(_: int) -> None:
            together.wait()
            for _ in range(20):
                backend.get("absent")

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(read, range(6)))
        assert client.info("clients")["connected_clients"] <= before + 6


def test_large_batches_keep_their_order(server: RedisServer, open_backend: Open) -> None:
    backend = open_backend(server.url, prefix="many:")
    blobs = {f"k/{number}": os.urandom(1 + number * 37 % 5000) for number in range(1500)}
    put_all(backend, ((key, [blob[: len(blob) // 2], blob[len(blob) // 2 :]]) for key, blob in blobs.items()))
    asked = [*blobs, "absent", "k/3", *reversed(blobs)]
    assert backend.get_many(asked) == [blobs.get(key) for key in asked]
    assert backend.contains_many(asked) == [key in blobs for key in asked]
    assert {entry.key: entry.bytes for entry in backend.scan()} == {key: len(blob) for key, blob in blobs.items()}
    backend.delete_many(asked)
    assert list(backend.scan()) == []


def test_the_readme_runs() -> None:
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
