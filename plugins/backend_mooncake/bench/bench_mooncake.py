"""The backend beside Mooncake's own client: put, read into registered memory, and looking up 512 chunks.

    python bench_mooncake.py [--rounds 5] [--out FILE]

One master and one peer on this machine, over TCP; this process contributes nothing, so that every byte crosses a
socket. The limit is `put_from` and `get_into` of the same client, on the same memory. Contenders take turns, first a
different one each round. Medians, lowest and highest, in GB/s; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.testing import MooncakeMaster, MooncakePeer

MIB = 1 << 20
SIZES, CALLERS, LOOKED_UP, BLOBS = (1, 4, 8), (1, 8, 32), 512, 16
names = (f"blob/{number}" for number in itertools.count())


class Slot:
    """A place in registered memory, as a sink."""

    expected_bytes = 0

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.address = np.frombuffer(memory, dtype=np.uint8).ctypes.data

    def reserve(self, num_bytes: int) -> memoryview:
        return self.memory[:num_bytes]

    def filled(self, num_bytes: int) -> None:
        pass


class Bench:
    def __init__(self, master: MooncakeMaster, rounds: int) -> None:
        self.backend = MooncakeBackend(MooncakeBackend.Config(master=master.address, local_host="127.0.0.1"))
        self.store: Any = self.backend._client._store
        pool = memoryview(mmap.mmap(-1, max(CALLERS) * max(SIZES) * MIB))
        np.frombuffer(pool, dtype=np.uint8)[:] = 7  # its pages are there
        self.backend.register(pool)
        self.slots = [Slot(pool[start : start + max(SIZES) * MIB]) for start in range(0, len(pool), max(SIZES) * MIB)]
        self.rounds, self.rows = rounds, []  # type: ignore[var-annotated]

    def compare(self, what: str, amount: float, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
        """Both in turn; the first round counts for nothing."""
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(self.rounds + 1):
            for mine in (number % 2 == 0, number % 2 == 1):
                run = ours if mine else theirs
                began = time.perf_counter()
                run()
                taken[mine].append(time.perf_counter() - began)
                if what.startswith("put"):
                    self.store.remove_all(True)  # or the master would evict in the middle of the next
        rates = {mine: sorted(amount / seconds for seconds in some[1:]) for mine, some in taken.items()}
        middle = {mine: statistics.median(some) for mine, some in rates.items()}
        self.rows.append(
            {"what": what, "kvloom": rates[True], "client": rates[False], "ratio": middle[True] / middle[False]}
        )
        spread = [f"{middle[mine]:6.2f} ({rates[mine][0]:.2f}-{rates[mine][-1]:.2f})" for mine in (True, False)]
        print(
            f"{what:24}  kvloom {spread[0]}  client {spread[1]}  ratio {middle[True] / middle[False]:.2f}", flush=True
        )

    def move(self, mib: int, callers: int) -> None:
        size = mib * MIB
        calls = max(BLOBS, 2 * callers)
        with ThreadPoolExecutor(callers) as pool:

            def each(do: Callable[[str, Slot], Any], some: list[str]) -> None:
                work = zip(some, itertools.cycle(self.slots[:callers]))
                assert all(pool.map(lambda one: do(*one), work))

            def read(key: str, slot: Slot) -> bool:
                return bool(self.store.get_into(key, slot.address, size) == size)

            def put(key: str, slot: Slot) -> bool:
                return bool(self.store.put_from(key, slot.address, size) == 0)

            def our_put(key: str, slot: Slot) -> bool:
                self.backend.put(key, [slot.memory[:size]])
                return True

            def new() -> list[str]:
                return [next(names) for _ in range(calls)]

            gigabytes, label = calls * size / 1e9, f"{mib} MiB, {callers} callers"
            self.compare(f"put {label}", gigabytes, lambda: each(our_put, new()), lambda: each(put, new()))
            keys = new()[:BLOBS]
            each(put, keys)
            again = list(itertools.islice(itertools.cycle(keys), calls))
            for slot in self.slots:
                slot.expected_bytes = size  # as of the blob before it
            ours, theirs = (lambda: each(self.backend.get_into, again)), (lambda: each(read, again))
            self.compare(f"read {label}", gigabytes, ours, theirs)

    def look_up(self) -> None:
        keys = [next(names) for _ in range(LOOKED_UP)]
        taken = []
        for _ in range(10 * self.rounds):
            began = time.perf_counter()
            self.backend.contains_many(keys)
            taken.append(1000 * (time.perf_counter() - began))
        print(f"looking up {LOOKED_UP} chunks: {statistics.median(taken):.2f} ms ({min(taken):.2f}-{max(taken):.2f})")
        self.rows.append({"what": f"lookup of {LOOKED_UP}", "milliseconds": sorted(taken)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[3] / "bench" / "results" / "mooncake.json")
    arguments = parser.parse_args()
    with MooncakeMaster() as master, MooncakePeer(master.address, segment=2 << 30):
        bench = Bench(master, arguments.rounds)
        try:
            bench.look_up()
            for mib, callers in itertools.product(SIZES, CALLERS):
                bench.move(mib, callers)
        finally:
            bench.backend.close()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(bench.rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
