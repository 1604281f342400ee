"""Opening, closing, and what outlives them."""

from __future__ import annotations

import gc
import os
import threading

from kvloom_testkit.backends.base import BackendRequirements, Make, Open, again, content
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.requirements import needs
from kvloom_testkit.running import together

OPENINGS = 30
SLACK = 10
"""Threads and descriptors that somebody else may have opened meanwhile."""


class LifetimeRequirements(BackendRequirements):
    """Instances."""

    @needs("persistent")
    def test_B21_what_was_put_survives_reopening(self, names: Namespace, opened: Open) -> None:
        """After `close`, a new instance on the same store finds what was put, and not what was deleted.

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
        """What one instance puts or deletes, another that is open already sees with its next call.

        Why: `shared` is claimed; ranks and replicas find each other's KV that way.

        Usually: each keeps a cache, of what there is or of what there is not; or a read transaction stays open.
        """
        first, second, key = opened(), opened(), names.key()
        assert not second.contains(key) and second.get(key) is None
        for writer, reader in ((first, second), (second, first)):
            for blob in (b"one", b"another", b"third"):
                writer.put(key, [blob])
                assert reader.contains(key) and content(reader.get(key)) == blob
            writer.delete(key)
            assert not reader.contains(key) and reader.get(key) is None

    def test_B25_close_may_be_repeated(self, names: Namespace, opened: Open) -> None:
        """`close` works whether or not the instance was used, and once more; other instances go on.

        Why: whatever fails at start closes what was opened, and the engine closes it again.

        Usually: what is closed is not there any more at the second time, was never made, or is everybody's.
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
        backend.close()
        opened.close(backend)

    @needs("identity")
    def test_B27_identity_is_the_stores(self, names: Namespace, opened: Open) -> None:
        """Two instances on the same store give the same text, before and after something was put; or None.

        Why: two tiers on one store would count its bytes twice and evict each other's; they are refused at start.

        Usually: something of the instance (a connection, a time, an id) is in it.
        """
        backend = opened()
        before = backend.identity()
        backend.put(names.key(), [b"blob"])
        after = backend.identity()
        assert before == after, "asked twice"
        assert before is None or (isinstance(before, str) and before)
        assert again(backend, opened).identity() == before, "another instance on the same store"

    @needs("hold")
    def test_B28_one_at_a_time_has_a_right(self, names: Namespace, opened: Open) -> None:
        """Of two instances one is told True by `hold`, again and again, until it is closed; the other never waits.

        Why: of the processes that share a store one evicts.

        Usually: a lock that belongs to the process, so that two instances in it both have it; one that waits; one that
        says no to its own holder; or a right that is not given back.
        """
        first, second, told = opened(), opened(), []
        right, other = f"kit-{names.fingerprint[:8]}", f"kit-{names.fingerprint[:8]}-2"
        together(lambda: told.append((first.hold(right), second.hold(right), first.hold(right))), seconds=10)
        assert told == [(True, False, True)]
        assert second.hold(other) is True and first.hold(other) is False, "another right"
        opened.close(first)
        assert second.hold(right) is True, "after its holder was closed"

    def test_B30_a_store_that_takes_blobs_says_so(self, names: Namespace, opened: Open) -> None:
        """`check_writable` raises nothing where `put` works, and changes nothing.

        Why: it decides whether an engine starts.

        Usually: it tries something that needs more rights than a put does, or trips over what it left last time.
        """
        backend = opened()
        backend.check_writable()
        backend.put(names.key(), [b"blob"])
        backend.check_writable()
        again(backend, opened).check_writable()

    def test_B31_closing_gives_everything_back(self, names: Namespace, opened: Open, make: Make) -> None:
        """Opening, using and closing an instance many times leaves no thread and no open file behind.

        Why: engines are opened and closed in one process for weeks.

        Usually: threads that nobody tells to stop, connections of other threads, a pool that is not closed.
        """

        def use() -> None:
            backend = make()
            try:
                backend.put(names.key(), [b"blob"])
                together(lambda: backend.get(names.key()), lambda: backend.contains(names.key()))
            finally:
                backend.close()

        for _ in range(3):
            use()
        before = _held()
        for _ in range(OPENINGS):
            use()
        more = {what: number - before[what] for what, number in _held().items()}
        assert all(number < SLACK for number in more.values()), f"after opening it {OPENINGS} times, in excess: {more}"


def _held() -> dict[str, int]:
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return {"threads": threading.active_count(), "open files": files}
