"""The memory tier and its pool: what a chunk costs besides its bytes, whatever is held, and what fragmentation takes.

Nothing is copied: the pools are on torch's `meta` device, except where a child is forked. Microseconds are those of the
processor, so that whatever else the machine does counts little. `--quick` does less of each.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from table import Rows

from kvloom import Chunk, ChunkKey, MemoryFormat
from kvloom.memory import Pool, caller, pages
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.tier import Layout, Loaded

QUICK = "--quick" in sys.argv
PAGE, MIB = 4096, 1 << 20
RUNTIME = SystemRuntime()
CHUNK = Chunk(torch.empty(1), MemoryFormat.KV_BLOB, 256)


def keys_of(count: int, tenants: int = 1) -> list[ChunkKey]:
    return [ChunkKey(f"f/{n % tenants}", n, n.to_bytes(32, "big")) for n in range(count)]


def tier_of(capacity: int, **settings: Any) -> MemoryTier:
    pool = Pool(capacity, RUNTIME, device=torch.device("meta"))
    layout = Layout(MemoryFormat.KV_BLOB, torch.uint8, lambda tokens: (2, 1, tokens, 1))
    return MemoryTier(layout, pool, EventBus((), RUNTIME), RUNTIME, **settings)


def put(tier: MemoryTier, key: ChunkKey, nbytes: int = PAGE) -> bool:
    room = tier.reserve(nbytes)
    block = None if room is None else room.seal()
    if block is not None:
        tier.insert(key, CHUNK, block).release()
    return block is not None


def micros(run: Callable[[], object], count: int, times: int = 5) -> float:
    """Microseconds of one of the `count` things that `run` does: the median of `times`."""
    taken = []
    for _ in range(2 if QUICK else times):
        began = time.thread_time()
        run()
        taken.append(time.thread_time() - began)
    return statistics.median(taken) / count * 1e6


def flat(rows: Rows) -> None:
    """Storing into a full tier, whatever the number of chunks, with a tenth of them in use or nine tenths pinned."""
    batch = 2000
    for held in (1_000, 10_000) if QUICK else (1_000, 10_000, 100_000):
        keys = keys_of(held + 20 * batch)
        fresh = iter(keys[held:])
        tier = tier_of(held * PAGE)
        for key in keys[:held]:
            put(tier, key)

        def full(tier: MemoryTier = tier, fresh: Any = fresh) -> None:
            for _ in range(batch):
                put(tier, next(fresh))

        rows.add(f"store into a full tier of {held:,} chunks (us a chunk)", f"{micros(full, batch):.2f}")
        some = tier.lease(tier.chunks()[: held // 10])
        rows.add("  a tenth of them, the coldest, in use", f"{micros(full, batch):.2f}")
        for loaded in some:
            assert loaded is not None
            loaded.release()
        tier.pin(tier.chunks()[: held * 9 // 10], True)
        rows.add("  nine tenths of them, the coldest, pinned", f"{micros(full, batch):.2f}")


def policies(rows: Rows) -> None:
    held, batch = 10_000, 2000
    keys = keys_of(held + 40 * batch, tenants=10)

    def at_once(key: ChunkKey, loaded: Loaded) -> bool:
        loaded.release()
        return True

    kinds: dict[str, tuple[dict[str, Any], Any]] = {
        "nothing": ({}, None),
        "ttl": ({"ttl": 3600.0}, None),
        "quota of each of 10 tenants": ({"quota": {"*": held * PAGE // 20}}, None),
        "writing back": ({}, at_once),
    }
    for name, (settings, write_back) in kinds.items():
        tier = tier_of(held * PAGE, **settings)
        tier.write_back.write = write_back
        fresh = iter(keys)

        def store(tier: MemoryTier = tier, fresh: Any = fresh) -> None:
            for _ in range(batch):
                put(tier, next(fresh))

        for _ in range(6):
            store()
        chain = [key for key in tier.chunks() if key.namespace.endswith("/0")][-512:][::-1]
        find = micros(lambda tier=tier, chain=chain: [tier.find(chain) for _ in range(20)], 20 * 512)  # type: ignore[misc]
        touch = micros(lambda tier=tier, chain=chain: [tier.touch(chain) for _ in range(20)], 20 * 512)  # type: ignore[misc]
        rows.add(f"with {name}: store, find, touch (us)", f"{micros(store, batch):.2f}, {find:.3f}, {touch:.3f}")


def leases(rows: Rows) -> None:
    pool = Pool(MIB, RUNTIME, device=torch.device("meta"))
    room = pool.reserve(PAGE)
    block = None if room is None else room.seal()
    assert block is not None
    many = 20_000

    def noted() -> None:
        for _ in range(many):
            block.lease().release()

    def deep(levels: int, run: Callable[[], None]) -> None:
        deep(levels - 1, run) if levels else run()

    def origin() -> Any:
        return caller()

    where = origin()

    def bare() -> None:
        for _ in range(many):
            block.lease(where).release()

    ours, limit = (micros(lambda run=run: deep(8, run), many, 9) for run in (noted, bare))  # type: ignore[misc]
    rows.add("lease and release, noting where (us)", f"{ours:.2f}", f"{limit:.2f} without noting")


def fragmentation(rows: Rows) -> None:
    long = 32 * MIB
    mixes = {
        "one size": [long],
        "a chunk, and one with a header": [long, long + 2 * PAGE],
        "a chunk, and a quarter of one": [long, long // 4],
        "a chunk, a third, one with a header": [long, long // 3, long + 2 * PAGE],
        "any size up to a chunk": [long * part // 64 for part in range(4, 65)],
    }
    steps = 1500 if QUICK else 6000
    for name, sizes in mixes.items():
        chance = random.Random(7)
        failed = tried = 0
        tier = tier_of(256 * long + long // 2)
        evicted, used = [], []
        keys = iter(keys_of(3 * steps))
        for step in track(range(steps), description=name, transient=True):
            size, before = chance.choice(sizes), len(tier)
            if tier.pool.free_bytes >= tier.pool.taken_by(size):
                tried += 1
                room = tier.pool.reserve(size)
                failed += room is None
                if room is not None:
                    room.abandon()
            put(tier, next(keys), size)
            chunks = tier._index.entries
            if step % 4 == 0:  # some are used again, so that what is cold lies scattered
                tier.touch(chance.sample(list(chunks), min(8, len(chunks))))
            if step > steps // 3:
                evicted.append(before + 1 - len(tier))
                used.append(sum(held.block.size for held in chunks.values()) / tier.pool.capacity)
        evicted.sort()
        cascade = f"evicted for one: {statistics.mean(evicted):.2f}, p99 {evicted[len(evicted) * 99 // 100]}"
        rows.add(
            f"memory used, full: {name}",
            f"{statistics.mean(used):.3f}",
            f"{cascade}, most {evicted[-1]}",
            refused_though_free=round(failed / max(1, tried), 3),
        )
        rows.add("  refused at 95 % though as many bytes are free", f"{refused_at_95(sizes, steps):.4f}")


def refused_at_95(sizes: list[int], steps: int) -> float:
    """Share of reservations that find no contiguous room at 95 % full, among those with enough free bytes."""
    chance = random.Random(11)
    pool = Pool(256 * max(sizes), RUNTIME, device=torch.device("meta"))
    rooms: list[Any] = []
    failed = 0
    for _ in range(steps):
        size = chance.choice(sizes)
        while pool.free_bytes - pool.taken_by(size) < pool.capacity // 20:
            rooms.pop(chance.randrange(len(rooms))).abandon()
        room = pool.reserve(size)
        failed += room is None
        if room is not None:
            rooms.append(room)
    for room in rooms:
        room.abandon()
    return failed / steps


def forking(rows: Rows) -> None:
    """Cost of a fork for the parent while half a GiB of the pool is present."""
    nbytes = (64 if QUICK else 512) * MIB

    def fork_ms(wiped: bool) -> float:
        before, pages._WIPE_ON_FORK = pages._WIPE_ON_FORK, 18 if wiped else 0  # 0: MADV_NORMAL
        pool = Pool(nbytes, RUNTIME)
        pages._WIPE_ON_FORK = before
        room = pool.reserve(nbytes)
        assert room is not None
        whole = room.tensor((nbytes,), torch.uint8).fill_(1)
        began = time.perf_counter()
        child = os.fork()
        if child == 0:
            time.sleep(0.5)
            os._exit(0)
        whole.fill_(2)
        taken = time.perf_counter() - began
        os.waitpid(child, 0)
        room.abandon()
        pool.close()
        return taken * 1e3

    ours, limit = (
        statistics.median(fork_ms(True) for _ in range(3)),
        statistics.median(fork_ms(False) for _ in range(3)),
    )
    text = f"{limit:.1f} ms if the child shared it"
    rows.add(f"fork, then write all of {nbytes // MIB} MiB of the pool", f"{ours:.1f} ms", text)


if __name__ == "__main__":
    rows = Rows("memory")
    for part in (flat, policies, leases, fragmentation, forking):
        part(rows)
    rows.finish()
