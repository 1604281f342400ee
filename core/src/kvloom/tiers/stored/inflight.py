"""Reads under way: all who want one chunk at one time share the calls that read it, and the memory it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvloom.errors import BackendError
from kvloom.memory import Block, Lease
from kvloom.runtime import Batch, Call, Runtime
from kvloom.tiers.invalidation import Invalidations
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.stored.layer_ranges import LayerBuffer, LayeredBlob
from kvloom.tiers.tier import Layout, Loaded
from kvloom.types import Chunk, ChunkKey

Arrived = tuple[LayeredBlob | None, int]
"""The layout of a blob's layers, and how many of those that were asked for are right."""
ReadLayers = Callable[[ChunkKey, LayeredBlob | None, LayerBuffer, int, range], Arrived | None]
"""`Loads.read_layers`."""


class Wanted(NamedTuple):
    """A chunk that is to be read whole."""

    key: ChunkKey
    shape: tuple[int, ...]
    num_tokens: int


ReadWhole = Callable[["Sequence[InflightRead]", "Callable[[int], bool]", "Callable[[int, Loaded | None], None]"], None]
"""A function that reads chunks whole, on the tier's thread: `Loads._load`.

Its arguments: the chunks; a function that returns whether anybody still waits for chunk number n; a function to be
told, once for each number, of the chunk in memory, or of None if it cannot be had. If it raises, the others failed."""


class Piece:
    """A call that reads some layers of a chunk; more than one group of them, if somebody wants the whole chunk."""

    __slots__ = ("call", "layers")

    def __init__(self, call: Call[Arrived | None], layers: range) -> None:
        self.call = call
        self.layers = layers

    def right(self, group: range) -> int:
        """Once it is done: how many layers of `group`, from the first on, are right."""
        arrived = self.call.peek()
        right = 0 if arrived is None else arrived[1]
        return max(0, min(len(group), right - (group.start - self.layers.start)))


class InflightRead:
    """A chunk that is being read: whole, by one call, or put together by layers in `place`.

    By layers, each group is asked for once, by whoever wants it first; what has come stays for the others. Whoever has
    a share gives it to `InflightReads.leave`, once.
    """

    __slots__ = (
        "began", "blob", "call", "device", "failed", "groups", "home", "hurried", "key", "lease", "pieces", "place",
        "shares", "since", "starved", "wanted",
    )  # fmt: skip

    def __init__(
        self, home: InflightReads, wanted: Wanted, context: RequestContext, *, groups: Sequence[range] = (),
        place: LayerBuffer | None = None,
    ) -> None:  # fmt: skip
        self.home = home
        self.wanted = wanted
        self.key = wanted.key
        self.since = context.since
        """A mark of the removals from before anything of it was read."""
        self.device = context.device
        """The chunk may come to be in its memory: only for those who take it there."""
        self.shares = 1
        self.call: Call[Loaded | None] | None = None
        """Reads it whole."""
        self.failed = False
        """The read raised: those who waited do not ask the tier again."""
        self.starved = False
        """The read waits for memory: a request that holds memory should not wait for it."""
        self.groups = groups
        self.place = place
        self.pieces: dict[int, Piece] = {}
        """By the first layer of each group. A piece is never asked for again: its call may still write to its place."""
        self.blob: LayeredBlob | None = None
        """Known once the first layers are there."""
        self.hurried = False
        """Somebody waits for all of it."""
        self.began = 0.0
        self.lease: Lease | None = None
        """A lease of its memory, once it is complete."""

    @property
    def calls(self) -> list[Call[Any]]:
        """The calls so far. Where the rest is still to be asked for, the last asks for it before it is done."""
        pieces = [piece.call for piece in tuple(self.pieces.values())]
        return pieces if self.call is None else [self.call]


class Read:
    """The share of one who wants the whole chunk. Give it to `Loads.collect` or `Loads.give_up`, once."""

    __slots__ = ("context", "inflight")

    def __init__(self, inflight: InflightRead, context: RequestContext) -> None:
        self.inflight = inflight
        self.context = context

    @property
    def done(self) -> bool:
        """There is nothing to wait for."""
        call = self.inflight.call
        return call.done if call is not None else all(each.done for each in self.inflight.calls)

    @property
    def came(self) -> bool:
        """There is nothing to wait for, in another tier either. By layers: as far as is known before `collect`."""
        call = self.inflight.call
        return self.done and (call is None or call.peek() is not None)

    def wait(self, until: float, *, stopped: Callable[[], bool]) -> bool:
        """Return whether it was done by `until`, unless `stopped()` came first."""
        return all(call.wait(until, stopped=stopped) for call in self.inflight.calls)


