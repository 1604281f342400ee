"""kvloom's Redis and S3 backends beside LMCache 0.5.6's connectors, in turn, on the same servers of this machine.

    python bench/lmcache_remote.py --peer .venv-lmcache/bin/python [--rounds 5] [--stores redis s3]

Values of 1, 4 and 8 MiB, 32 of each, by 1, 8 and 32 callers. kvloom is asked value by value and by a batch for each
caller, LMCache's `resp` (native, with as many threads as there are callers) value by value and as one batch, `redis`
(redis-py) value by value. Medians of GB/s and their
spread; what is read is compared with what was written, outside the clock. Results go to
bench/results/lmcache_redis.json and lmcache_s3.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from table import Rows

from kvloom import StorageBackend

HERE = Path(__file__).parent
VALUES = 32
KEYS = [f"{'0c' * 16}/-/{number}-{number:064x}" for number in range(VALUES)]


class Into:
    """A sink over memory that is there already."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def reserve(self, num_bytes: int) -> memoryview:
        return self._memory[:num_bytes]

    def filled(self, num_bytes: int) -> None:
        pass


class Ours:
    """A backend, as a tier uses it: a thread for each caller, into memory that is there.

    batched: each thread has its share in one call.
    """

    def __init__(self, backend: StorageBackend, size: int, callers: int, *, batched: bool = False) -> None:
        self._backend, self._batched = backend, batched
        self._shares = [range(first, VALUES, callers) for first in range(min(callers, VALUES))]
        self._values = [memoryview(os.urandom(size)) for _ in KEYS]
        self._memory = [memoryview(bytearray(b"\1") * size) for _ in KEYS]
        self._pool = ThreadPoolExecutor(callers)

    def put(self) -> float:
        if self._batched:
            return self._each(self._put_share, self._shares)
        return self._each(lambda number: self._backend.put(KEYS[number], [self._values[number]]), range(VALUES))

    def get(self) -> float:
        if self._batched:
            seconds = self._each(self._get_share, self._shares)
        else:
            seconds = self._each(
                lambda number: self._backend.get_into(KEYS[number], Into(self._memory[number])), range(VALUES)
            )
        assert self._memory == self._values, "other bytes"
        return seconds

    def _put_share(self, share: Iterable[int]) -> None:
        outcomes: list[Exception | None] = []
        requests = [(KEYS[number], [self._values[number]]) for number in share]
        self._backend.put_many(requests, lambda _, outcome: outcomes.append(outcome))
        assert outcomes == [None] * len(requests), outcomes

    def _get_share(self, share: Iterable[int]) -> None:
        outcomes: list[bool | Exception] = []
        requests = [(KEYS[number], Into(self._memory[number])) for number in share]
        self._backend.get_many_into(requests, lambda _, outcome: outcomes.append(outcome))
        assert outcomes == [True] * len(requests), outcomes

    def _each(self, work: Callable[[Any], object], parts: Iterable[Any]) -> float:
        began = time.perf_counter()
        for future in [self._pool.submit(work, part) for part in parts]:
            future.result()
        return time.perf_counter() - began

    def close(self) -> None:
        self._pool.shutdown()
        self._backend.close()


class Peer:
    """`lmcache/remote.py` in LMCache's environment."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(HERE / "lmcache" / "remote.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def do(self, **order: Any) -> float:
        """Seconds. Raises RuntimeError if it ended over it."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            raise RuntimeError(f"LMCache ended at {order}")
        return float(json.loads(said))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Theirs:
    """One of LMCache's connectors."""

    def __init__(self, peer: Peer, kind: str, url: str, size: int, callers: int, *, batched: bool = False) -> None:
        self._peer = peer
        peer.do(do="open", kind=kind, url=url, bytes=size, callers=callers, batched=batched)

    def put(self) -> float:
        return self._peer.do(do="put")

    def get(self) -> float:
        return self._peer.do(do="get")

    def close(self) -> None:
        self._peer.do(do="close")


Contenders = dict[str, Callable[[], Any]]


