"""Speed of the Redis backend's puts and gets, beside a raw socket that does nothing else, and redis-py.

    python plugins/backend_redis/bench/redis_path.py

Starts a server of its own on loopback, over TCP and on a Unix socket. Contenders take turns, a different one first in
each round, with new connections each time: how fast a connection is differs from one to the next. Medians, lowest and
highest, in GB/s. Results go to bench/results/redis_path.json.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from redis import ConnectionPool, Redis
from table import Rows

from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisServer

KEYS = [f"{'0a' * 16}/-/{number}-{number:064x}" for number in range(32)]
LOOKUP = [f"{'0b' * 16}/-/{number}-{number:064x}" for number in range(512)]
MOST_BYTES = 8 << 20


class Client(Protocol):
    """Of one thread."""

    def put(self, key: str, blob: memoryview) -> None: ...

    def get(self, key: str, into: memoryview) -> None: ...


class Raw:
    """The limit: a socket, `sendmsg` and `recv_into`; no checks, no timeouts."""

    def __init__(self, server: RedisServer) -> None:
        if server.socket is None:
            self._socket = socket.create_connection((server.host, server.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(server.socket))

    def put(self, key: str, blob: memoryview) -> None:
        name = f"kvloom:{key}".encode()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(blob))
        parts = [memoryview(head), blob, memoryview(b"\r\n")]
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]
        assert self._line() == b"+OK\r\n"

    def get(self, key: str, into: memoryview) -> None:
        name = f"kvloom:{key}".encode()
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
        end, done = int(self._line()[1:]) + 2, 0
        while done < end:
            done += self._socket.recv_into(into[done:end])

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            line += self._socket.recv(1)
        return bytes(line)

    def close(self) -> None:
        self._socket.close()


class Ours:
    """The backend, as a tier uses it."""

    def __init__(self, server: RedisServer) -> None:
        self.backend = RedisBackend(RedisBackend.Config(url=server.url))

    def put(self, key: str, blob: memoryview) -> None:
        self.backend.put(key, [blob])

    def get(self, key: str, into: memoryview) -> None:
        assert self.backend.get_into(key, Into(into))

    def close(self) -> None:
        self.backend.close()


class Batch(Ours):
    """The same, with all blobs of a thread in one call."""

    def put_many(self, keys: list[str], blob: memoryview) -> None:
        outcomes: list[Exception | None] = []
        self.backend.put_many([(key, [blob]) for key in keys], lambda _, outcome: outcomes.append(outcome))
        assert outcomes == [None] * len(keys), outcomes

    def get_many(self, keys: list[str], into: memoryview) -> None:
        outcomes: list[bool | Exception] = []
        self.backend.get_many_into([(key, Into(into)) for key in keys], lambda _, outcome: outcomes.append(outcome))
        assert outcomes == [True] * len(keys), outcomes


class Into:
    """A sink over given memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def reserve(self, num_bytes: int) -> memoryview:
        return self._memory[:num_bytes]

    def filled(self, num_bytes: int) -> None:
        pass


class RedisPy:
    """redis-py, with hiredis where that is installed; a pool of its own."""

    def __init__(self, server: RedisServer) -> None:
        self._pool = ConnectionPool.from_url(server.url, socket_read_size=1 << 20)
        self._client: Redis = Redis(connection_pool=self._pool)

    def put(self, key: str, blob: memoryview) -> None:
        self._client.set(f"kvloom:{key}", blob.obj)  # bytes, which it takes fastest

    def get(self, key: str, into: memoryview) -> None:
        blob: Any = self._client.get(f"kvloom:{key}")
        into[: len(blob)] = blob

    def close(self) -> None:
        self._pool.disconnect()


def seconds(pool: ThreadPoolExecutor, calls: list[Callable[[], None]]) -> float:
    began = time.perf_counter()
    for future in [pool.submit(call) for call in calls]:
        future.result()
    return time.perf_counter() - began


def clients_of(kind: Any, server: RedisServer, threads: int) -> list[Any]:
    return [kind(server) for _ in range(threads)] if kind is Raw else [kind(server)]


def measure(rows: Rows, server: RedisServer, mib: int, threads: int, rounds: int) -> None:
    blob = memoryview(os.urandom(1 << 20) * mib)
    memory = [memoryview(mmap.mmap(-1, MOST_BYTES + 4096)) for _ in range(threads)]
    for one in memory:
        one[:] = bytes(len(one))
    kinds: list[Any] = [Raw, Ours, Batch, RedisPy]
    taken: dict[tuple[str, str], list[float]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for turn in range(rounds):
            for kind in kinds[turn % 4 :] + kinds[: turn % 4]:
                clients = clients_of(kind, server, threads)

                def each(
                    work: Callable[[Any, int, str], None], many: Callable[[Any, int, list[str]], None],
                    clients: list[Any] = clients,
                ) -> list[Callable[[], None]]:  # fmt: skip
                    lanes = [KEYS[lane::threads] for lane in range(threads)]

                    def lane_of(lane: int) -> None:
                        if isinstance(clients[0], Batch):
                            return many(clients[0], lane, lanes[lane])
                        for key in lanes[lane]:
                            work(clients[lane % len(clients)], lane, key)

                    return [lambda lane=lane: lane_of(lane) for lane in range(threads)]  # type: ignore[misc]

                puts = each(
                    lambda client, lane, key: client.put(key, blob),
                    lambda client, lane, keys: client.put_many(keys, blob),
                )
                gets = each(
                    lambda client, lane, key: client.get(key, memory[lane]),
                    lambda client, lane, keys: client.get_many(keys, memory[lane]),
                )
                seconds(pool, gets if turn else puts)  # connections are made, and windows have grown
                taken.setdefault((kind.__name__, "put"), []).append(seconds(pool, puts))
                taken.setdefault((kind.__name__, "get"), []).append(seconds(pool, gets))
                assert all(one[: len(blob)] == blob for one in memory), "what was read is not what was written"
                for client in clients:
                    client.close()
    place = "tcp" if server.socket is None else "unix"
    size = len(KEYS) * len(blob) / 1e9
    for verb in ("put", "get"):
        label = f"{place} {verb} {mib} MiB, {threads} threads (GB/s)"
        for kind, name in ((Ours, "kvloom"), (Batch, "kvloom, as a batch"), (RedisPy, "redis-py")):
            rows.spread(f"{name}: {label}", taken[kind.__name__, verb], size, taken["Raw", verb], "raw socket")


def look_up(rows: Rows, server: RedisServer, rounds: int) -> None:
    ours = RedisBackend(RedisBackend.Config(url=server.url))
    for key in LOOKUP[:256]:
        ours.put(key, [b"x"])
    taken = []
    for _ in range(rounds * 10):
        began = time.perf_counter()
        assert ours.contains_many(LOOKUP) == [True] * 256 + [False] * 256
        taken.append(time.perf_counter() - began)
    rows.seconds("lookup of 512 chunks", sorted(taken)[len(taken) // 2])
    ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 8, 32])
    args = parser.parse_args()
    rows = Rows("redis_path")
    for unix in (False, True):
        with RedisServer(unix=unix, maxmemory="1gb", maxmemory_policy="allkeys-lru") as server:
            look_up(rows, server, args.rounds)
            for mib in args.mib:
                for threads in args.threads:
                    measure(rows, server, mib, threads, args.rounds)
    rows.finish()


if __name__ == "__main__":
    main()
