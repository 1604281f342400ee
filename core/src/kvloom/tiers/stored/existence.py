"""Existence of chunks in a stored tier, known or asked: forecasts for reading, and chunks that need no writing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count

from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, DeadlineExceeded, LaterVersionError, UnreadableBlobError
from kvloom.format import envelope
from kvloom.format.encryption import Protection
from kvloom.memory import pages_of
from kvloom.runtime import Call
from kvloom.tiers.index.existence_cache import ExistenceCache
from kvloom.tiers.index.ledger import Fidelity, Ledger
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.calls import Calls
from kvloom.types import ChunkKey


def chains(keys: Sequence[ChunkKey]) -> list[Sequence[ChunkKey]]:
    """The keys in order, in pieces along each of which depths grow."""
    starts = [
        place
        for place, key in enumerate(keys)
        if not place or key.namespace != keys[place - 1].namespace or key.depth <= keys[place - 1].depth
    ]
    return [keys[start:stop] for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True)]


class Question:
    """A question to a tier about some keys: one answer for each, in their order."""

    __slots__ = ("_answer", "_call")

    def __init__(self, answer: Callable[[float], list[bool]], call: Call[list[bool]] | None = None) -> None:
        """answer: takes the seconds that it may wait at most. call: what it waits for."""
        self._answer = answer
        self._call = call

    @property
    def done(self) -> bool:
        """`answer` does not wait."""
        return self._call is None or self._call.done

    def answer(self, seconds: float = math.inf) -> list[bool]:
        """Waits as long as the operation does, and no longer than `seconds`; all False if the tier does not say."""
        return self._answer(seconds)

    def cancel(self) -> None:
        """Nobody wants the answer."""
        if self._call is not None:
            self._call.cancel()


class Inquiry:
    """A question to a store that is under way: which of some keys need not be written."""

    def __init__(
        self, known: Callable[[Sequence[ChunkKey]], list[bool]], asked: Collection[ChunkKey],
        call: Call[set[ChunkKey]] | None, calls: Calls, context: RequestContext,
    ) -> None:  # fmt: skip
        """known: as `Existence.known_enough`. asked: what the store has to say something about. call: returns those of
        them about which the store only raised; None if it could not be asked."""
        self._known = known
        self._asked = asked
        self._call = call
        self._calls = calls
        self._context = context
        self._told = count()

    @property
    def done(self) -> bool:
        """There is nothing to wait for."""
        return self._call is None or self._call.done

    def concerns(self, key: ChunkKey) -> bool:
        """Return whether the answer is still to come and covers `key`."""
        return not self.done and key in self._asked

    def wait(self, until: float) -> None:
        """Wait until there is an answer, but not beyond `until`, nor for a caller who has given up."""
        if self._call is not None:
            self._calls.wait(self._call, self._context, until)

    def enough_of(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each key whether it need not be written, as far as is known; True if the store gave no answer."""
        if self.done and self._asked:
            silent = None if self._call is None else self._call.peek()
            if silent is None:
                self._context.lost.add(self._calls.name)
                return [True] * len(keys)
            return [here or key in silent for here, key in zip(self._known(keys), keys, strict=True)]
        return [here and not self.concerns(key) for here, key in zip(self._known(keys), keys, strict=True)]

    def enough(self, key: ChunkKey) -> bool:
        """Wait for the answer: whether `key` need not be written. Raises BackendError if none comes in time."""
        call = self._call
        if call is not None and not call.wait():
            if not next(self._told):
                late = DeadlineExceeded("no answer within the deadline")
                self._calls.late("contains", late, call, self._calls.reading)
            call.cancel()
        silent = None if call is None else call.peek()
        if silent is None:
            raise BackendError("the store does not say whether it has the chunk")
        return key in silent or self._known([key])[0]


