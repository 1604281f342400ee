"""The ledger of a stored tier: time and memory for each blob as the number of blobs grows, and recovery.

Beside each row stands what the fewest possible dictionary operations take in the same run: they are the limit of what
can be had in Python. Sizes are done in turn, so read the last column of one size beside that of another.

    python bench/ledger.py [--quick]
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from table import Rows

from kvloom import ChunkKey, Entry
from kvloom.runtime import SystemRuntime
from kvloom.tiers.index.ledger import Fidelity, Ledger
from kvloom_backend_disk.backend import DiskBackend

CHAIN = 512
BLOB_BYTES = 4096
NAMESPACE = f"{'f' * 32}/-"
PAGE_BYTES = resource.getpagesize()


def key(number: int) -> ChunkKey:
    """The key of blob `number`: they come in chains of 512."""
    return ChunkKey(NAMESPACE, number % CHAIN, sha256(number.to_bytes(8, "little")).digest())


def listing(count: int) -> Iterator[Entry]:
    """A store's listing of so many blobs, with a minute between chains."""
    began = time.time() - 60.0 * (count // CHAIN) - 60.0
    for number in range(count):
        yield Entry(str(key(number)), BLOB_BYTES, began + 60.0 * (number // CHAIN))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def each(run: Callable[[Sequence[ChunkKey]], object], some: Sequence[Sequence[ChunkKey]]) -> list[float]:
    """Microseconds a key, for each of the lists of keys."""
    taken = []
    for keys in some:
        began = time.perf_counter()
        run(keys)
        taken.append((time.perf_counter() - began) / len(keys) * 1e6)
    return taken


def spread(taken: Sequence[float], digits: int = 2) -> str:
    """The median, and between what nine tenths of it lie."""
    low, *_, high = statistics.quantiles(taken, n=20)
    return f"{statistics.median(taken):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def add(rows: Rows, what: str, taken: Sequence[float], limits: Sequence[float], limit: str) -> None:
    ratio = statistics.median(limits) / statistics.median(taken)
    rows.add(what, spread(taken), f"{spread(limits)} {limit}", ratio, median_us=statistics.median(taken))


# -- what is measured --------------------------------------------------------------------------------------------------


def admission(rows: Rows, count: int) -> None:
    """At capacity: every blob that is admitted pushes one out, on the thread that writes it.

    Whoever stores only waits for the blob to be asked about and expected.
    """
    more = 10_000
    for name, options in (
        ("lru", {}),
        ("tiny_lfu, with a quota and a time to live", {"policy": "tiny_lfu", "quota": {"*": 1 << 60}, "ttl": 1e9}),
    ):
        ledger = Ledger(SystemRuntime(), capacity=count * BLOB_BYTES, **options)
        ledger.recover(listing(count))
        plain = OrderedDict((key(number).digest, BLOB_BYTES) for number in range(count))
        asked, taken, limits = [], [], []
        for number in range(count, count + more):
            one = key(number)
            began = time.perf_counter()
            ledger.welcome(one, BLOB_BYTES)
            ledger.expect(one)
            asked.append((time.perf_counter() - began) * 1e6)
            began = time.perf_counter()
            victims = ledger.admit(one, BLOB_BYTES)
            taken.append((time.perf_counter() - began) * 1e6)
            assert victims is not None and len(victims) == 1
            ledger.note(one, Fidelity.EXACT)
            began = time.perf_counter()
            plain[one.digest] = BLOB_BYTES
            plain.popitem(last=False)
            limits.append((time.perf_counter() - began) * 1e6)
        assert ledger.bytes == count * BLOB_BYTES
        limit = "OrderedDict: set and popitem"
        add(rows, f"admission at capacity, {count:,} rows, {name}: on the caller's path (us)", asked, limits, limit)
        add(rows, "  and on that of who writes (us)", taken, limits, limit)
        last = sorted(taken)
        text = f"{last[int(0.99 * more)]:.1f}, {last[int(0.999 * more)]:.1f}, {last[-1]:.1f}"
        rows.add("  its 99th and 99.9th percentile, and the longest (us)", text)


def use(rows: Rows, sizes: Sequence[int]) -> Ledger:
    """Questions and uses of 512 keys at a time, of chains and of keys from all over; the largest ledger."""
    for count in sizes:
        gc.collect()
        before = rss_bytes()
        ledger = Ledger(SystemRuntime(), capacity=1 << 62)
        began = time.perf_counter()
        assert ledger.recover(listing(count)) == [] and len(ledger) == count
        recovery = time.perf_counter() - began
        gc.collect()
        nbytes = (rss_bytes() - before) / count
        rng = random.Random(count)
        starts = [CHAIN * rng.randrange(count // CHAIN) for _ in range(80)]
        chains = [[key(start + depth) for depth in range(CHAIN)] for start in starts[::2]]
        scattered = [[key(rng.randrange(count)) for _ in range(CHAIN)] for _ in range(80)]
        others = [[key(start + depth) for depth in range(CHAIN)] for start in starts[1::2]]
        find = ledger._rows.find  # which is all that a dictionary can do with as many keys

        def ask(keys: Sequence[ChunkKey], find: list[Callable[..., int]] = find) -> object:
            return [find[digest[0]](digest) for _, _, digest in keys]

        text, limit = f"{count:>10,} rows", "a dict's get among as many"
        limits = each(ask, others)
        add(rows, f"{text}: known, 512 keys of a chain (us a key)", each(ledger.known, chains), limits, limit)
        add(rows, f"{text}: touch, a chain of 512", each(ledger.touch, chains), limits, limit)
        limits = each(ask, scattered[1::2])
        add(rows, f"{text}: known, 512 keys from all over", each(ledger.known, scattered[::2]), limits, limit)
        add(rows, f"{text}: touch, 512 keys from all over", each(ledger.touch, scattered[::2]), limits, limit)
        if count >= 1_000_000:
            rows.add(f"{text}: memory (bytes of RSS a row)", f"{nbytes:.0f}", bytes_per_row=nbytes)
        if count >= 100_000:
            rate(rows, f"{text}: recovery from a listing (thousand blobs/s)", recovery, listing(count), count)
    return ledger


def rate(rows: Rows, what: str, seconds: float, entries: Iterator[Entry], count: int) -> None:
    """Beside listing alone: what it takes to make the entries is part of the time."""
    few = min(count, 200_000)
    began = time.perf_counter()
    for _, _ in zip(range(few), entries, strict=False):
        pass
    alone = (time.perf_counter() - began) * count / few
    text = f"{count / alone / 1e3:.0f} the listing alone"
    rows.add(what, f"{count / seconds / 1e3:.0f}", text, alone / seconds, without_listing=count / (seconds - alone))


def lookup(rows: Rows, ledger: Ledger, count: int) -> None:
    """Cost of the ledger in a lookup of 128k tokens in chunks of 256, and of noting their use."""
    starts = [CHAIN * number for number in random.Random(0).sample(range(count // CHAIN), k=100)]
    asked, used = [], []
    for start in starts:
        chain = [key(start + depth) for depth in range(CHAIN)]
        began = time.perf_counter()
        found = ledger.known(chain)
        between = time.perf_counter()
        ledger.touch(chain)
        asked.append((between - began) * 1e3)
        used.append((time.perf_counter() - between) * 1e3)
        assert None not in found
    rows.add(f"lookup of 128k tokens, 512 keys of {count:,} rows: known (ms)", spread(asked, 3))
    rows.add("  and touch (ms)", spread(used, 3))


def memory_at_most(rows: Rows, count: int) -> None:
    """With all there is to keep, and after a tenth was replaced: dictionaries that change are looser than new ones."""
    gc.collect()
    before = rss_bytes()
    ledger = Ledger(SystemRuntime(), capacity=count * BLOB_BYTES, policy="tiny_lfu", quota={"*": 1 << 62}, ttl=1e9)
    ledger.recover(listing(count))
    for number in range(count, count + count // 10):
        ledger.admit(key(number), BLOB_BYTES)
        ledger.note(key(number), Fidelity.EXACT)
    gc.collect()
    nbytes = (rss_bytes() - before) / count
    what = f"{count:>10,} rows, with a quota, a time to live and tiny_lfu: memory (bytes of RSS a row)"
    rows.add(what, f"{nbytes:.0f}", bytes_per_row=nbytes)


def real_directory(rows: Rows, count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as folder:
        backend = DiskBackend(DiskBackend.Config(path=Path(folder), direct="never"))
        for number in range(count):
            backend.put(str(key(number)), [b"x"])
        taken, alone = [], []
        for _ in range(3):
            ledger = Ledger(SystemRuntime(), capacity=1 << 62)
            began = time.perf_counter()
            ledger.recover(backend.scan())
            taken.append(count / (time.perf_counter() - began) / 1e3)
            assert len(ledger) == count
            began = time.perf_counter()
            assert sum(1 for _ in backend.scan()) == count
            alone.append(count / (time.perf_counter() - began) / 1e3)
            began = time.perf_counter()
            ledger.recover(backend.scan())
            again = count / (time.perf_counter() - began) / 1e3
        ratio = statistics.median(taken) / statistics.median(alone)
        text = f"{statistics.median(taken):.0f} ({min(taken):.0f} to {max(taken):.0f})"
        limit = f"{statistics.median(alone):.0f} listing it alone"
        rows.add(f"recovery from a directory of {count:,} blobs (thousand blobs/s)", text, limit, ratio)
        rows.add("  and again, when all of it is known", f"{again:.0f}", limit, again / statistics.median(alone))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a million rows at most, and a small directory")
    quick = parser.parse_args().quick
    rows = Rows("ledger")
    admission(rows, 100_000)
    sizes = [10_000, 100_000, 1_000_000] + ([] if quick else [10_000_000])
    largest = use(rows, sizes)
    lookup(rows, largest, sizes[-1])
    del largest
    memory_at_most(rows, 1_000_000)
    real_directory(rows, 10_000 if quick else 100_000)
    rows.finish()
