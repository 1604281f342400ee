"""Chunks on their way layer by layer: all who want one at one time share its calls, and the memory it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvloom.errors import BackendError
from kvloom.memory import Block, Lease
from kvloom.runtime import Call, Runtime
from kvloom.tiers.invalidation import Invalidations
from kvloom.tiers.memory.staging import StagingPlace
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.stored.inflight import InflightReads, Read
from kvloom.tiers.stored.layer_ranges import LayeredBlob
from kvloom.tiers.tier import Layout, Loaded
from kvloom.types import Chunk, ChunkKey

Arrived = tuple[LayeredBlob | None, int]
"""How a blob's layers lie in it, and how many of those that were asked for are right."""
ReadLayers = Callable[[ChunkKey, LayeredBlob | None, StagingPlace, int, range], Arrived | None]
"""`Loads.read_layers`."""


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


class InflightLayerRead:
    """A chunk that is being put together. Whoever has a share gives it to `InflightLayerReads.leave`, once.

    Each group of layers is asked for once, by whoever wants it first; what has come stays for the others.
    """

    def __init__(
        self,
        home: InflightLayerReads,
        key: ChunkKey,
        num_tokens: int,
        groups: Sequence[range],
        place: StagingPlace,
        since: int,
    ) -> None:
        self.home = home
        self.key = key
        self.num_tokens = num_tokens
        self.groups = groups
        self.place = place
        self.since = since
        """A mark of the removals from before anything of it was read."""
        self.shares = 1
        self.blob: LayeredBlob | None = None
        """Known once the first layers are there."""
        self.pieces: dict[int, Piece] = {}
        """By the first layer of each group. A piece is never asked for again: its call may still write to its place."""
        self.hurried = False
        """Somebody waits for all of it."""
        self.began = 0.0
        self.lease: Lease | None = None
        """Of its memory, once it is complete."""


class WholeRead:
    """The share in an arrival of one who wants the whole chunk. As `Read`: for `leave` or `give_up`, once."""

    __slots__ = ("arrival", "context")

    def __init__(self, arrival: InflightLayerRead, context: RequestContext) -> None:
        self.arrival = arrival
        self.context = context

    @property
    def done(self) -> bool:
        """There is nothing to wait for."""
        # Where the rest is still to be asked for, the last piece asks for it before it is done.
        return all(piece.call.done for piece in tuple(self.arrival.pieces.values()))

    def wait(self, until: float, *, stopped: Callable[[], bool]) -> bool:
        """Whether it was done by `until`, unless `stopped()` came first."""
        for group in self.arrival.groups:
            piece = self.arrival.pieces.get(group.start)
            if piece is not None and not piece.call.wait(until, stopped=stopped):
                return False
        return True


