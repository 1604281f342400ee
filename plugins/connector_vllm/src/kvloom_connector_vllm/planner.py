"""Plans loads and saves, step by step: block hashes and block tables in, operations out. Knows no vLLM.

A chunk is a whole number of the engine's blocks, and its name is the engine's own chained hash of its last block, which
covers every token before it, the salt, the adapter and the images. What a prompt has behind its last whole chunk is
kept in pieces (`tail`), and so is what a whole request has, if generated tokens are kept. Blocks may be freed while
they are being saved: the planner remembers blocks that are being read, and a step that gives such a block to another
request waits for it first (`Step.fence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvloom import leading

from .plan import IDLE, NOTHING, Chunks, Move, Offer, Owner, Request, Scheduled, Step
from .tail import Piece, Pieces


@dataclass(slots=True)
class _State:
    request: Request
    owner: Owner
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is certain to be there once the steps so far have been computed."""
    saved: int = 0
    """Chunks that are stored, or were planned to be."""
    tail_saved: bool = False
    """The tail of the prompt is, too, or there is none."""
    offered: Offer = NOTHING
    """The answer when it was last asked what could be loaded."""
    begun: int = 0
    """Tokens that were there locally when it was last asked what could be loaded."""
    loading: bool = False
    failed: bool = False
    """Something did not come that was said to be there: it computes itself, instead of trying again for ever."""
    sealed: bool = False
    """The request began before a reset: its KV is not loaded or saved any more."""