class Existence:
    """Answers from the ledger, and asks the store where the ledger cannot know."""

    def __init__(
        self, backend: StorageBackend, ledger: Ledger, calls: Calls, *, lossless: bool, exact_only: bool,
        expired: Callable[[envelope.Header], bool], ttl: bool, protection: Protection | None = None,
        remembered: ExistenceCache | None = None, doomed: Callable[[], Collection[ChunkKey]] = tuple,
        sized: bool = False,
    ) -> None:  # fmt: skip
        """lossless: what would be written is exact. exact_only: what is lossy cannot be used. ttl: blobs may expire.
        doomed: what may be there now and will be deleted at once. sized: the sizes of blobs count against a bound."""
        self._sized = sized
        self._backend = backend
        self._ledger = ledger
        self._calls = calls
        self._lossless = lossless
        # A tuple: to look into a set would be to hash, which an enum does in Python.
        self._usable = (Fidelity.EXACT, Fidelity.UNKNOWN) + (() if exact_only else (Fidelity.LOSSY,))
        self._expired = expired
        self._ttl = ttl
        self._protection = protection
        self._remembered = remembered or ExistenceCache(0.0, lambda: 0.0)
        self.doomed = doomed

    def find(self, keys: Sequence[ChunkKey], context: RequestContext) -> list[bool]:
        """Return which keys the tier should hold in a form that this engine can use; none while it is paused."""
        return self.seek(keys, context).answer()

    def seek(self, keys: Sequence[ChunkKey], context: RequestContext) -> Question:
        """Begin `find`: what the store has to be asked is asked on a thread of the tier's."""
        if not self._calls.serves(context):
            return Question(lambda seconds: [False] * len(keys))
        known, doubtful = self._ledger.known(keys), self._doubtful(keys)
        unknown: set[ChunkKey] = set()
        if self._may_hold_more:
            unknown = {key for key, fidelity in zip(keys, known, strict=True) if fidelity is None}
        undated: set[ChunkKey] = set()
        if self._ttl and self._ledger.undated:  # a header says when
            undated = {key for key, fidelity in zip(keys, known, strict=True) if fidelity is Fidelity.UNKNOWN}
        said = self._remembered.get([*unknown]) if unknown else {}

        def found() -> list[bool]:
            doomed = self.doomed()
            return [
                said.get(key, True) and (key in unknown or fidelity in self._usable) and key not in doomed
                for key, fidelity in zip(keys, known, strict=True)
            ]

        asked = [key for key in keys if key in doubtful or key in undated or (key in unknown and key not in said)]
        if not asked:
            return Question(lambda seconds: found())
        call = self._calls.begin("contains", lambda: self._there(asked, doubtful, undated), context)

        def learnt(seconds: float) -> list[bool]:
            there = None if call is None else self._calls.answer("contains", call, context, seconds=seconds)
            if there is None:
                return [False] * len(keys)
            said.update(zip(asked, there, strict=True))
            self._remembered.put([key for key in asked if key in unknown], said)
            return found()

        return Question(learnt, call)

    def may_hold(self, key: ChunkKey) -> bool:
        """Return whether it is worth reading a key, as far as is known here and now: nothing is asked of the store."""
        known = self._ledger.known([key])[0]
        if known is None:
            return self._may_hold_more and self._remembered.get([key]).get(key, True)
        return known in self._usable

    @property
    def _may_hold_more(self) -> bool:
        """The store may have what the ledger does not know of."""
        return self._backend.shared or not self._ledger.complete

    def doubt(self) -> None:
        """The store has failed, or is back: nothing that it said before counts."""
        self._remembered.clear()
        if self._ledger.freshness is not None:
            self._ledger.freshness.doubt()

    def _doubtful(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Return the keys to ask the store about again, though they are believed to be there."""
        if self._ledger.freshness is None:
            return set()
        return {key for key, doubt in zip(keys, self._ledger.freshness.doubtful(keys), strict=True) if doubt}

    def inquire(
        self, keys: Sequence[ChunkKey], context: RequestContext, *, ignore: Callable[[ChunkKey], bool]
    ) -> Inquiry:
        """Begin to find out for which keys there is nothing better to be written, or no telling.

        A lossless tier does not have enough of a lossy or unreadable blob; what a blob is, is read from its header
        once. ignore: what nothing need be asked about.
        """
        unsure = [key for key in self._unsure(keys) if not ignore(key)]
        doubtful = self._doubtful(keys).difference(unsure)

        def look() -> set[ChunkKey]:
            if doubtful:
                self._look_again([key for key in keys if key in doubtful])
            return self._peek(unsure) if unsure else set()

        asked = doubtful.union(unsure)
        call = self._calls.begin("contains", look, context) if asked else None
        return Inquiry(self.known_enough, asked, call, self._calls, context)

    def known_enough(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each key whether nothing better is to be written, as far as the ledger knows. Asks no store."""
        known = self._ledger.known(keys)
        if self._lossless:
            return [fidelity is Fidelity.EXACT or fidelity is Fidelity.LATER for fidelity in known]
        return [fidelity is Fidelity.LATER or fidelity in self._usable for fidelity in known]

    def header(self, key: ChunkKey) -> envelope.Header | None:
        """The header of a blob, or None if there is no such blob. Raises as `envelope.parse` does. Asks the store."""
        name = str(key)
        page = memoryview(bytearray(envelope.ALIGN_BYTES))
        if not self._backend.get_range(name, 0, page):
            if not self._backend.contains(name):
                return None
            raise CorruptBlobError("the blob is cut short")
        length = envelope.header_bytes(page)
        if length > len(page):
            page = memoryview(bytearray(length))
            if not self._backend.get_range(name, 0, page):
                raise CorruptBlobError("the blob is cut short")
        header = envelope.parse(page, key=name, protection=self._protection)
        if header is not None and self._sized:
            # Else a small blob that says it is large would have everything else evicted.
            end = header.header_bytes + header.payload_bytes
            if not self._backend.get_range(name, end, memoryview(bytearray())):
                raise CorruptBlobError("the blob is cut short")
        return header

    def note(self, key: ChunkKey, header: envelope.Header, *, since: int) -> None:
        """A blob with this header is there. since: the ledger's mark from before it was read."""
        fidelity = Fidelity.EXACT if header.exact else Fidelity.LOSSY
        nbytes = pages_of(header.header_bytes + header.payload_bytes)
        self._ledger.note(key, fidelity, nbytes=nbytes, written=header.description.written or None, since=since)

    def _there(
        self, keys: Sequence[ChunkKey], doubtful: Collection[ChunkKey], undated: Collection[ChunkKey]
    ) -> list[bool]:
        """Return the keys that the store has a blob for. If blobs expire, headers are read: the time of writing is not
        known otherwise."""
        since = self._ledger.mark()
        answers = dict(zip(keys, self._listed(keys), strict=True))
        self._learn({key: answers[key] for key in doubtful}, since=since)
        there = [bool(answers[key]) for key in keys]
        if self._ttl:
            for index, key in enumerate(keys):
                dated = key in doubtful and key not in undated
                there[index] = there[index] and (dated or self._is_fresh(key, note=since if key in undated else None))
        return there

    def _look_again(self, keys: Sequence[ChunkKey]) -> None:
        """Find out whether blobs that the store was last seen to have a while ago are there still."""
        since = self._ledger.mark()
        answers = dict(zip(keys, self._listed(keys), strict=True))
        behind = [key for key, here in answers.items() if here is None]
        if behind:  # to ask about each is less than to write it
            answers.update(zip(behind, self._backend.contains_many([str(key) for key in behind]), strict=True))
        self._learn(answers, since=since)

    def _learn(self, answers: Mapping[ChunkKey, bool | None], *, since: int) -> None:
        """Note the answers of the store about blobs that were believed to be there; None: no answer."""
        assert self._ledger.freshness is not None or not answers
        if self._ledger.freshness is not None:
            self._ledger.freshness.confirm([key for key, here in answers.items() if here])
        for key, here in answers.items():
            if here is False:
                self._ledger.forget_absent(key, since=since)

    def _listed(self, keys: Sequence[ChunkKey]) -> Sequence[bool | None]:
        """Return the keys that the store has a blob for, or is believed to have: see `StorageBackend.one_by_one`. None:
        not asked, because a key before it is missing."""
        if self._backend.one_by_one:
            return [here for chain in chains(keys) for here in self._leading(chain)]
        return list(self._backend.contains_many([str(key) for key in keys]))

    def _leading(self, chain: Sequence[ChunkKey]) -> list[bool | None]:
        """Return the length of the leading part that is there. Heads outlive tails, so a few places are asked."""
        here, gone = 0, len(chain)  # what is before `here` is there; what is from `gone` on is of no use
        absent: set[int] = set()
        while here < gone:
            parts = min(self._backend.threads, gone - here)
            places = [here + (gone - here) * number // parts for number in range(parts)]
            places = sorted({*places[1:], here, gone - 1})
            found = self._backend.contains_many([str(chain[place]) for place in places])
            absent |= {place for place, there in zip(places, found, strict=True) if not there}
            for place, there in zip(places, found, strict=True):
                if not there:
                    gone = place
                    break
                here = place + 1
        return [True] * here + [False if place in absent else None for place in range(here, len(chain))]

    def _is_fresh(self, key: ChunkKey, *, note: int | None) -> bool:
        """note: a mark of the ledger's, for which the header is news."""
        try:
            header = self.header(key)
        except (CorruptBlobError, UnreadableBlobError):
            return False
        if header is not None and note is not None:
            self.note(key, header, since=note)
        return header is not None and not self._expired(header)

    def _unsure(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys whose existence or fidelity has to be asked."""
        may_hold_more = self._backend.shared or (not self._ledger.complete and self._backend.persistent)
        vague: set[Fidelity | None] = {None} if may_hold_more else set()
        if self._lossless:
            vague.add(Fidelity.UNKNOWN)
        return [key for key, found in zip(keys, self._ledger.known(keys), strict=True) if found in vague]

    def _peek(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Learn what the blobs of `keys` are from their headers; those about which the store only raised."""
        silent = set()
        since = self._ledger.mark()
        for key, here in zip(keys, self._listed(keys), strict=True):
            try:
                header = self.header(key) if here else None
            except LaterVersionError:
                self._ledger.note(key, Fidelity.LATER, since=since)
                continue
            except (CorruptBlobError, UnreadableBlobError):
                self._ledger.note(key, Fidelity.UNREADABLE, since=since)
                continue
            except Exception as error:
                self._calls.report("peek", error)
                silent.add(key)
                continue
            if header is None:
                self._ledger.forget_absent(key, since=since)
            else:
                self.note(key, header, since=since)  # its time too: what is past it is there until it is deleted
        return silent