@contextlib.contextmanager
def redis(python: Path) -> Iterator[Callable[[int, int], Contenders]]:
    from kvloom_backend_redis.backend import RedisBackend
    from kvloom_backend_redis.testing import RedisServer

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(maxmemory="3gb", maxmemory_policy="allkeys-lru"))
        values, batches, python_client = (stack.enter_context(contextlib.closing(Peer(python))) for _ in range(3))
        url = f"{server.host}:{server.port}"

        def ours(size: int, callers: int, *, batched: bool = False) -> Ours:
            settings = RedisBackend.Config(url=server.url, threads=max(4, callers))
            return Ours(RedisBackend(settings), size, callers, batched=batched)

        def contenders(size: int, callers: int) -> Contenders:
            return {
                "kvloom": lambda: ours(size, callers),
                "kvloom, as a batch": lambda: ours(size, callers, batched=True),
                "LMCache resp": lambda: Theirs(values, "resp", url, size, callers),
                "LMCache resp, as a batch": lambda: Theirs(batches, "resp", url, size, callers, batched=True),
                "LMCache redis": lambda: Theirs(python_client, "redis", url, size, callers),
            }

        yield contenders


@contextlib.contextmanager
def s3(python: Path) -> Iterator[Callable[[int, int], Contenders]]:
    """Two of Ceph's gateways on one cluster: LMCache names the bucket by a host name, and has no other way.

    To the second one, 127.0.0.1 is the bucket `127` of the host `0.0.1`.
    """
    from kvloom_backend_fsspec.backend import FsspecBackend
    from kvloom_backend_fsspec.testing import ACCESS_KEY, SECRET_KEY, CephRGW, answers, free_port, s3_client, wait_until

    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(CephRGW(capacity=4 << 30))
        for bucket in ("kvloom", "127"):
            s3_client(server.endpoint).create_bucket(Bucket=bucket)
        port = free_port()
        frontend = f"--rgw_frontends=beast endpoint=127.0.0.1:{port} tcp_nodelay=1"
        server.spawn("by-name", "radosgw", "-n", "client.rgw.a", "-f", frontend, "--rgw_dns_name=0.0.1")
        wait_until(lambda: answers(f"http://127.0.0.1:{port}"), "the second gateway")
        peer = stack.enter_context(contextlib.closing(Peer(python)))

        def contenders(size: int, callers: int) -> Contenders:
            settings = FsspecBackend.Config(
                url="s3://kvloom/bench", options={"endpoint": server.endpoint}, allow_http=True, timeout=60
            )
            return {
                "kvloom": lambda: Ours(FsspecBackend(settings), size, callers),
                "LMCache s3": lambda: Theirs(peer, "s3", f"127.0.0.1:{port}", size, callers),
            }

        yield contenders


STORES = {"redis": redis, "s3": s3}


def measure(rows: Rows, store: str, contenders: Contenders, label: str, amount: float, rounds: int) -> None:
    taken: dict[tuple[str, str], list[float]] = {}
    opened: dict[str, Any] = {}
    try:
        for name, make in contenders.items():
            try:
                opened[name] = make()
                opened[name].put(), opened[name].get()  # connections are made, memory is touched
            except RuntimeError as error:
                rows.add(f"{store}: {name}: {label}", f"not measured: {error}")
                opened.pop(name, None)
        for turn in range(rounds):
            names = list(opened)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                for verb in ("put", "get"):
                    taken.setdefault((name, verb), []).append(getattr(opened[name], verb)())
    finally:
        for one in opened.values():
            one.close()
    for verb in ("put", "get"):
        for ours, theirs in itertools.product(opened, opened):
            if ours.startswith("kvloom") and not theirs.startswith("kvloom"):
                what = f"{store} {verb} {label}: {ours} beside {theirs} (GB/s)"
                rows.spread(what, taken[ours, verb], amount, taken[theirs, verb], theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, default=Path(".venv-lmcache/bin/python"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--callers", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--stores", nargs="*", choices=list(STORES), default=list(STORES))
    arguments = parser.parse_args()
    for store in arguments.stores:
        rows = Rows(f"lmcache_{store}")
        with STORES[store](arguments.peer) as contenders:
            for mib in arguments.mib:
                for callers in arguments.callers:
                    label = f"{mib} MiB, {callers} at once"
                    amount = VALUES * (mib << 20) / 1e9
                    measure(rows, store, contenders(mib << 20, callers), label, amount, arguments.rounds)
        rows.finish()


if __name__ == "__main__":
    main()
