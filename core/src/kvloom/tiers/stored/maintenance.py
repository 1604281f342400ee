"""Maintenance of a stored tier: eviction, expiry, listings of what others wrote, and the store's times of use."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kvloom.bounded import get_at_most, one_line
from kvloom.contracts.observer import Event
from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, DeadlineExceeded, IncompleteListingError, UnreadableBlobError
from kvloom.runtime import Call, Runtime, Thread
from kvloom.telemetry.events import EventBus
from kvloom.tiers.index.eviction_history import MAX_RECORD_BYTES, RECORD
from kvloom.tiers.index.ledger import Ledger, Victim
from kvloom.tiers.stored.calls import Calls
from kvloom.types import Buffers, ChunkKey, Entry

log = logging.getLogger(__name__)

ROUND_SECONDS = 5.0
"""Seconds between rounds."""
RELIST_SECONDS = 30.0
"""Shortest time between listings of a store that others write to; slow listings are made less often."""
TELL_SECONDS = 60.0
"""Seconds between updates of the times of last use in a store that keeps them."""
RECORD_SECONDS = 60.0
"""Shortest time between writes of the eviction record."""
EVICT = "evict"
"""The right that one of the processes on a shared store has."""

_MOST_OWED = 4096
"""Most owed deletes that are kept; nothing else knows of these blobs."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Maintenance:
    """Holds a store to its bounds.

    The bounds are kept by the process that holds the right to evict; where a store is not shared that is this one.
    Until it has the right, and where it has none, the ledger only remembers.
    """

    def __init__(
        self, name: str, backend: StorageBackend, ledger: Ledger, calls: Calls, events: EventBus, runtime: Runtime, *,
        bounded: bool, on_evicted: Callable[[Iterable[ChunkKey]], None] = lambda keys: None,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """bounded: there is a bound (capacity, quota or time) that kvloom is to keep. on_evicted: told of what went for
        want of room. on_round: called in each round, on the tier's thread. Raises RuntimeError without a thread."""
        self.name = name
        self._backend = backend
        self._ledger = ledger
        self._calls = calls
        self._events = events
        self._runtime = runtime
        self._bounded = bounded
        self._on_evicted = on_evicted
        self._on_round = on_round
        self._lists = bounded and (backend.persistent or backend.shared)
        self._listed = False
        self._changed = runtime.condition()
        self._round: Call[None] | None = None
        self._list_at = 0.0
        self._alive_at = runtime.now()
        self._closed = False
        self.owed: dict[ChunkKey, None] = {}
        """Removed chunks whose blobs are still to be deleted, in order: they are not there for anybody."""
        self._keeps_time = False
        self._thread: Thread | None = None
        self._record_at = 0.0
        self._restored = False
        self.unlisted = ""
        """Why the last listing does not account for all that the store holds; empty if it does."""
        self.shut_out = ""
        """Why this process cannot ask for the right to evict; empty if it can, or another has it."""
        self.evicts = bounded and not backend.shared
        """This process deletes what is over a bound."""
        ledger.complete = not (backend.persistent or backend.shared)
        works = bounded or backend.persistent or backend.shared
        if works:
            self._keep_on()  # before anything is asked of the backend: whoever made it closes it if this raises
        if bounded and backend.shared:
            self.evicts = self._elected()
        ledger.enforced = self.evicts
        if works:
            # A listing runs as a call like any other, but unhurried and with nobody waiting.
            self._begin_round()

    def close(self) -> None:
        """Begin no round any more; `finish` waits for the one under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def finish(self) -> None:
        """After `close`, once nothing is written any more: leave behind what went.

        Waits a deadline at most for a round under way, and one for the record. A round that went on while the backend
        is closed could take the right to evict again, and keep it for as long as the process lives.
        """
        if self._thread is not None:
            self._thread.join(self._calls.deadline)
        if self._round is None:
            return
        try:
            self._calls.chore("record", self._keep_last_record, seconds=self._calls.deadline).result()
        except DeadlineExceeded as error:
            self._calls.report("record", error)
        except Exception:  # told of where it was raised
            return

    # -- making room ---------------------------------------------------------------------------------------------------

    def put(self, key: ChunkKey, blob: Buffers, victims: Sequence[Victim]) -> None:
        """Write a blob that the ledger has admitted, in the place of `victims`.

        Raises what the backend raises; then those of `victims` that are still there count again.
        """
        if not victims:
            self._backend.put(str(key), blob)
            return
        try:
            self._backend.put_over(str(key), blob, [str(victim.key) for victim in victims])
        except BaseException:
            self._sort_out(victims)
            raise
        self._gone(victims)

    def trim(self, victims: Sequence[Victim]) -> None:
        """After a write: delete what is too much now. That the blob was written stands, whatever becomes of it."""
        try:
            self.delete(victims)
        except Exception as error:
            self._calls.report("delete", error)

    def make_room(self, error: Exception, nbytes: int) -> bool:
        """After a write failed: whether the store was full and something could be deleted."""
        if not (isinstance(error, OSError) and error.errno in _FULL and self.evicts):
            return False
        victims = self._ledger.release(2 * nbytes)
        self.delete(victims)
        return bool(victims)

    def delete(self, victims: Sequence[Victim]) -> None:
        """Delete blobs that the ledger has let go.

        Raises what the backend raises; then those that are still there count again.
        """
        if not victims:
            return
        try:
            self._backend.delete_many([str(victim.key) for victim in victims])
        except BaseException:
            self._sort_out(victims)
            raise
        self._gone(victims)

    def still_there(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """After a call that raised: what counts is what the store says; if it says nothing, the worse is assumed."""
        try:
            return list(self._backend.contains_many([str(key) for key in keys]))
        except Exception:
            return [True] * len(keys)

    # -- what could not be taken back ----------------------------------------------------------------------------------

    def owes(self, key: ChunkKey) -> None:
        """A blob was removed while it was being written, and could not be deleted afterwards: it is tried again."""
        self.owed[key] = None
        if len(self.owed) > _MOST_OWED:
            for oldest in tuple(self.owed)[:-_MOST_OWED]:  # other threads add and take away meanwhile
                self.owed.pop(oldest, None)
        try:
            self._keep_on()
        except RuntimeError as error:  # the machine has no more threads; the next one asks again
            self._calls.report("upkeep", error)

    def owes_no_more(self, key: ChunkKey) -> None:
        """It is gone, or was written again and not removed since."""
        self.owed.pop(key, None)

    def _pay(self) -> None:
        owed = tuple(self.owed)
        try:
            self.delete(self._ledger.withdraw(owed))
        except Exception as error:
            self._calls.report("delete", error)
        for key, known in zip(owed, self._ledger.known(owed), strict=True):
            if known is None:
                self.owes_no_more(key)

    def _sort_out(self, victims: Sequence[Victim]) -> None:
        there = self.still_there([victim.key for victim in victims])
        self._ledger.kept([victim for victim, here in zip(victims, there, strict=True) if here])
        self._gone([victim for victim, here in zip(victims, there, strict=True) if not here])

    def _gone(self, victims: Sequence[Victim]) -> None:
        self._ledger.deleted(victims)
        self._events.left(self.name, [victim.key for victim in victims])
        self._on_evicted(victim.key for victim in victims if victim.reason in ("capacity", "quota"))
        for reason in dict.fromkeys(victim.reason for victim in victims):
            sizes = [victim.bytes for victim in victims if victim.reason == reason]
            self._ledger.evictions.note([one.key.digest for one in victims if one.reason == reason], reason)
            self._events.emit(Event("evicted", self.name, chunks=len(sizes), bytes=sum(sizes), reason=reason))

    def _elected(self) -> bool:
        """Return whether this process may evict from the start; waits a deadline at most."""
        try:
            return self._calls.chore("hold", lambda: self._backend.hold(EVICT), seconds=self._calls.deadline).result()
        except Exception:  # told of already, if it did not hang; the rounds go on asking
            return False

    def _ask_to_evict(self) -> bool:
        try:
            held = self._backend.hold(EVICT)
        except Exception as error:
            said = f"cannot get the right to evict: {one_line(error)}"
            if said != self.shut_out:
                self._calls.report("hold", error)
            self.shut_out = said
            if self.evicts:
                raise
            return False  # the rest of the round is for who does not evict, too
        self.shut_out = ""
        return held

    # -- now and then --------------------------------------------------------------------------------------------------

    def _keep_on(self) -> None:
        with self._changed:
            begun, self._keeps_time = self._keeps_time, True
        if begun:
            return
        try:
            self._thread = self._runtime.spawn(self._keep_time, name=f"kvloom-{self.name}-upkeep")
        except RuntimeError:
            self._keeps_time = False
            raise

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(ROUND_SECONDS * (0.8 + 0.4 * self._runtime.random()))
                if self._closed:
                    return
            if self.hangs:
                self._calls.report("upkeep", DeadlineExceeded("no progress for longer than the deadline"))
            elif not self._calls.paused:
                self._begin_round()

    @property
    def hangs(self) -> bool:
        """A round of upkeep has got nothing from the store for longer than a deadline."""
        current = self._round
        busy = current is not None and current.running
        return busy and self._runtime.now() - self._alive_at > self._calls.deadline

    def _begin_round(self) -> None:
        if self._round is not None and not self._round.done:
            return
        self._alive_at = self._runtime.now()
        try:
            self._round = self._calls.chore("upkeep", self._tidy)
        except BackendError as error:
            self._calls.report("upkeep", error)

    def _tidy(self) -> None:
        if self._closed:
            return
        if self._bounded and self._backend.shared:
            # Asked again by who has it, too: the right goes with the directory if that is removed.
            held = self._ask_to_evict()
            if held != self.evicts:
                log.info("tier=%s this process %s", self.name, "evicts" if held else "does not evict any more")
                self._list_at = 0.0  # what its predecessor has deleted is not there
            self.evicts = self._ledger.enforced = held
        if self._lists and self._runtime.now() >= self._list_at:
            self._list()  # who does not evict learns what was
        self._alive_at = self._runtime.now()
        while not self._closed and (victims := self._ledger.expire()):
            if self.evicts:
                self.delete(victims)
            else:
                self._ledger.deleted(victims)
        self._on_round()
        if self.owed:
            self._pay()
        self._calls.try_writing()
        used = self._ledger.unsaid(TELL_SECONDS, 1024)
        if used:
            self._backend.touch_many([str(key) for key in used])
        self._keep_record()

    def _keep_record(self) -> None:
        if not self.evicts:
            self._restored = False  # whoever does writes it: it is read anew when the right comes
            return
        if not (self._backend.persistent or self._backend.shared):
            return
        if not self._restored:
            with suppress(CorruptBlobError, UnreadableBlobError):  # something else lies there: it is written over
                record = get_at_most(self._backend, RECORD, MAX_RECORD_BYTES)
                if record is not None:
                    self._ledger.evictions.restore(bytes(record))
            self._restored = True
        if self._ledger.evictions.news and self._runtime.now() >= self._record_at:
            self._record_at = self._runtime.now() + RECORD_SECONDS
            self._backend.put(RECORD, [self._ledger.evictions.record()])

    def _keep_last_record(self) -> None:
        if self.evicts and self._ledger.evictions.news:
            self._record_at = 0.0
            self._keep_record()

    def _list(self) -> None:
        began = self._runtime.now()
        missed: list[str] = []
        try:
            victims = self._ledger.recover(self._entries(missed))
        except Exception as error:
            if not self._listed and not self._closed:  # else there is an account to go by
                self._say_unlisted(f"the store could not be listed: {one_line(error)}")
            raise
        self._listed = True
        if missed:
            self._ledger.complete = False  # what is not known may be there
        self._say_unlisted(missed[0] if missed else "")
        took = self._runtime.now() - began
        again = self._backend.shared or missed
        self._list_at = began + max(RELIST_SECONDS, 20 * took) if again else float("inf")
        while victims:
            some, victims = victims[:256], victims[256:]
            self._alive_at = self._runtime.now()
            try:
                self.delete(some)
            except BaseException:
                self._ledger.kept(victims)
                raise

    def _say_unlisted(self, why: str) -> None:
        if why != self.unlisted:
            log.warning("tier=%s %s", self.name, f"is degraded: {why}" if why else "is whole again")
        self.unlisted = why

    def _entries(self, missed: list[str]) -> Iterator[Entry]:
        """The listing; `missed` gets what it says of places that it could not read."""
        try:
            for entry in self._backend.scan():
                self._alive_at = self._runtime.now()
                if self._closed:
                    raise BackendError("closed while the store was being listed")
                yield entry
        except IncompleteListingError as error:
            missed.append(f"not all of the store could be listed: {one_line(error)}")
