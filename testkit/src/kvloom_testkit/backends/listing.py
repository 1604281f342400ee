"""Listings and their content."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvloom import Entry, StorageBackend
from kvloom_testkit import effort
from kvloom_testkit.backends.base import ANSWER_SECONDS, BackendRequirements, Open, again, contents
from kvloom_testkit.backends.doubles import RecordingSink, put_all
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.requirements import claims, needs
from kvloom_testkit.running import comes_true, together

ABOUT_NOW_SECONDS = 3600.0
"""Maximum difference between a store's clock and ours."""
SETTLING_SECONDS = 6.0
"""Time that a listing may show an old time or size: clocks of whole seconds, file systems that allocate later."""
MANY = 1100
"""More than stores take or give in one request, which for many is 1,000 or 1,024."""
MORE = 4200
"""Than those that answer more at once, 4,096 or fewer."""
MORE_SECONDS = 4.0
"""If as many blobs as above took no longer, more are tried."""
MANY_IF_BOUNDED = 150
ODD_NAMES = (
    "Case/1", "case/1", "a_c", "abc", "a.c", "a-c", "ab/c", ".a", "..a", "a..", "...", "_", "a.tmp", "a.lock", "a.json",
    "x" * 167,
)  # fmt: skip
"""Keys that a store confuses if it ignores letter case, takes the prefix for a pattern, or hides scratch files."""


