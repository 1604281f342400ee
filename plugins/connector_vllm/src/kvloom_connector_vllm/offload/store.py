"""Keys to slots to tiers, for vLLM's own offloading: every hit has been verified, and stays.

vLLM cannot handle a failed load. So a chunk is a hit only once its bytes are in a slot, all verified.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..staging import Held, Slots, Staging
from .copy import Order
from .tiers import CLOSING_SECONDS, Asking, Found, Pace, Tiers

log = logging.getLogger(__name__)

_PIECES = 32
"""Number of chunks per request to the tiers: the first ones can be used while the next ones arrive."""


class OffloadStore:
    """The store that vLLM's scheduler asks. Its calls only look into tables; the tiers are asked in the background.
    Only `end_step` waits, for milliseconds, if steps follow each other faster than that.

    rows: the file of each rank. group: returns the engine's group of layers that a key belongs to. patience: maximum
    seconds that a request waits for KV that the tiers report.
    """

    def __init__(
        self, tiers: Tiers, rows: Sequence[Staging], *, group: Callable[[bytes], int] = lambda key: 0,
        patience: float = 10.0, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._tiers, self._ranks, self._rows = tiers, rows, [rank.data for rank in rows]
        self._nonces = tuple(rank.nonce for rank in rows)
        self._group, self._patience, self._now = group, patience, now
        self._lock = threading.Lock()
        self._slots = Slots(min(rank.slots for rank in rows))
        self._requests: dict[str, Asking] = {}
        self._questions: list[tuple[Asking, bytes]] = []
        self._wanted: list[tuple[Asking, Held]] = []
        self._lost: list[Held] = []
        self._counts: Counter[str] = Counter()
        self._reading: set[Future[None]] = set()
        self._pace = Pace(now)
        self._ticket = 0
        self._clearing = 0
        self._reads = ThreadPoolExecutor(2, "kvloom-offload-read")
        self._writes = ThreadPoolExecutor(1, "kvloom-offload-write")
        self._give_up = float("inf")
        self._closed = False

    # -- loading -------------------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, request: str) -> Found:
        """Look up a key for loading. A hit holds until `end_step`."""
        with self._lock:
            held = self._slots.get(key)
            if held is not None and held.ready:
                self._slots.promise(held)
                self._counts["hit"] += 1
                return Found.HIT
            if self._closed or self._clearing:
                return Found.MISS
            found = self._waiting(self._requests.setdefault(request, Asking()), key, held)
            self._counts["miss"] += found is Found.MISS
            return found

    def _waiting(self, request: Asking, key: bytes, held: Held | None) -> Found:
        answer = request.answers.get(key)
        if answer is False:
            return Found.MISS
        if request.waited(self._now()) > self._patience:
            self._counts["late"] += 1
            return Found.MISS
        if held is not None:
            return Found.COMING
        if answer is None:
            if key not in request.answers:
                request.answers[key] = None
                self._questions.append((request, key))
            return Found.ASKED
        held = self._slots.take(key)
        if held is None:
            request.answers[key] = False
            self._counts["no slot"] += 1
            return Found.MISS
        self._wanted.append((request, held))
        return Found.COMING

    def prepare_load(self, keys: Sequence[bytes]) -> Order:
        """The slots from which the workers load until `complete_load`. RuntimeError unless all were
        hits in this step."""
        with self._lock:
            found = [self._slots.get(key) for key in keys]
            if not all(held is not None and held.ready for held in found):
                raise RuntimeError("vLLM loads chunks that were not reported as hits")
            self._ticket += 1
            for held in found:
                assert held is not None
                self._slots.pin(held)
                held.jobs += 1
                held.ticket = self._ticket
            return self._order([held for held in found if held is not None])

    def complete_load(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for held in filter(None, map(self._slots.get, keys)):
                if held.jobs and held.ready:
                    held.jobs -= 1
                    self._slots.unpin(held)

    def end_step(self) -> None:
        """Finish the planning of the engine's step: fetch the chunks that it asked for, and end its hits."""
        with self._lock:
            self._slots.step += 1
            self._find_lost()
            questions, self._questions = self._questions, []
            wanted, self._wanted = self._wanted, []
            if self._closed:
                return
            under_way = set(self._reading)
            if questions:
                under_way.add(self._reads.submit(self._ask, questions))
            for begin in range(0, len(wanted), _PIECES):
                under_way.add(self._reads.submit(self._fetch, wanted[begin : begin + _PIECES]))
        self._pace(under_way)
        self._reading = {one for one in under_way if not one.done()}

    def end_request(self, request: str) -> None:
        with self._lock:
            self._requests.pop(request, None)

    def _ask(self, questions: Sequence[tuple[Asking, bytes]]) -> None:
        found = self._tiers.find([key for _, key in questions])
        with self._lock:
            for (request, key), here in zip(questions, found, strict=True):
                request.answers[key] = here

    def _fetch(self, wanted: Sequence[tuple[Asking, Held]]) -> None:
        slots = [held.slot for _, held in wanted]
        loaded = self._tiers.load([held.key for _, held in wanted], rows=self._rows, slots=slots)
        with self._lock:
            for (request, held), here in zip(wanted, loaded, strict=True):
                held.ready = here and not held.dropped
                if not here:
                    request.answers[held.key] = False
                self._counts["loaded" if here else "not loaded"] += 1
                self._slots.unpin(held)

    # -- storing -------------------------------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Sequence[bytes], position: Callable[[bytes], int] = lambda key: 0
    ) -> tuple[list[bytes], Order] | None:
        """Those that have no slot yet, in their order, and slots for them; None if not one can be had.

        position: where in the sequence a key is; if there are few slots, the head of the sequence gets them.
        """
        with self._lock:
            self._find_lost()
            missing = [key for key in dict.fromkeys(keys) if self._slots.get(key) is None]
            if self._closed or self._clearing:
                missing = []
            self._ticket += 1
            taken: dict[bytes, Held] = {}
            for key in sorted(missing, key=position):
                held = self._slots.take(key)
                if held is None:
                    self._counts["no slot"] += 1
                    break
                held.jobs, held.ticket = 1, self._ticket
                taken[key] = held
            if missing and not taken:
                return None
            accepted = [taken[key] for key in missing if key in taken]
            return [held.key for held in accepted], self._order(accepted)

    def complete_store(self, keys: Sequence[bytes], *, success: bool = True) -> None:
        """Keep what every rank says it has copied. It is a hit from here on."""
        with self._lock:
            kept = []
            for held in filter(None, map(self._slots.get, keys)):
                if held.ready or not held.jobs:
                    continue
                held.jobs -= 1
                if success and all(int(rank.stamps[held.slot]) == held.ticket for rank in self._ranks):
                    held.ready = True
                    kept.append(held)
                else:
                    self._counts["not stored"] += 1
                    self._slots.unpin(held)
            if kept and not self._closed:
                self._writes.submit(self._keep, kept)

    def _keep(self, some: Sequence[Held]) -> None:
        saved = False
        if self._now() < self._give_up:
            saved = self._tiers.save([held.key for held in some], rows=self._rows, slots=[held.slot for held in some])
        with self._lock:
            self._counts["stored" if saved else "not stored"] += len(some)
            for held in some:
                self._slots.unpin(held)

    # -- both ----------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every slot, and delete all KV of the model from the tiers behind this; until then nothing is a hit.

        Slots that a worker may still be copying are left alone until it has stamped them: vLLM does not say so.
        """
        with self._lock:
            self._requests.clear()
            self._questions.clear()
            for held in self._slots.all():
                self._slots.drop(held)
                if held.jobs:
                    held.pins -= held.jobs - 1
                    held.jobs = 0
                    self._lost.append(held)
            wanted, self._wanted = self._wanted, []
            for _, held in wanted:
                self._slots.unpin(held)
            if not self._closed:
                self._clearing += 1
                self._writes.submit(self._clear, self._clearing)

    def _clear(self, number: int) -> None:
        if not self._tiers.clear():
            log.warning("not all KV could be deleted: nothing is loaded any more until it is; reset the cache again")
            return
        with self._lock:
            if number == self._clearing:  # else it was reset again
                self._clearing = 0

    def _order(self, some: Sequence[Held]) -> Order:
        slots, groups = tuple(held.slot for held in some), tuple(self._group(held.key) for held in some)
        return Order(self._ticket, slots, groups, self._nonces)

    def _find_lost(self) -> None:
        def over(held: Held) -> bool:
            return all(abs(int(rank.stamps[held.slot])) >= held.ticket for rank in self._ranks)

        for held in [held for held in self._lost if over(held)]:
            self._lost.remove(held)
            self._slots.unpin(held)

    def counts(self) -> Mapping[str, int]:
        """Keys by what became of them: `hit`, `miss`, `late`, `no slot`, `loaded`, `stored`, ..."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Write accepted chunks, within half a minute, and release slots and tiers. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._give_up = self._now() + CLOSING_SECONDS
        self._reads.shutdown(cancel_futures=True)
        self._writes.shutdown()
        self._tiers.close()
        for rank in self._ranks:
            rank.unlink()
