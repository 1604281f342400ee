"""Plans loads and saves, step by step: block hashes and block tables in, operations out. Knows no vLLM.

A chunk is a whole number of the engine's blocks, and its name is the engine's own chained hash of its last block, which
covers every token before it, the salt, the adapter and the images. Each group of layers has chunks of its own. What a
prompt has behind its last whole chunk is kept in pieces (`tail`), and so is what a whole request has, if generated
tokens are kept. Blocks may be freed while they are being saved: the planner remembers blocks that are being read, and a
step that gives such a block to another request, or to another group, waits for it first (`Step.fence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import lcm

from .plan import IDLE, NULL, Boundary, Chunks, Group, Hit, Move, Offer, Owner, Request, Scheduled, Step
from .reach import reach
from .saving import Naming, Saves, State, Track
from .tail import Piece


class Planner:
    """One per engine; all calls come from its scheduler's thread. A step costs O(requests in it + blocks they got)."""

    def __init__(
        self, groups: Sequence[Group], *, hash_tokens: int, save_generated: bool, tails: bool = True, save: bool = True
    ) -> None:
        """hash_tokens: tokens per block hash, of which every `chunk_tokens` is a multiple.

        save_generated: chunks with generated tokens too. tails: the tails of prompts, too. save: False for an engine
        that only loads.
        """
        self.groups = tuple(groups)
        self.chunk_tokens = max(group.chunk_tokens for group in groups)
        self._naming = Naming(groups, hash_tokens=hash_tokens, tails=tails)
        self.pieces = self._naming.pieces
        self._unit = lcm(hash_tokens, *(group.block_tokens for group in groups))
        """Prefixes that are loaded are multiples of it."""
        self._save_anything = save
        self._save_generated = save_generated
        self._states: dict[str, State] = {}
        self._loads: list[Move] = []
        self._cancelled: list[str] = []
        self._numbers = count(1)
        self._given: list[Sequence[int]] = []
        self._uncertain = self._uncertain_steps = 0
        self._saves = Saves(self._naming, self._numbers, save_generated=save_generated)

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, request: Request, owner: Owner, local: int = 0) -> None:
        """A request has come, of which the engine has `local` tokens itself. Twice is fine."""
        state = self._states.get(request.request_id)
        if state is None:
            tracks = tuple(Track(group) for group in range(len(self.groups)))
            state = self._states[request.request_id] = State(request, owner, tracks, request.num_prompt_tokens)
        state.begun = local

    def end(self, request: str, blocks: Sequence[Sequence[int]] = ()) -> tuple[Move, ...]:
        """It is over, whatever became of it; a load under way is cancelled. Its blocks may go at once.

        blocks: by group, all that it had, by the engine's word; none if it was preempted. Returns what the next step
        saves of it, unless it needs these blocks.
        """
        state = self._states.pop(request, None)
        if state is None:
            return ()
        if state.loading:
            # Also if the worker has not heard of the load yet: the engine waits to be told that it is over.
            self._cancelled.append(request)
            return ()
        if not self._is_saved(state) or not (self._save_generated or self._uncertain):
            return ()
        return self._saves.at_end(state, blocks)

    def chunks(self, request: str) -> tuple[Chunks, ...]:
        """By group, every chunk of a request that has a name by now."""
        state = self._states[request]
        return tuple(self._naming.named(state, group, 0, count) for group, count in enumerate(self.named(request)))

    def named(self, request: str) -> tuple[int, ...]:
        """The number of these chunks, by group."""
        tokens = len(self._states[request].request.block_hashes) * self._naming.hash_tokens
        return tuple(tokens // group.chunk_tokens for group in self.groups)

    def hashes(self, request: str) -> tuple[bytes, ...]:
        """The hashes of a request's blocks, as far as they are known by now."""
        return tuple(map(bytes, self._states[request].request.block_hashes))

    def pieces_of(self, request: str, group: int, number: int) -> Chunks:
        """The pieces that a chunk of a request may be kept in, as far as they have names by now."""
        state = self._states[request]
        return Chunks(state.owner, number, (), self.pieces[group].of(state.request.block_hashes, number), group)

    def reach(
        self, request: str, local: int, held: Sequence[Sequence[object]], pieces: Callable[[int, int], Sequence[Piece]]
    ) -> tuple[Hit, bool]:
        """Return a request's offer, and whether it covers all that can be loaded or will ever be stored.

        local: tokens that the engine has itself. held: by group and chunk of `chunks`, what is true if it is held.
        pieces: of a group and a chunk's number, those that are held, from the chunk's beginning on.
        """
        state, unit = self._states[request], self._unit
        most = max(local, (state.request.num_tokens - 1) // unit * unit)
        known: dict[tuple[int, int], Sequence[Piece]] = {}

        def there(group: int, number: int) -> Sequence[Piece]:
            if (group, number) not in known:
                known[group, number] = pieces(group, number)
            return known[group, number]

        tokens, before = most, -1
        while tokens != before:  # what one group lacks, another may not have to have
            before = tokens
            for number, group in enumerate(self.groups):

                def ends(chunk: int, number: int = number, size: int = group.chunk_tokens) -> int:
                    found = there(number, chunk)
                    return found[-1].end if found else chunk * size

                # Rounded down here: full attention may end within a block of another group, which may have all of it.
                tokens = reach(group, local, tokens, held[number], ends, unit=unit) // unit * unit
            if len(self.groups) == 1:
                break
        offers = []
        for number, group in enumerate(self.groups):
            chunk, part = divmod(tokens, group.chunk_tokens)
            if part and chunk < len(held[number]) and held[number][chunk]:
                offers.append(Offer(chunk + 1))
            else:
                found = there(number, chunk) if part and tokens > local else ()
                offers.append(Offer(chunk, tuple(piece for piece in found if piece.start < tokens)))
        kept = self.pieces[0].unit
        return Hit(tokens, tuple(offers)), tokens >= min(most, state.request.num_tokens // kept * kept)

    def loadable(self, request: str, local: int, hit: Hit) -> int:
        """The number of tokens after the first `local` ones that can be loaded. Calling it twice has the same result.

        At least one token is left to be computed, and whole blocks are loaded: exactly what the engine's own prefix
        cache would give.
        """
        state = self._states[request]
        state.begun, state.offered = local, hit
        return 0 if state.failed or state.sealed else max(0, hit.tokens - local)

    def load(self, request: str, blocks: Sequence[Sequence[int]], tokens: int) -> tuple[Move, ...]:
        """Load `tokens` tokens, as `loadable` offered, into the request's `blocks`: by group, all of them."""
        state = self._states[request]
        end = state.begun + tokens
        moves = tuple(
            self._move_in(state, track, table, offer, end)
            for track, table, offer in zip(state.tracks, blocks, state.offered.offers, strict=True)
        )
        self._loads += moves
        state.loading = True
        state.computed = 0
        return moves

    def _move_in(self, state: State, track: Track, table: Sequence[int], offer: Offer, end: int) -> Move:
        """Load one group's KV of the tokens up to `end` that are attended to behind it. Empty, if there are none."""
        group = self.groups[track.group]
        size, step = group.block_tokens, group.chunk_tokens
        begin = max(state.begun, group.first(end) // size * size)
        first, last = begin // step, min(offer.chunks, -(-end // step))
        pieces = tuple(piece for piece in offer.pieces if piece.end > begin and piece.start < end)
        track.saved = max(track.saved, end // step)
        track.tail_saved |= bool(pieces) and pieces[-1].end + self.pieces[track.group].unit > (
            state.request.num_prompt_tokens
        )
        if begin >= end or not (first < last or pieces):
            return Move(
                next(self._numbers), state.request.request_id, Chunks(state.owner, first, (), (), track.group), 0, ()
            )
        starts = first * step if first < last else pieces[0].start
        ends = pieces[-1].end if pieces else last * step
        into = tuple(table[begin // size : end // size])
        if not group.full:
            into = tuple(-1 if block == NULL else block for block in into)
        into = (-1,) * ((begin - starts) // size) + into + (-1,) * ((ends - end) // size)
        chunks = self._naming.named(state, track.group, first, last)._replace(pieces=pieces)
        return Move(next(self._numbers), state.request.request_id, chunks, starts // size, into)

    def give(self, request: str, blocks: Sequence[Sequence[int]]) -> None:
        """The engine has given a request blocks for KV that is not loaded here. Another connector may write to them in
        the next step, before the engine computes with them. blocks: by group, all of the request's."""
        state = self._states.get(request)
        if state is not None:
            state.computed = 0
        if self._saves.reads:
            local = self._local(request)
            for group, table in zip(self.groups, blocks, strict=True):
                self._given.append(table[local // group.block_tokens :])

    def loaded(self, request: str) -> None:
        """The worker is done with the request's load, one way or the other."""
        state = self._states.get(request)
        if state is not None:
            state.loading = False

    def doubt(self, failed: Iterable[str], *, everything: bool = False) -> None:
        """Save the KV of these requests again once it has been computed, because their loads failed.

        everything: other requests may have computed with the bad KV, too; nothing counts as saved until it is checked
        again.
        """
        names = set(failed)
        for name, state in self._states.items():
            if everything or name in names:
                state.computed, state.due = 0, 0
                for track in state.tracks:
                    track.saved, track.tail_saved = 0, False
            if name in names:
                state.failed = True
        self._saves.drop(lambda save: everything or save.request in names)

    def ascertain(self, number: int, *, failed: bool) -> None:
        """The step of this `Step.uncertain` is over. failed: not all came that another connector loaded."""
        if failed:
            self.seal()  # the engine computes anew what is wrong, and it is not known here of whom
        if number == self._uncertain:
            self._uncertain = 0

    def seal(self) -> None:
        """Keep nothing any more of the KV of all known requests: it is older than a reset, or may be wrong."""
        for state in self._states.values():
            state.sealed = True
        self._saves.drop(lambda save: True)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(
        self, scheduled: Sequence[Scheduled], boundaries: Iterable[Boundary] = (), written: Sequence[int] = (), *,
        awaits_loads: bool = False,
    ) -> Step:  # fmt: skip
        """The operations of a step. Call once for each.

        written: blocks that the step writes to, whoever has them. awaits_loads: the step computes with KV that is
        loaded meanwhile, by whichever connector.
        """
        saves: list[Move] = []
        touched: list[Chunks] = []
        fence: set[int] = set()
        reads = self._saves.reads
        for blocks in (*(load.blocks for load in self._loads), *self._given, written):
            reads.find(blocks, fence)
        uncertain = 0
        if awaits_loads and self._others_load(scheduled):
            self._uncertain_steps += 1
            uncertain = self._uncertain = self._uncertain_steps
        for one in scheduled:
            if reads and one.blocks:
                for group, table in zip(self.groups, one.blocks, strict=True):
                    # What is there already is not written to.
                    reads.find(table[one.computed // group.block_tokens :] if one.fresh else table, fence)
            state = self._states.get(one.request)
            if state is None:  # nothing of it is kept
                continue
            if one.fresh:
                state.prolong()
                for track, table in zip(state.tracks, one.blocks, strict=True):
                    track.blocks = list(table)
                    touched.append(self._naming.prompt(state, track))
            elif one.blocks:
                for track, table in zip(state.tracks, one.blocks, strict=True):
                    track.blocks.extend(table)
            state.computed = one.after
            if one.after >= state.due and self._is_saved(state) and not self._uncertain:
                saves += self._saves.due(state, one)
        for boundary in boundaries:
            state = self._states.get(boundary.request)
            if state is not None and self._is_saved(state) and not self._uncertain:
                move = self._saves.at_boundary(state, boundary)
                if move is not None:
                    saves.append(move)
        ended = self._saves.take_ended(fence, now=not self._uncertain)
        chains = tuple(chunks for chunks in touched if chunks.digests or chunks.pieces)
        step = Step(
            tuple(self._loads), tuple(saves), ended, chains, tuple(sorted(fence)), tuple(self._cancelled), uncertain
        )
        self._loads, self._given, self._cancelled = [], [], []
        return step or IDLE

    def done(self, saves: Iterable[int]) -> None:
        """These saves read nothing more."""
        self._saves.done(saves)

    def request(self, name: str) -> Request | None:
        """The engine's own, while it is there."""
        state = self._states.get(name)
        return None if state is None else state.request

    @property
    def owes(self) -> bool:
        """The next step has something to save of requests that are over."""
        return bool(self._saves.ended)

    @property
    def reading(self) -> Mapping[int, tuple[int, ...]]:
        """The blocks that are being read, by save."""
        return self._saves.reads.blocks

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_saved(self, state: State) -> bool:
        return self._save_anything and not state.sealed

    def _local(self, request: str) -> int:
        """Tokens that the engine had when it last asked; none of a request that is not known."""
        state = self._states.get(request)
        return 0 if state is None else state.begun

    def _others_load(self, scheduled: Sequence[Scheduled]) -> bool:
        """Return whether a request begins with tokens that neither the engine had nor this planner loads."""
        ours = {load.request for load in self._loads}
        return any(
            one.fresh and one.request not in ours and one.computed > self._local(one.request) for one in scheduled
        )