class Planner:
    """One per engine; all calls come from its scheduler's thread. A step costs O(requests in it + blocks they got)."""

    def __init__(
        self, *, block_tokens: int, chunk_tokens: int, hash_tokens: int, save_generated: bool, tails: bool = True,
        save: bool = True,
    ) -> None:  # fmt: skip
        """hash_tokens: tokens per block hash, of which `chunk_tokens` is a multiple, as it is of `block_tokens`.

        save_generated: chunks with generated tokens too. tails: the tails of prompts, too. save: False for an engine
        that only loads.
        """
        self.pieces = Pieces(
            chunk_tokens=chunk_tokens, block_tokens=block_tokens, hash_tokens=hash_tokens, keep=tails
        )  # fmt: skip
        self._save_anything = save
        self.block_tokens = block_tokens
        self.chunk_tokens = chunk_tokens
        self._hashes_per_chunk = chunk_tokens // hash_tokens
        self._save_generated = save_generated
        self._states: dict[str, _State] = {}
        self._loads: list[Move] = []
        self._ended: list[Move] = []
        self._cancelled: list[str] = []
        self._numbers = 0
        # By block, the saves that read it: requests that share a block may both be saving it. By save, its blocks.
        self._readers: dict[int, set[int]] = {}
        self._reading: dict[int, tuple[int, ...]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, request: Request, owner: Owner) -> None:
        """A request has come. Twice is fine."""
        self._states.setdefault(request.request_id, _State(request, owner))

    def end(self, request: str, blocks: Sequence[int] = ()) -> Move | None:
        """It is over, whatever became of it; a load under way is cancelled. Its blocks may go at once.

        blocks: all that it had, by the engine's word; none if it was preempted. Returns what the next step saves of
        it, unless it needs these blocks.
        """
        state = self._states.pop(request, None)
        if state is None:
            return None
        if state.loading:
            # Also if the worker has not heard of the load yet: the engine waits to be told that it is over.
            self._cancelled.append(request)
            return None
        return self._save_end(state, blocks) if self._saves(state) and self._save_generated else None

    def chunks(self, request: str) -> Chunks:
        """Every chunk of a request that has a name by now."""
        state = self._states[request]
        return self._named(state, 0, len(state.request.block_hashes) // self._hashes_per_chunk)

    def hashes(self, request: str) -> tuple[bytes, ...]:
        """The hashes of a request's blocks, as far as they are known by now."""
        return tuple(map(bytes, self._states[request].request.block_hashes))

    def pieces_of(self, request: str, number: int) -> Chunks:
        """The pieces that a chunk of a request may be kept in, as far as they have names by now."""
        state = self._states[request]
        return Chunks(state.owner, number, (), self.pieces.of(state.request.block_hashes, number))

    def held(self, local: int, chunks: Sequence[object]) -> int:
        """Return how many whole chunks can be had, counted from the beginning; the engine has `local` tokens itself.

        chunks: for each chunk of `chunks` that was asked about, what is true if it is held.
        """
        chunk = local // self.chunk_tokens
        while chunk < len(chunks) and chunks[chunk]:
            chunk += 1
        return chunk

    def loadable(self, request: str, local: int, offer: Offer) -> int:
        """The number of tokens after the first `local` ones that can be loaded. Calling it twice has the same result.

        At least one token is left to be computed, and whole blocks are loaded: exactly what the engine's own prefix
        cache would give.
        """
        state = self._states[request]
        state.begun, state.offered = local, offer
        if state.failed or state.sealed:
            return 0
        most = (state.request.num_tokens - 1) // self.block_tokens * self.block_tokens
        end = offer.pieces[-1].end if offer.pieces else offer.chunks * self.chunk_tokens
        return max(0, min(end, most) - local)

    def load(self, request: str, blocks: Sequence[int], tokens: int) -> Move:
        """Load `tokens` tokens, as `loadable` offered, into the request's `blocks` (all of them)."""
        state = self._states[request]
        begin, end = state.begun, state.begun + tokens
        first, last = begin // self.chunk_tokens, min(state.offered.chunks, -(-end // self.chunk_tokens))
        pieces = tuple(piece for piece in state.offered.pieces if piece.end > begin and piece.start < end)
        starts = first * self.chunk_tokens if first < last else pieces[0].start
        ends = pieces[-1].end if pieces else last * self.chunk_tokens
        size = self.block_tokens
        into = blocks[begin // size : end // size]
        into = (-1,) * ((begin - starts) // size) + tuple(into) + (-1,) * ((ends - end) // size)
        chunks = self._named(state, first, last)._replace(pieces=pieces)
        move = Move(self._number(), request, chunks, starts // size, into)
        self._loads.append(move)
        state.loading = True
        state.computed = 0
        state.saved = max(state.saved, end // self.chunk_tokens)
        state.tail_saved |= bool(pieces) and pieces[-1].end + self.pieces.unit > state.request.num_prompt_tokens
        return move

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
                state.saved, state.tail_saved, state.computed = 0, False, 0
            if name in names:
                state.failed = True
        self._drop(lambda save: everything or save.request in names)

    def seal(self) -> None:
        """Mark the KV of all known requests as older than a reset."""
        for state in self._states.values():
            state.sealed = True
        self._drop(lambda save: True)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, scheduled: Iterable[Scheduled]) -> Step:
        """The operations of a step. Call once for each."""
        saves: list[Move] = []
        touched: list[Chunks] = []
        fence: set[int] = set()
        for load in self._loads:
            self._fence(load.blocks, fence)
        for one in scheduled:
            state = self._states.get(one.request)
            if state is None:
                continue
            if one.fresh:
                state.blocks = list(one.blocks)
                # What is there already is not written to.
                self._fence(one.blocks[one.computed // self.block_tokens :], fence)
                touched.append(self._prompt(state))
            elif one.blocks:
                state.blocks.extend(one.blocks)
                self._fence(one.blocks, fence)
            state.computed = one.after
            if self._saves(state) and self._due(state, one.after):
                self._save(state, one.after, saves)
        ended = self._unneeded(fence)
        chains = tuple(chunks for chunks in touched if chunks.digests or chunks.pieces)
        step = Step(tuple(self._loads), tuple(saves), ended, chains, tuple(sorted(fence)), tuple(self._cancelled))
        self._loads, self._cancelled = [], []
        return step or IDLE

    def done(self, saves: Iterable[int]) -> None:
        """These saves read nothing more."""
        for number in saves:
            for block in self._reading.pop(number, ()):
                readers = self._readers[block]
                readers.discard(number)
                if not readers:
                    del self._readers[block]

    def request(self, name: str) -> Request | None:
        """The engine's own, while it is there."""
        state = self._states.get(name)
        return None if state is None else state.request

    @property
    def owes(self) -> bool:
        """The next step has something to save of requests that are over."""
        return bool(self._ended)

    @property
    def reading(self) -> Mapping[int, tuple[int, ...]]:
        """The blocks that are being read, by save."""
        return self._reading

    # -- inside --------------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _saves(self, state: _State) -> bool:
        return self._save_anything and not state.sealed

    def _unneeded(self, fence: set[int]) -> tuple[Move, ...]:
        """The saves of requests that are over, but for those that this step would wait for: these are left out."""
        self._drop(lambda save: save.number in fence)
        ended, self._ended = self._ended, []
        fence.intersection_update(self._reading)
        return tuple(ended)

    def _drop(self, unwanted: Callable[[Move], bool]) -> None:
        """Leave out saves of requests that are over, before any worker knows of them."""
        self.done([save.number for save in self._ended if unwanted(save)])
        self._ended = [save for save in self._ended if save.number in self._reading]

    def _complete(self, state: _State, tokens: int) -> int:
        """Whole chunks within `tokens` that have a name."""
        return min(tokens // self.chunk_tokens, len(state.request.block_hashes) // self._hashes_per_chunk)

    def _named(self, state: _State, first: int, last: int) -> Chunks:
        step = self._hashes_per_chunk
        last_hashes = state.request.block_hashes[(first + 1) * step - 1 : last * step : step]
        return Chunks(state.owner, first, tuple(map(bytes, last_hashes)))

    def _prompt(self, state: _State) -> Chunks:
        """A request's whole prompt, as it is kept."""
        tokens = state.request.num_prompt_tokens
        last = self._complete(state, tokens)
        return self._named(state, 0, last)._replace(pieces=self._tail(state, last, tokens))

    def _tail(self, state: _State, number: int, tokens: int) -> tuple[Piece, ...]:
        """The pieces that keep the first `tokens` tokens behind their `number` whole chunks."""
        pieces = self.pieces.of(state.request.block_hashes, number)
        there = [piece for piece in pieces if piece.end <= tokens]
        return tuple(leading(there, number * self.chunk_tokens))

    def _due(self, state: _State, tokens: int) -> bool:
        """There is KV of these first tokens that is not saved."""
        whole = tokens >= (state.saved + 1) * self.chunk_tokens
        return whole or (not state.tail_saved and tokens >= state.request.num_prompt_tokens)

    def _save(self, state: _State, tokens: int, saves: list[Move]) -> None:
        prompt = state.request.num_prompt_tokens
        tokens = min(tokens, len(state.blocks) * self.block_tokens)
        pieces: tuple[Piece, ...] = ()
        if tokens >= prompt:
            number = self._complete(state, prompt)
            pieces = () if state.tail_saved or state.saved > number else self._tail(state, number, prompt)
            state.tail_saved = True
        if not self._save_generated:
            tokens = min(tokens, prompt)
        last = self._complete(state, tokens)
        if pieces and last > pieces[0].start // self.chunk_tokens:
            pieces = ()  # the chunk is whole by now
        if last > state.saved or pieces:
            saves.append(self._move(state, last, pieces, state.blocks))

    def _save_end(self, state: _State, blocks: Sequence[int]) -> Move | None:
        """Save what a request that is over has computed beyond what is saved, its last whole blocks included."""
        # The last token was chosen, and not computed with.
        tokens = min(state.computed, state.request.num_tokens - 1, len(blocks) * self.block_tokens)
        last = self._complete(state, tokens)
        saved = self._prompt(state).pieces if state.tail_saved else ()
        pieces = tuple(piece for piece in self._tail(state, last, tokens) if piece not in saved)
        if state.saved > last or not (last > state.saved or pieces):
            return None
        move = self._move(state, last, pieces, blocks)
        self._ended.append(move)
        return move

    def _move(self, state: _State, last: int, pieces: tuple[Piece, ...], table: Sequence[int]) -> Move:
        """Save a request's chunks up to `last`, and pieces behind them. table: its blocks."""
        first = min(state.saved, last)
        begins = first * self.chunk_tokens if first < last else pieces[0].start
        ends = pieces[-1].end if pieces else last * self.chunk_tokens
        blocks = tuple(table[begins // self.block_tokens : ends // self.block_tokens])
        chunks = self._named(state, first, last)._replace(pieces=pieces)
        move = Move(self._number(), state.request.request_id, chunks, begins // self.block_tokens, blocks)
        state.saved = max(state.saved, last)
        self._reading[move.number] = blocks
        for block in blocks:
            self._readers.setdefault(block, set()).add(move.number)
        return move

    def _fence(self, blocks: Sequence[int], fence: set[int]) -> None:
        if self._readers:
            for block in blocks:
                fence.update(self._readers.get(block, ()))