class ListingRequirements(BackendRequirements):
    """`scan` and `touch_many`."""

    @needs("scan")
    def test_B16_scan_lists_what_starts_with_the_prefix(self, names: Namespace, opened: Open) -> None:
        """`scan` yields every blob whose key starts with the prefix, once, by its key, and nothing else.

        A prefix may end anywhere, also in the middle of a part, and is compared literally. Each entry's `bytes` is
        above 0.

        Why: the ledger is rebuilt from it at start, and a tenant is purged by it; a blob without a size cannot be
        counted.

        Usually: the prefix is taken for a directory, for text anywhere in a key or for a pattern (`_` in SQL's LIKE,
        which ignores letter case too), one page of a listing is taken for all of it, scratch files are listed, or blobs
        with keys like those (`.a`, `a.tmp`) are not.
        """
        backend = opened()
        keys = [*names.keys(150), names.named("-/1"), names.named("other/1"), names.named("-x")]
        keys += map(names.named, ODD_NAMES)
        keys += map(names.named, (f"in/{names.prefix}1", f"x{names.fingerprint}"))  # others' keys, and no prefix
        put_all(backend, ((key, [b"blob"]) for key in keys))
        backend.delete_many(keys[:3])
        keys = keys[3:]
        backend = again(backend, opened)
        prefixes = [names.fingerprint, names.fingerprint[:-1], names.prefix, f"{names.prefix}1", keys[9], keys[9][:-5]]
        endings = ("-", "o", "none", "C", "c", "Case/", "case", "a_", "a.", "a_c", "a")
        for prefix in [*prefixes, *(f"{names.fingerprint}/{ending}" for ending in endings)]:
            entries = list(backend.scan(prefix))
            assert sorted(entry.key for entry in entries) == sorted(key for key in keys if key.startswith(prefix))
            assert all(entry.bytes > 0 for entry in entries)
        assert {entry.key for entry in backend.scan()} >= set(keys)

    @needs("scan")
    def test_B17_scan_says_when_in_seconds(self, names: Namespace, opened: Open) -> None:
        """An entry's `modified` is when the blob was put, in seconds since the epoch, or 0.0 if the store cannot tell.

        Only the last `put` counts, and no `get`.

        Why: `ttl` and the order of eviction after a restart depend on it.

        Usually: milliseconds, a clock that starts at boot, a local time that is taken for UTC, the time when the key
        was put for the first time, or that of its last use.
        """
        backend, key = opened(), names.key()
        backend.put(key, [b"blob"])
        backend = again(backend, opened)
        (entry,) = backend.scan(names.prefix)
        now = time.time()
        for seconds in (entry.modified, entry.used):
            assert seconds == 0.0 or abs(seconds - now) < ABOUT_NOW_SECONDS, f"{seconds}, and now is {now}"
        for read in (backend.get, lambda key: backend.get_into(key, RecordingSink()), backend.contains):
            assert read(key)
            assert _listed(backend, names)[key].modified == entry.modified, "after it was read"

        def put_again() -> bool:
            backend.put(key, [blob_of(10)])
            return _listed(backend, names)[key].modified > entry.modified

        assert entry.modified == 0.0 or _comes_true(put_again), f"put again and again, it still says {entry.modified}"

    @needs("scan")
    def test_B41_scan_says_how_much_a_blob_takes_up(self, names: Namespace, opened: Open) -> None:
        """An entry's `bytes` is at least the length of an incompressible blob, also after it was put again.

        It may be more: headers, whole blocks.

        Why: after a restart a tier's capacity is counted by it; if sizes are too small, the disk fills up.

        Usually: a count of blocks or pages, a constant 1 instead of a size, or the size of the first `put`.
        """
        backend, key = opened(), names.key()
        for size in (10_000, 500_000):
            backend.put(key, [blob_of(size)])
            backend = again(backend, opened)
            enough = partial(_says_at_least, size, backend, names, key)
            assert _comes_true(enough), f"{_listed(backend, names)[key].bytes} bytes, and {size} were put"

    @needs("scan")
    def test_B18_scan_goes_on_while_the_store_changes(self, names: Namespace, opened: Open) -> None:
        """A listing during which other keys are put and deleted raises nothing, and has all blobs that existed
        throughout.

        While one is under way, or was abandoned, all other methods can be called and return.

        Why: tiers list while they serve; an aborted listing leaves a ledger that counts wrongly.

        Usually: a listed blob is gone when its size is looked up, pages are counted by offset, or a lock is held from
        one entry to the next.
        """
        backend = opened()
        steady, moving = names.keys(60), [names.named(f"-/moving-{number}") for number in range(40)]
        put_all(backend, ((key, [b"blob"]) for key in steady))
        lists = opened() if type(backend).shared else backend
        put_all(backend, ((key, [b"blob"]) for key in moving))
        listing = iter(lists.scan(names.prefix))
        listed = {next(listing).key}
        together(lambda: backend.delete_many(moving))
        assert set(steady) <= listed | {entry.key for entry in listing}, "what was listed was deleted meanwhile"

        def change(keys: list[str]) -> None:
            for _ in range(8):
                put_all(backend, ((key, [b"blob"]) for key in keys))
                backend.delete_many(keys)

        def scan() -> None:
            for _ in range(12):
                found = [entry.key for entry in lists.scan(names.prefix)]
                assert set(steady) <= set(found), "a listing misses what was there throughout"

        together(scan, scan, partial(change, moving[::2]), partial(change, moving[1::2]), restless=True)

        def use_everything() -> None:
            backend.put(moving[0], [b"blob"])
            assert backend.get(steady[0]) is not None and backend.contains(moving[0])
            backend.delete(moving[0])
            assert set(steady) <= {entry.key for entry in backend.scan(names.prefix)}

        under_way, left = iter(backend.scan(names.prefix)), iter(backend.scan(names.prefix))
        found = {next(under_way).key, next(left).key}
        together(use_everything, seconds=ANSWER_SECONDS)
        found = {entry.key for entry in under_way} | found
        assert set(steady) <= found, "a listing misses what was there throughout"
        del left
        together(use_everything, seconds=ANSWER_SECONDS)

    @needs("touch_many")
    def test_B29_touch_many_notes_use_and_changes_nothing_else(self, names: Namespace, opened: Open) -> None:
        """After `touch_many` a scan's `used` of these blobs is about now, and their bytes and `modified` are unchanged.

        A key without a blob is skipped, and none is made. Other blobs keep their `used`. A store may leave `used` at 0.

        Why: it is how processes that share a store learn what the others use; it happens with every hit.

        Usually: touching makes an empty file, changes the time of writing, or an update lacks its `where`.
        """
        backend, keys = opened(), names.keys(4)
        absent = names.named("absent")
        put_all(backend, ((key, [blob_of(100)]) for key in keys))
        backend = again(backend, opened)
        before = _listed(backend, names)
        backend.touch_many([keys[2], absent, keys[1]])
        backend.touch_many([])
        assert not backend.contains(absent) and backend.get(absent) is None
        if not claims(backend, "scan", StorageBackend):
            return  # there is nothing by which it could tell
        after, now = _listed(again(backend, opened), names), time.time()
        assert {key: entry[:3] for key, entry in after.items()} == {key: entry[:3] for key, entry in before.items()}
        used = [after[key].used for key in keys]
        assert all(seconds == 0.0 or abs(seconds - now) < ABOUT_NOW_SECONDS for seconds in used), f"{used}, now {now}"
        assert used[2] <= used[1], "the least recently used one comes first"
        assert all(after[key].used >= before[key].used for key in keys[1:3])
        assert [after[key].used for key in keys[::3]] == [before[key].used for key in keys[::3]], "what was not named"

    @needs("persistent")
    def test_B35_what_persists_is_listed(self, names: Namespace, opened: Open) -> None:
        """A `persistent` store has a `scan`, and a new instance lists blobs that an earlier one put.

        A store that is also `shared` and `bounded` need not.

        Why: the ledger is rebuilt from a listing at start. In a tier with a capacity or a ttl, a blob that is not
        listed is never found again, and its space is never freed.

        Usually: the store cannot list, and no index is kept beside it; or the index is written at `close`.
        """
        backend = opened()
        if type(backend).shared and type(backend).bounded and not claims(backend, "scan", StorageBackend):
            return
        keys = names.keys(3)
        for key in keys:
            backend.put(key, [b"blob"])
        opened.close(backend)
        assert sorted(entry.key for entry in opened().scan(names.prefix)) == sorted(keys)

    def test_B38_a_thousand_blobs_at_once(self, names: Namespace, opened: Open) -> None:
        """The forms for many keys take more than a thousand at once, and a listing yields as many.

        A listing of a store that is not too slow yields more than four thousand. A store that is `bounded` is asked
        with 150.

        Why: stores answer in pages and limit a request, and what is cut off there is not seen with a few keys.

        Usually: only the first page of a listing is read, or the keys behind the limit of a request are left out.
        """
        backend = opened()
        keys = names.keys(MANY_IF_BOUNDED if type(backend).bounded or effort.brief else MANY)
        blobs = [key.encode() for key in keys]
        began = time.monotonic()
        put_all(backend, ((key, [blob]) for key, blob in zip(keys, blobs, strict=True)))
        is_quick = not type(backend).bounded and time.monotonic() - began < MORE_SECONDS
        backend = again(backend, opened)
        assert contents(backend.get_many(keys)) == blobs
        assert all(backend.contains_many(keys))
        if claims(backend, "scan", StorageBackend):
            found = [entry.key for entry in backend.scan(names.prefix)]
            assert len(found) == len(keys) and set(found) == set(keys)
            if (is_quick or effort.thorough) and not effort.brief:
                keys = names.keys(effort.rounds(MORE))
                put_all(backend, ((key, [b"blob"]) for key in keys[len(found) :]))
                assert sorted(entry.key for entry in backend.scan(names.prefix)) == sorted(keys)
        backend.delete_many(keys)
        assert not any(backend.contains_many(keys)) and backend.get(keys[-1]) is None
        names.used.clear()  # nothing is left to be deleted


def _listed(backend: StorageBackend, names: Namespace) -> dict[str, Entry]:
    return {entry.key: entry for entry in backend.scan(names.prefix)}


def _says_at_least(num_bytes: int, backend: StorageBackend, names: Namespace, key: str) -> bool:
    return _listed(backend, names)[key].bytes >= num_bytes


def _comes_true(told: Callable[[], bool]) -> bool:
    """Return whether it comes true before a listing should have settled."""
    return comes_true(told, SETTLING_SECONDS)