class InflightLayerReads:
    """What is on its way from one tier layer by layer. Under one lock with its `InflightReads`."""

    def __init__(
        self,
        inflight: InflightReads,
        calls: Calls,
        invalidations: Invalidations,
        layout: Layout,
        runtime: Runtime,
        read: ReadLayers,
    ) -> None:
        self._inflight = inflight
        self._calls = calls
        self._invalidations = invalidations
        self._layout = layout
        self._now = runtime.now
        self._read = read
        self._open: dict[ChunkKey, InflightLayerRead] = {}

    # -- getting a share -----------------------------------------------------------------------------------------------

    def join(
        self,
        key: ChunkKey,
        groups: Sequence[range],
        context: RequestContext,
        *,
        place: StagingPlace | None = None,
        num_tokens: int = 0,
    ) -> InflightLayerRead | Read | None:
        """A share in what is under way: by layers, or whole. Otherwise it begins in `place`; without a place, None.

        An arrival that begins holds the place's room from then on. None too if it comes in other groups of layers.
        """
        with self._inflight.lock:
            arrival = self._joinable(key)
            if arrival is not None and arrival.groups != groups:
                return None
            if arrival is not None:
                arrival.shares += 1
                return arrival
            read = self._inflight.share(key, context)
            if read is not None or place is None:
                return read
            arrival = self._open[key] = InflightLayerRead(self, key, num_tokens, groups, place, context.since)
            arrival.began = self._now()
            return arrival

    def share(self, key: ChunkKey, context: RequestContext) -> WholeRead | None:
        """A share for who wants the whole chunk, if it is arriving; `hurry` it then. Under the lock of the reads."""
        arrival = self._joinable(key)
        if arrival is None:
            return None
        arrival.shares += 1
        return WholeRead(arrival, context)

    def _joinable(self, key: ChunkKey) -> InflightLayerRead | None:
        arrival = self._open.get(key)
        if arrival is not None and self._invalidations.hit(key, arrival.since):
            self._forget(arrival)  # those who have it already go on
            return None
        return arrival

    # -- reading -------------------------------------------------------------------------------------------------------

    def ask(self, arrival: InflightLayerRead, group: range) -> Piece | None:
        """The call that reads a group of layers, begun if nobody has yet; None if the tier cannot take it.

        Unless it is the first group, `blob` must be known.
        """
        return arrival.pieces.get(group.start) or self._begin(arrival, group)

    def hurry(self, arrival: InflightLayerRead) -> None:
        """Have all of it read: in one call, what nobody has asked for yet."""
        with self._inflight.lock:
            arrival.hurried = True
            if arrival.pieces and arrival.blob is None:
                return  # whoever reads the first layers, and so learns where the others are, goes on with them
        self._begin(arrival, None)

    def _begin(self, arrival: InflightLayerRead, group: range | None) -> Piece | None:
        """Begin to read a group of layers, or all that nobody has begun to read."""
        if self._calls.paused:
            self.close(arrival)
            return None
        try:
            with self._inflight.lock:
                if group is not None and group.start in arrival.pieces:
                    return arrival.pieces[group.start]
                # Everybody asks for one group after the other, so that what is lacking is always the end of it.
                lacking = [one for one in arrival.groups if one.start not in arrival.pieces]
                groups = lacking if group is None else [group]
                if not groups or not arrival.shares:
                    return None
                layers = range(groups[0].start, groups[-1].stop)
                run = self._calls.judged("read", partial(self._run, arrival, layers), self._calls.reading)
                piece = Piece(self._calls.reads.submit(run, seconds=self._calls.deadline), layers)
                arrival.pieces.update((one.start, piece) for one in groups)
                return piece
        except BackendError as error:
            self._calls.failed("read", error, self._calls.reading)
            self.close(arrival)
            return None

    def _run(self, arrival: InflightLayerRead, layers: range) -> Arrived | None:
        """On the tier's thread."""
        arrived = self._read(arrival.key, arrival.blob, arrival.place, arrival.num_tokens, layers)
        if arrived is not None and arrived[0] is not None:
            with self._inflight.lock:
                arrival.blob = arrived[0]
                hurried = arrival.hurried
            if hurried:
                self.hurry(arrival)
        return arrived

    # -- giving it up --------------------------------------------------------------------------------------------------

    def close(self, arrival: InflightLayerRead) -> None:
        """Something of it cannot be had: nobody else is to join. Those who have a share keep it."""
        with self._inflight.lock:
            self._forget(arrival)

    def give_up(self, arrival: InflightLayerRead, group: range) -> None:
        """Whoever holds a share does not want this group of layers, nor any behind it."""
        with self._inflight.lock:
            self._forget(arrival)  # so that whoever is alone with it now, stays so
            alone = arrival.shares == 1
            piece = arrival.pieces.get(group.start)
        if alone and piece is not None and len(piece.layers) == len(group):
            piece.call.cancel()

    def leave(self, arrival: InflightLayerRead) -> None:
        """One share less. With the last one everything is given back; a call under way keeps its memory."""
        with self._inflight.lock:
            arrival.shares -= 1
            last = not arrival.shares
            if last:
                self._forget(arrival)
            pieces = tuple(arrival.pieces.values())
        if not last:
            return
        for piece in pieces:
            piece.call.cancel()
        if arrival.lease is None:
            arrival.place.room.release()
        else:
            arrival.lease.release()

    def _forget(self, arrival: InflightLayerRead) -> None:
        if self._open.get(arrival.key) is arrival:
            del self._open[arrival.key]

    # -- all of it -----------------------------------------------------------------------------------------------------

    def complete(self, arrival: InflightLayerRead) -> tuple[Loaded, Block | None]:
        """The chunk, once every group has come and is right; and for the first who asks, the block: to be kept."""
        assert arrival.blob is not None
        about = arrival.blob.header.description
        block = None
        with self._inflight.lock:
            if arrival.lease is None:
                block = arrival.place.room.seal()
                assert block is not None, "these reservations have no deadline"
                arrival.lease = block.lease()
            lease = arrival.lease.again()
        chunk = Chunk(arrival.place.tensor, self._layout.format, arrival.num_tokens, about.fidelity, about.start)
        return Loaded(chunk, lease, float(about.written)), block

    def collect(self, read: WholeRead) -> bool | None:
        """Wait for all of it. True: it can be completed. False: it has to be read in another way. None: it is lost.

        A tier that is late, or failed, is lost to the visit. The share is the caller's still.
        """
        arrival, context = read.arrival, read.context
        for group in arrival.groups:
            piece = arrival.pieces.get(group.start)
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
