"""Opening, closing, and what outlives them."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvloom import BackendError, StorageBackend
from kvloom_testkit.backends.base import BackendRequirements, Make, Open, again, content
from kvloom_testkit.backends.doubles import BreaksHalfWay, Broken, RecordingSink, put_all
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.process_state import left_as_it_is
from kvloom_testkit.remaking import by_another_path
from kvloom_testkit.requirements import claims, needs
from kvloom_testkit.running import comes_true, together

OPENINGS = 30
SLACK = 10
"""Threads and descriptors that other code may have opened meanwhile."""
_SECONDS = 5.0
"""Seconds within which a connection must be closed whose client was told to close it, or was collected."""

_OF_A_MODEL = re.compile(r"(quarantine/|spec/)?[0-9a-f]{32}")


class LifetimeRequirements(BackendRequirements):
    """Instances."""

    @needs("persistent")
    def test_B21_what_was_put_survives_reopening(self, names: Namespace, opened: Open) -> None:
        """After `close`, a new instance on the same store finds the blobs that were put, and not those that were
        deleted.

        Why: `persistent` is claimed, so that a restart counts on it.

        Usually: something is written at exit, or kept in a table that is not saved.
        """
        backend, blob = opened(), blob_of(10_000)
        backend.put(names.key(1), [blob])
        backend.put(names.key(2), [blob])
        backend.delete(names.key(2))
        opened.close(backend)
        second = opened()
        assert content(second.get(names.key(1))) == blob and second.get(names.key(2)) is None

    @needs("shared")
    def test_B22_two_instances_see_each_other_at_once(self, names: Namespace, opened: Open) -> None:
        """A put or delete by one instance is visible to the next call of another open instance, listings included.

        Why: `shared` is claimed; ranks and replicas find each other's KV that way, and count it.

        Usually: each instance caches blobs, missing keys or listings; or a read transaction stays open.
        """
        first, second, key = opened(), opened(), names.key()
        lists = claims(first, "scan", StorageBackend)
        assert not second.contains(key) and second.get(key) is None
        for writer, reader in ((first, second), (second, first)):
            for blob in (b"one", b"another", b"third"):
                writer.put(key, [blob])
                assert reader.contains(key) and content(reader.get(key)) == blob
                assert not lists or [entry.key for entry in reader.scan(names.prefix)] == [key], "a listing"
            writer.delete(key)
            assert not reader.contains(key) and reader.get(key) is None
            assert list(reader.scan(names.prefix)) == [], "a listing"

    def test_B25_close_may_be_repeated(self, names: Namespace, opened: Open) -> None:
        """`close` works on a used or unused instance, a second time, and on any thread; other instances continue to
        work.

        Why: a failed start closes what was opened, and the engine closes it again, on any thread.

        Usually: the resource is already gone at the second call, was never made, is shared, or may only be closed by
        the thread that made it.
        """
        unused = opened()
        unused.close()
        opened.close(unused)
        backend = opened()
        backend.put(names.key(), [b"blob"])
        if type(backend).shared:
            other = opened()
            assert content(other.get(names.key())) == b"blob"
            other.close()
            opened.close(other)
            assert content(backend.get(names.key())) == b"blob", "after another instance was closed"
        together(backend.close)
        opened.close(backend)

    @needs("identity")
    def test_B27_identity_tells_which_store_it_is(self, names: Namespace, opened: Open) -> None:
        """Two instances on the same store return the same text, before and after a put; or None.

        If the setting is a directory, this also holds if one names it by a symbolic link.

        Why: two tiers on one store would count its bytes twice and evict each other's; they are refused at start.

        Usually: it contains something of the instance (a connection, a time, an id), or the path as it was written.
        """
        backend = opened()
        before = backend.identity()
        backend.put(names.key(), [b"blob"])
        after = backend.identity()
        assert before == after, "asked twice"
        assert before is None or (isinstance(before, str) and before)
        backend = again(backend, opened)
        assert backend.identity() == before, "another instance on the same store"
        opened.close(backend)
        with tempfile.TemporaryDirectory() as folder:
            for other in by_another_path(backend, Path(folder)):
                told = other.identity()
                other.close()
                assert told in (before, None), "an instance on the same store, by a symbolic link"

    @needs("hold")
    def test_B28_one_at_a_time_has_a_right(self, names: Namespace, opened: Open) -> None:
        """One of two instances is told True by `hold`, each time, until it is closed; the other one never waits.

        The right belongs to the instance, whatever thread asks. Its record in the store is not a blob: it is not
        listed, and no key reads it.

        Why: only one of the processes that share a store evicts.

        Usually: a lock that belongs to the process, so that two instances in it both have it, or to the thread that
        asked; a lock that waits, or refuses its own holder; a right that is not given back; or a lock file among the
        blobs' files.
        """
        first, right = opened(), f"kit-{names.fingerprint[:8]}"
        if not type(first).shared:
            assert (first.hold(right), first.hold(right)) == (True, True), "nobody else can have opened the store"
            return
        second, told = opened(), []
        other = f"{right}-2"
        together(lambda: told.append((first.hold(right), second.hold(right), first.hold(right))), seconds=10)
        assert told == [(True, False, True)]
        assert (first.hold(right), second.hold(right)) == (True, False), "asked on another thread than it was got on"
        assert second.hold(other) is True and first.hold(other) is False, "another right"
        assert not second.contains(right) and second.get(right) is None, "a blob by the name of the right"
        assert [entry.key for entry in second.scan() if right in entry.key] == [], "listed as blobs"
        opened.close(first)
        assert second.hold(right) is True, "after its holder was closed"

    def test_B30_a_store_that_takes_blobs_says_so(self, names: Namespace, opened: Open) -> None:
        """`check_writable` raises nothing where `put` works, changes no blob and leaves none behind.

        Why: it decides whether an engine starts.

        Usually: it does something that needs more rights than a put, fails because of its own file from last time, or
        puts a blob and does not delete it.
        """
        backend, keys = opened(), names.keys(4)
        before = _foreign(backend)
        backend.check_writable()
        for key in keys:
            backend.put(key, [key.encode()])
        listed = sorted((entry.key, entry.modified) for entry in backend.scan(names.prefix))
        backend.check_writable()
        assert sorted((entry.key, entry.modified) for entry in backend.scan(names.prefix)) == listed
        backend = again(backend, opened)
        backend.check_writable()
        assert [content(backend.get(key)) for key in keys] == [key.encode() for key in keys]
        assert _foreign(backend) <= before, "blobs that nobody put"

    def test_B31_closing_gives_everything_back(self, names: Namespace, opened: Open, make: Make) -> None:
        """Opening, using and closing an instance many times leaves no thread and no open file behind.

        Every method is used, also on keys without a blob, and with a caller that raises.

        Why: engines are opened and closed in one process for weeks.

        Usually: threads that are never stopped, connections of other threads, a pool that is not closed.
        """

        def use() -> None:
            backend = make()
            try:
                together(partial(_use, backend, names), lambda: backend.contains(names.key()))
            finally:
                backend.close()

        more = _more_after(use)
        assert all(number < SLACK for number in more.values()), f"after opening it {OPENINGS} times, in excess: {more}"

    def test_B39_using_it_long_takes_no_more(self, names: Namespace, opened: Open) -> None:
        """Repeating the same calls on one instance does not increase its threads and open files.

        Each repetition uses another thread, and includes missing keys and a caller that raises.

        Why: an engine is open for weeks, in a process that may have a thousand files open.

        Usually: a file that is not closed if a range ends too early or `reserve` raises, an abandoned listing, or a
        table with a connection for each thread that is never cleared.
        """
        backend = opened()
        more = _more_after(lambda: together(partial(_use, backend, names)))
        assert all(number < SLACK for number in more.values()), f"after using it {OPENINGS} times, in excess: {more}"

    def test_B40_what_it_claims_can_be_used(self, opened: Open) -> None:
        """`persistent`, `shared` and `bounded` are True or False, and `threads` is a number from 1.

        Why: the core tests their truth, and starts `threads` threads: with 0, every read waits for its deadline.

        Usually: a word such as "no", which is true; or 0 threads to mean sequential reads.
        """
        backend = opened()
        for claim in ("persistent", "shared", "bounded"):
            assert isinstance(getattr(backend, claim), bool), f"{claim} is {getattr(backend, claim)!r}"
        threads = backend.threads
        assert isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1, f"threads is {threads!r}"

    def test_B42_the_process_is_left_as_it_is(self, names: Namespace, make: Make) -> None:
        """Opening an instance, using every method and closing it do not change the state of the process: logging,
        handlers and masks of signals, the working directory, the umask, the locale, limits, random numbers, torch's
        settings. This includes temporary changes that other threads would notice.

        Why: it runs inside a server, whose other parts rely on that state.

        Usually: `logging.basicConfig` in the constructor, a umask that is set while the store's files are made, and
        also affects other threads' files, or `os.chdir` into the store.
        """
        with left_as_it_is():
            backend = make()
            try:
                backend.check_writable()
                _use(backend, names)
            finally:
                backend.close()


def _foreign(backend: StorageBackend) -> set[str]:
    """The keys in the store without a model's fingerprint that are not the core's own record.

    Others may be using the store; a probe's files have no such names.
    """
    return {entry.key for entry in backend.scan() if not _OF_A_MODEL.match(entry.key)}


def _use(backend: StorageBackend, names: Namespace) -> None:
    """Every verb, where there is something, where there is nothing, and where the caller has had enough."""
    keys, absent, blob = names.keys(4), names.named("absent"), blob_of(5000)
    room = memoryview(bytearray(2000))
    backend.put(keys[0], [blob])
    put_all(backend, ((key, [blob]) for key in keys[1:]))
    backend.put_over(keys[1], [blob], [keys[2], absent])
    for key in (keys[0], absent):
        backend.get(key)
        backend.get_into(key, RecordingSink())
        for offset in (10, 4000, 6000):
            backend.get_range(key, offset, room)
        backend.contains(key)
    with contextlib.suppress(BackendError):
        backend.get_into(keys[0], RecordingSink(refusal=BackendError("no room")))
    with contextlib.suppress(Broken):
        backend.put(keys[3], BreaksHalfWay(blob))
    if claims(backend, "create", StorageBackend):
        backend.create(keys[0], [blob])
    if claims(backend, "hold", StorageBackend):
        backend.hold(f"kit-{names.fingerprint[:8]}")
    next(iter(backend.scan(names.prefix)), None)
    backend.touch_many([*keys, absent])
    backend.get_many([*keys, absent])
    backend.contains_many([*keys, absent])
    backend.delete(keys[0])
    backend.delete_many([*keys, absent])


def _more_after(use: Callable[[], object]) -> dict[str, int]:
    """Growth of open resources between a few uses and many, once the library's own threads have closed theirs."""
    for _ in range(3):
        use()
    before = _held()
    for _ in range(OPENINGS):
        use()
    more: dict[str, int] = {}

    def is_given_back() -> bool:
        more.update({what: number - before[what] for what, number in _held().items()})
        return all(number < SLACK for number in more.values())

    comes_true(is_given_back, _SECONDS)
    return more


def _held() -> dict[str, int]:
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return {"threads": threading.active_count(), "open files": files}