class InflightReads:
    """The reads of one tier that are not over: at most one of each chunk that others can join."""

    def __init__(
        self, calls: Calls, invalidations: Invalidations, layout: Layout, runtime: Runtime, read: ReadLayers
    ) -> None:
        self._calls = calls
        self._invalidations = invalidations
        self._layout = layout
        self._now = runtime.now
        self._read = read
        self._lock = runtime.lock()
        """Held while a read begins or ends, so that nobody begins another of the same chunk."""
        self._open: dict[ChunkKey, InflightRead] = {}

    # -- getting a share -----------------------------------------------------------------------------------------------

    def begin_or_join(
        self, wanted: Sequence[Wanted], load: ReadWhole, context: RequestContext, *, most: int = 1,
        in_memory: Callable[[Sequence[ChunkKey]], Sequence[Loaded | None]] | None = None, anew: bool = False,
    ) -> list[Read | Loaded | None]:  # fmt: skip
        """Share what reads each of `wanted`, or have `load` read it whole; None if the tier cannot take that.

        most: chunks that one call reads. in_memory: asked under the lock for those that nobody reads. anew: do not
        share what reads a chunk by layers.
        """
        found: list[Read | Loaded | None] = [None] * len(wanted)
        try:
            with self._lock:
                lacking: dict[ChunkKey, list[int]] = {}
                for number, one in enumerate(wanted):
                    inflight = self._joinable(one.key, context)
                    if inflight is None or (anew and inflight.call is None):
                        lacking.setdefault(one.key, []).append(number)
                    else:
                        inflight.shares += 1
                        found[number] = Read(inflight, context)
                if in_memory is not None and lacking:
                    for key, loaded in zip(tuple(lacking), in_memory(tuple(lacking)), strict=True):
                        if loaded is not None:
                            first, *others = lacking.pop(key)
                            found[first] = loaded
                            for number in others:
                                found[number] = loaded.again()
                rest = list(lacking.values())
                for start in range(0, len(rest), most):
                    some = rest[start : start + most]
                    begun = [InflightRead(self, wanted[numbers[0]], context) for numbers in some]
                    self._begin_whole(begun, load)
                    for inflight, numbers in zip(begun, some, strict=True):
                        inflight.shares = len(numbers)
                        for number in numbers:
                            found[number] = Read(inflight, context)
        except BackendError as error:
            self._calls.failed("read", error, self._calls.reading)
            context.lost.add(self._calls.name)
        except BaseException:
            for share in found:
                self._return(share)
            raise
        for read in found:
            if isinstance(read, Read) and read.inflight.call is None:
                self._hurry(read.inflight)
        return found

    def _return(self, one: Read | Loaded | None) -> None:
        """Give back what was to be somebody's."""
        if isinstance(one, Read):
            self.leave(one.inflight)
        else:
            release(one)

    def _begin_whole(self, begun: Sequence[InflightRead], load: ReadWhole) -> None:
        calls = self._calls.reads.submit_batch(
            partial(self._run, begun, load), len(begun), seconds=self._calls.deadline, discard=release
        )
        for inflight, call in zip(begun, calls, strict=True):
            inflight.call = call
            self._open[inflight.key] = inflight

    def join(
        self, wanted: Wanted, groups: Sequence[range], context: RequestContext, *, place: LayerBuffer | None = None
    ) -> InflightRead | None:  # fmt: skip
        """A share in what is under way, whole or by layers. Otherwise it begins in `place`; without a place, None.

        What begins holds the reservation of `place` from then on. None too if it comes in other groups of layers.
        """
        with self._lock:
            inflight = self._joinable(wanted.key, context)
            if inflight is not None:
                if inflight.call is None and inflight.groups != groups:
                    return None
                inflight.shares += 1
            elif place is not None:
                inflight = InflightRead(self, wanted, context, groups=groups, place=place)
                inflight.began = self._now()
                self._open[wanted.key] = inflight
            return inflight

    def _joinable(self, key: ChunkKey, context: RequestContext) -> InflightRead | None:
        inflight = self._open.get(key)
        if inflight is not None and inflight.device not in (None, context.device):
            return None
        if inflight is not None and self._invalidations.hit(key, inflight.since):
            self._forget(inflight)  # those who have it already go on
            return None
        return inflight

    # -- whole ---------------------------------------------------------------------------------------------------------

    def _run(self, begun: Sequence[InflightRead], load: ReadWhole, batch: Batch[Loaded]) -> None:
        """On the tier's thread."""
        told: set[int] = set()

        def tell(number: int, loaded: Loaded | None) -> None:
            told.add(number)
            with self._lock:  # from now on it is in memory, or not to be had
                self._forget(begun[number])
            batch.give(number, loaded)

        try:
            self._calls.judged("read", partial(load, begun, batch.wanted, tell), self._calls.reading)()
        except Exception:  # judged and told of already
            for number, inflight in enumerate(begun):
                inflight.failed = inflight.failed or number not in told
        finally:
            with self._lock:
                for inflight in begun:
                    self._forget(inflight)

    def starve(self, inflight: InflightRead) -> None:
        """The call that reads it whole waits for memory."""
        inflight.starved = True
        self._calls.reads.wake()

    def collect(self, read: Read) -> Loaded | None:
        """Wait for what is read whole: a lease of its own, or None. A tier that is late is lost to the operation."""
        inflight, context = read.inflight, read.context
        assert inflight.call is not None
        if not self._calls.in_time(inflight.call, context):
            self.leave(inflight)
            return None
        return self._take(inflight, context)

    def _take(self, inflight: InflightRead, context: RequestContext) -> Loaded | None:
        assert inflight.call is not None
        loaded = inflight.call.peek()
        if inflight.failed:
            context.lost.add(self._calls.name)
        with self._lock:
            inflight.shares -= 1
            return loaded if loaded is None or not inflight.shares else loaded.again()

    # -- by layers -----------------------------------------------------------------------------------------------------

    def ask(self, inflight: InflightRead, group: range) -> Piece | None:
        """The call that reads a group of layers, begun if nobody has yet; None if the tier cannot take it.

        Unless it is the first group, `blob` must be known.
        """
        return inflight.pieces.get(group.start) or self._begin(inflight, group)

    def _hurry(self, inflight: InflightRead) -> None:
        """Have all of it read: in one call, what nobody has asked for yet."""
        with self._lock:
            inflight.hurried = True
            if inflight.pieces and inflight.blob is None:
                return  # whoever reads the first layers, and so learns where the others are, goes on with them
        self._begin(inflight, None)

    def _begin(self, inflight: InflightRead, group: range | None) -> Piece | None:
        """Begin to read a group of layers, or all that nobody has begun to read."""
        if self._calls.paused:
            self.close(inflight)
            return None
        try:
            with self._lock:
                if group is not None and group.start in inflight.pieces:
                    return inflight.pieces[group.start]
                # Everybody asks for one group after the other, so that what is lacking is always the end of it.
                lacking = [one for one in inflight.groups if one.start not in inflight.pieces]
                groups = lacking if group is None else [group]
                if not groups or not inflight.shares:
                    return None
                layers = range(groups[0].start, groups[-1].stop)
                run = self._calls.judged("read", partial(self._run_layers, inflight, layers), self._calls.reading)
                piece = Piece(self._calls.reads.submit(run, seconds=self._calls.deadline), layers)
                inflight.pieces.update((one.start, piece) for one in groups)
                return piece
        except BackendError as error:
            self._calls.failed("read", error, self._calls.reading)
            self.close(inflight)
            return None

    def _run_layers(self, inflight: InflightRead, layers: range) -> Arrived | None:
        """On the tier's thread."""
        assert inflight.place is not None
        arrived = self._read(inflight.key, inflight.blob, inflight.place, inflight.wanted.num_tokens, layers)
        if arrived is not None and arrived[0] is not None:
            with self._lock:
                inflight.blob = arrived[0]
                hurried = inflight.hurried
            if hurried:
                self._hurry(inflight)
        return arrived

    def complete(self, inflight: InflightRead) -> tuple[Loaded, Block | None]:
        """The chunk, once every group has come and is right; and for the first who asks, the block: to be kept."""
        assert inflight.blob is not None and inflight.place is not None
        about = inflight.blob.header.description
        block = None
        with self._lock:
            if inflight.lease is None:
                block = inflight.place.reservation.seal()
                assert block is not None, "these reservations have no deadline"
                inflight.lease = block.lease()
            lease = inflight.lease.again()
        chunk = Chunk(
            inflight.place.tensor, self._layout.format, inflight.wanted.num_tokens, about.fidelity, about.start
        )
        return Loaded(chunk, lease, float(about.written)), block

    def await_all(self, read: Read) -> bool | None:
        """Wait for all layers. True: it can be completed. False: it has to be read in another way. None: it is lost.

        A tier that is late, or failed, is lost to the operation. The share is the caller's still.
        """
        inflight, context = read.inflight, read.context
        for group in inflight.groups:
            piece = inflight.pieces.get(group.start)
            if piece is None:
                return False
            if not self._calls.in_time(piece.call, context):
                return None
            if piece.call.peek() is None:
                context.lost.add(self._calls.name)
                return None
            if piece.right(group) < len(group):
                return False
            context.progress()
        return True

    # -- giving it up --------------------------------------------------------------------------------------------------

    def close(self, inflight: InflightRead) -> None:
        """Something of it cannot be had: nobody else is to join. Those who have a share keep it."""
        with self._lock:
            self._forget(inflight)

    def give_up(self, inflight: InflightRead, group: range) -> None:
        """The holder of a share does not want this group of layers, nor any behind it."""
        with self._lock:
            self._forget(inflight)  # so that whoever is alone with it now, stays so
            alone = inflight.shares == 1
            piece = inflight.pieces.get(group.start)
        if alone and piece is not None and len(piece.layers) == len(group):
            piece.call.cancel()

    def leave(self, inflight: InflightRead) -> None:
        """One share less. With the last one everything is given back; a call under way keeps its memory."""
        with self._lock:
            inflight.shares -= 1
            if inflight.shares:
                return
            self._forget(inflight)
        for call in inflight.calls:
            call.cancel()
        if inflight.lease is not None:
            inflight.lease.release()
        elif inflight.place is not None:
            inflight.place.reservation.abandon()

    def _forget(self, inflight: InflightRead) -> None:
        if self._open.get(inflight.key) is inflight:
            del self._open[inflight.key]


def release(loaded: Loaded | None) -> None:
    """Release a chunk, if there is one, that no request waits for any more."""
    if loaded is not None:
        loaded.release()
