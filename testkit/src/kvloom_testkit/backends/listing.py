"""Listings, and what they say."""

from __future__ import annotations

import time
from functools import partial

from kvloom import Entry, StorageBackend
from kvloom_testkit.backends.base import BackendRequirements, Open, again
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.requirements import claims, needs
from kvloom_testkit.running import together

ABOUT_NOW_SECONDS = 3600.0
"""How far a store's clock may be from ours."""


class ListingRequirements(BackendRequirements):
    """`scan` and `touch_many`."""

    @needs("scan")
    def test_B16_scan_lists_what_starts_with_the_prefix(self, names: Namespace, opened: Open) -> None:
        """`scan` yields every blob whose key starts with the prefix, once, by its key, and nothing else.

        A prefix may end anywhere, in the middle of a part too. Each entry's `bytes` is above 0.

        Why: the ledger is recovered from it at start, and a tenant is purged by it; what has no size cannot be counted.

        Usually: the prefix is taken for a directory or a pattern, one page of a listing is taken for all of it, or
        scratch files are listed.
        """
        backend = opened()
        keys = [*names.keys(150), names.named("-/1"), names.named("other/1"), names.named("-x")]
        backend.put_many((key, [b"blob"]) for key in keys)
        backend.delete_many(keys[:3])
        keys = keys[3:]
        backend = again(backend, opened)
        prefixes = [names.fingerprint, names.fingerprint[:-1], names.prefix, f"{names.prefix}1", keys[9], keys[9][:-5]]
        for prefix in [*prefixes, f"{names.fingerprint}/-", f"{names.fingerprint}/o", f"{names.fingerprint}/none"]:
            entries = list(backend.scan(prefix))
            assert sorted(entry.key for entry in entries) == sorted(key for key in keys if key.startswith(prefix))
            assert all(entry.bytes > 0 for entry in entries)
        assert {entry.key for entry in backend.scan()} >= set(keys)

    @needs("scan")
    def test_B17_scan_says_when_in_seconds(self, names: Namespace, opened: Open) -> None:
        """An entry's `modified` is when the blob was put, in seconds since the epoch, or 0.0 if the store cannot tell.

        Why: `ttl` and the order of eviction after a restart depend on it.

        Usually: milliseconds, a clock that starts at boot, or a local time that is taken for UTC.
        """
        backend, key = opened(), names.key()
        backend.put(key, [b"blob"])
        (entry,) = again(backend, opened).scan(names.prefix)
        now = time.time()
        for seconds in (entry.modified, entry.used):
            assert seconds == 0.0 or abs(seconds - now) < ABOUT_NOW_SECONDS, f"{seconds}, and now is {now}"

    @needs("scan")
    def test_B18_scan_goes_on_while_the_store_changes(self, names: Namespace, opened: Open) -> None:
        """A listing during which other keys are put and deleted raises nothing, and has all that was there throughout.

        Why: tiers list while they serve; an aborted listing leaves a ledger that counts wrongly.

        Usually: what was listed a moment ago is gone when it is asked for its size, or pages are counted by offset.
        """
        backend = opened()
        steady, moving = names.keys(60), [names.named(f"-/moving-{number}") for number in range(40)]
        backend.put_many((key, [b"blob"]) for key in steady)
        lists = opened() if type(backend).shared else backend

        def change(keys: list[str]) -> None:
            for _ in range(8):
                backend.put_many((key, [b"blob"]) for key in keys)
                backend.delete_many(keys)

        def scan() -> None:
            for _ in range(12):
                found = [entry.key for entry in lists.scan(names.prefix)]
                assert set(steady) <= set(found), "a listing misses what was there throughout"

        together(scan, scan, partial(change, moving[::2]), partial(change, moving[1::2]))

    @needs("touch_many")
    def test_B29_touch_many_notes_use_and_changes_nothing_else(self, names: Namespace, opened: Open) -> None:
        """After `touch_many` a scan's `used` of these blobs is about now, and their bytes and `modified` are unchanged.

        A key without a blob is passed over, and none is made. A store may leave `used` at 0.

        Why: it is how processes that share a store learn what the others use; it happens with every hit.

        Usually: touching makes an empty file, or it is the time of writing that is changed.
        """
        backend, keys = opened(), names.keys(4)
        absent = names.named("absent")
        backend.put_many((key, [blob_of(100)]) for key in keys)
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


def _listed(backend: StorageBackend, names: Namespace) -> dict[str, Entry]:
    return {entry.key: entry for entry in backend.scan(names.prefix)}
