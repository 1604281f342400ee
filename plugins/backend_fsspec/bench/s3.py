"""One blob at a time and several at once through an S3 server: obstore alone, s3fs, and the backend over obstore.

    python plugins/backend_fsspec/bench/s3.py [--endpoint URL --bucket NAME] [--rounds 9]

Without an endpoint it starts Ceph's gateway on this machine. All run in one process, in turn, on blobs of the same
sizes; what is read is copied into memory that is there already, as the engine has it. Medians of the rounds and their
spread, in GB/s, and the ratio to obstore alone. s3fs is compared if it is installed. Writes bench/results/s3.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.testing import ACCESS_KEY, SECRET_KEY, CephRGW, s3_client

SIZES_MIB, CONCURRENT, BLOBS = (1, 4, 8), (1, 8, 32), 16
RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results" / "s3.json"


class Room:
    """A sink of memory that is there already."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))

    def reserve(self, num_bytes: int) -> memoryview:
        return self.view

    def filled(self, num_bytes: int) -> None:
        pass


class Ours:
    name = "kvloom"

    def __init__(self, endpoint: str, bucket: str) -> None:
        options = {"endpoint": endpoint}
        settings = FsspecBackend.Config(url=f"s3://{bucket}/bench", options=options, allow_http=True, timeout=60)
        self.backend = FsspecBackend(settings)

    def put(self, name: str, blob: bytes) -> None:
        self.backend.put(name, [blob])

    def get(self, name: str, room: Room) -> None:
        assert self.backend.get_into(name, room)

    def contains(self, names: list[str]) -> None:
        self.backend.contains_many(names)


class Obstore:
    name = "obstore"

    def __init__(self, endpoint: str, bucket: str) -> None:
        from obstore.store import S3Store

        self.store = S3Store(bucket, prefix="obstore", endpoint=endpoint, client_options={"allow_http": True})

    def put(self, name: str, blob: bytes) -> None:
        import obstore

        obstore.put(self.store, name, blob, use_multipart=False)

    def get(self, name: str, room: Room) -> None:
        import obstore

        data = memoryview(obstore.get(self.store, name).bytes())
        room.view[: len(data)] = data

    def contains(self, names: list[str]) -> None:
        import obstore

        async def heads() -> None:
            await asyncio.gather(*(obstore.head_async(self.store, name) for name in names))

        asyncio.run(heads())


class S3fs:
    name = "s3fs"

    def __init__(self, endpoint: str, bucket: str) -> None:
        import s3fs

        checks = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        self.fs = s3fs.S3FileSystem(endpoint_url=endpoint, config_kwargs={**checks, "max_pool_connections": 64})
        self.root = f"{bucket}/s3fs"

    def put(self, name: str, blob: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", blob)

    def get(self, name: str, room: Room) -> None:
        data = self.fs.cat_file(f"{self.root}/{name}")
        room.view[: len(data)] = data

    def contains(self, names: list[str]) -> None:
        for name in names:
            self.fs.info(f"{self.root}/{name}", refresh=True)


def measured(client: Any, verb: str, size: int, pool: ThreadPoolExecutor | None, rooms: list[Room]) -> float:
    """GB/s of one round."""
    blob = os.urandom(size) if verb == "put" else b""

    def one(number: int) -> None:
        if verb == "put":
            client.put(f"{size}-{number}", blob)
        else:
            client.get(f"{size}-{number}", rooms[number])

    began = time.perf_counter()
    if pool is None:
        for number in range(BLOBS):
            one(number)
    else:
        list(pool.map(one, range(BLOBS)))
    return BLOBS * size / (time.perf_counter() - began) / 1e9


def summary(rounds: list[float], limit: list[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(rounds, limit, strict=True)]
    return {
        "median": round(statistics.median(rounds), 3), "least": round(min(rounds), 3), "most": round(max(rounds), 3),
        "of_obstore": round(statistics.median(ratios), 3),
    }  # fmt: skip


def rows(clients: list[Any], rounds: int) -> Iterator[dict[str, Any]]:
    for mib in SIZES_MIB:
        rooms = [Room(mib << 20) for _ in range(BLOBS)]
        for at_once in CONCURRENT:
            with contextlib.ExitStack() as stack:
                pool = stack.enter_context(ThreadPoolExecutor(at_once)) if at_once > 1 else None
                for verb in ("put", "get"):
                    told: dict[str, list[float]] = {client.name: [] for client in clients}
                    for turn in range(rounds + 1):
                        for client in clients[turn % len(clients) :] + clients[: turn % len(clients)]:
                            speed = measured(client, verb, mib << 20, pool, rooms)
                            if turn:  # the first one warms up
                                told[client.name].append(speed)
                    for name, speeds in told.items():
                        row = {"verb": verb, "MiB": mib, "at_once": at_once, "client": name}
                        yield {**row, **summary(speeds, told["obstore"])}


def asked(clients: list[Any], rounds: int) -> Iterator[dict[str, Any]]:
    names = [f"{1 << 20}-{number % BLOBS}" for number in range(256)]
    told: dict[str, list[float]] = {client.name: [] for client in clients}
    for turn in range(rounds + 1):
        for client in clients:
            began = time.perf_counter()
            client.contains(names)
            if turn:
                told[client.name].append(len(names) / (time.perf_counter() - began))
    for name, rates in told.items():
        yield {"verb": "contains 256, keys/s", "client": name, **summary(rates, told["obstore"])}


def run(endpoint: str, bucket: str, rounds: int) -> list[dict[str, Any]]:
    clients: list[Any] = []
    for make in (Obstore, Ours, S3fs):
        with contextlib.suppress(ImportError):
            clients.append(make(endpoint, bucket))
    table = []
    show: Callable[[dict[str, Any]], None] = lambda row: print("  ".join(f"{value!s:>9}" for value in row.values()))  # noqa: E731
    for found in (rows(clients, rounds), asked(clients, rounds)):
        for row in found:
            table.append(row)
            show(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint")
    parser.add_argument("--bucket", default="kvloom-bench")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        endpoint = arguments.endpoint
        if endpoint is None:
            server = stack.enter_context(CephRGW(capacity=8 << 30))
            os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_REGION="us-east-1")
            endpoint = server.endpoint
            s3_client(endpoint).create_bucket(Bucket=arguments.bucket)
        table = run(endpoint, arguments.bucket, arguments.rounds)
    load = [round(load, 1) for load in os.getloadavg()]
    about = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": load, "rounds": arguments.rounds}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"about": about, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
