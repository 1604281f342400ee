"""The saves of requests: which chunks and pieces, when, and out of which blocks. Knows no vLLM.

Blocks may be freed while they are being saved: it is remembered here which blocks are being read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from kvloom import leading

from .plan import NOTHING, NULL, Boundary, Chunks, Group, Hit, Move, Owner, Reads, Request, Scheduled
from .tail import Piece, Pieces


@dataclass(slots=True)
class Track:
    """A request's KV in one group of layers."""

    group: int
    blocks: list[int] = field(default_factory=list)
    saved: int = 0
    """Chunks that are stored, were planned to be, or cannot be any more."""
    tail_saved: bool = False
    """The tail of the prompt is, too, or there is none."""


@dataclass(slots=True)
class State:
    """A request that is known, until it is over or preempted."""

    request: Request
    owner: Owner
    tracks: tuple[Track, ...]
    prompt_tokens: int
    """Number of tokens of its prompt, when it was last looked at."""
    due: float = 0
    """Nothing is to be saved in a step after which there are fewer tokens."""
    computed: int = 0
    """Tokens whose KV is certain to be there once the steps so far have been computed."""
    offered: Hit = NOTHING
    """The answer when it was last asked what could be loaded."""
    begun: int = 0
    """Tokens that were there locally when it was last asked what could be loaded."""
    loading: bool = False
    failed: bool = False
    """Something did not come that was said to be there: it computes itself, instead of trying again for ever."""
    sealed: bool = False
    """The request began before a reset: its KV is not loaded or saved any more."""

    def prolong(self) -> None:
        """Have its tail saved again if the engine has made its prompt longer, by another input of a session."""
        if self.prompt_tokens != self.request.num_prompt_tokens:
            self.prompt_tokens = self.request.num_prompt_tokens
            self.due = 0
            for track in self.tracks:
                track.tail_saved = False


class Naming:
    """The names of requests' chunks and pieces, by group."""

    def __init__(self, groups: Sequence[Group], *, hash_tokens: int, tails: bool) -> None:
        """hash_tokens: tokens per block hash. tails: what a prompt has behind its last whole chunk has names, too."""
        self.groups = tuple(groups)
        self.pieces = tuple(
            Pieces(
                chunk_tokens=group.chunk_tokens, block_tokens=group.block_tokens, hash_tokens=hash_tokens, keep=tails
            )
            for group in groups
        )
        self.hash_tokens = hash_tokens

    def complete(self, state: State, group: int, tokens: int) -> int:
        """Whole chunks within `tokens` that have a name."""
        return min(tokens, len(state.request.block_hashes) * self.hash_tokens) // self.groups[group].chunk_tokens

    def named(self, state: State, group: int, first: int, last: int) -> Chunks:
        step = self.groups[group].chunk_tokens // self.hash_tokens
        last_hashes = state.request.block_hashes[(first + 1) * step - 1 : last * step : step]
        return Chunks(state.owner, first, tuple(map(bytes, last_hashes)), (), group)

    def prompt(self, state: State, track: Track) -> Chunks:
        """A request's prompt, as it is kept: all of it, or the part that is attended to behind it."""
        tokens = state.request.num_prompt_tokens
        last = self.complete(state, track.group, tokens)
        group = self.groups[track.group]
        first = min(last, group.first(last * group.chunk_tokens if group.state else tokens) // group.chunk_tokens)
        return self.named(state, track.group, first, last)._replace(pieces=self.tail(state, track, last, tokens))

    def tail(self, state: State, track: Track, number: int, tokens: int) -> tuple[Piece, ...]:
        """The pieces that keep the first `tokens` tokens behind their `number` whole chunks."""
        pieces = self.pieces[track.group].of(state.request.block_hashes, number)
        there = [piece for piece in pieces if piece.end <= tokens]
        return tuple(leading(there, number * self.groups[track.group].chunk_tokens))


class Saves:
    """Saves that are due, and those that are planned or under way."""

    def __init__(self, naming: Naming, numbers: Iterator[int], *, save_generated: bool) -> None:
        """numbers: of the operations. save_generated: chunks with generated tokens too."""
        self.reads = Reads()
        self.ended: list[Move] = []
        """Saves of requests that are over, of which no worker knows yet."""
        self._naming = naming
        self._groups = naming.groups
        self._numbers = numbers
        self._save_generated = save_generated

    def due(self, state: State, one: Scheduled) -> list[Move]:
        """Save what is due of a request once this step has been computed, and note after how many tokens something is
        due again."""
        state.due = inf
        moves = []
        for track in state.tracks:
            if one.after >= self._due(state, track):
                moves.append(self._save(state, track, one))
            state.due = min(state.due, self._due(state, track))
        return [move for move in moves if move is not None]

    def at_boundary(self, state: State, boundary: Boundary) -> Move | None:
        """Save a state, if its chunk has a name and is not saved."""
        group = self._groups[boundary.group]
        chunk, part = divmod(boundary.tokens, group.block_tokens)
        if part or boundary.block == NULL:
            return None
        track = state.tracks[boundary.group]
        tokens = self._kept(state, boundary.tokens)
        if not track.saved < chunk <= self._naming.complete(state, boundary.group, tokens):
            return None
        track.saved = chunk
        return self._read(state, self._naming.named(state, boundary.group, chunk - 1, chunk), (boundary.block,))

    def at_end(self, state: State, blocks: Sequence[Sequence[int]]) -> tuple[Move, ...]:
        """Save what a request that is over has computed beyond what is saved, its last whole blocks included.

        blocks: by group, all that it had. The moves are in `ended`, too, until a step takes them.
        """
        moves = (self._save_end(state, track, table) for track, table in zip(state.tracks, blocks, strict=False))
        ended = tuple(move for move in moves if move is not None)
        self.ended += ended
        return ended

    def take_ended(self, fence: set[int], *, now: bool) -> tuple[Move, ...]:
        """The saves of requests that are over, but for those that this step would wait for: these are left out.

        fence: saves that the step waits for, from which those that are left out are removed. now: False to leave the
        others to a later step.
        """
        self.drop(lambda save: save.number in fence)
        fence.intersection_update(self.reads.blocks)
        if not now:
            return ()
        ended, self.ended = self.ended, []
        return tuple(ended)

    def drop(self, unwanted: Callable[[Move], bool]) -> None:
        """Leave out saves of requests that are over, before any worker knows of them."""
        self.done([save.number for save in self.ended if unwanted(save)])
        self.ended = [save for save in self.ended if save.number in self.reads.blocks]

    def done(self, saves: Iterable[int]) -> None:
        """These read nothing more."""
        for number in saves:
            self.reads.end(number)

    def _kept(self, state: State, tokens: int) -> int:
        """The first of these tokens, as far as they are to be kept."""
        return tokens if self._save_generated else min(tokens, state.request.num_prompt_tokens)

    def _due(self, state: State, track: Track) -> float:
        """Tokens after which there is KV that is not saved, if they are computed. States are saved when they are
        named."""
        group = self._groups[track.group]
        if group.state:
            return inf
        prompt, whole = state.request.num_prompt_tokens, (track.saved + 1) * group.chunk_tokens
        if not self._save_generated and whole > prompt:
            return inf if track.tail_saved else prompt
        return whole if track.tail_saved else min(whole, prompt)

    def _save(self, state: State, track: Track, one: Scheduled) -> Move | None:
        naming, group, prompt = self._naming, self._groups[track.group], state.request.num_prompt_tokens
        tokens = min(one.after, len(track.blocks) * group.block_tokens)
        pieces: tuple[Piece, ...] = ()
        if tokens >= prompt:
            number = naming.complete(state, track.group, prompt)
            pieces = () if track.tail_saved or track.saved > number else naming.tail(state, track, number, prompt)
            track.tail_saved = True
        last = naming.complete(state, track.group, self._kept(state, tokens))
        if pieces and last > pieces[0].start // group.chunk_tokens:
            pieces = ()  # the chunk is whole by now
        # The engine keeps what the first token of this step attends to, and may have given up anything before it.
        return self._move(state, track, last, pieces, track.blocks, group.first(one.computed) // group.block_tokens)

    def _save_end(self, state: State, track: Track, blocks: Sequence[int]) -> Move | None:
        naming, group = self._naming, self._groups[track.group]
        if group.state:
            return None
        # The last token was chosen, and not computed with.
        tokens = min(state.computed, state.request.num_tokens - 1, len(blocks) * group.block_tokens)
        tokens = self._kept(state, tokens)
        last = naming.complete(state, track.group, tokens)
        saved = naming.prompt(state, track).pieces if track.tail_saved else ()
        pieces = tuple(piece for piece in naming.tail(state, track, last, tokens) if piece not in saved)
        return None if track.saved > last else self._move(state, track, last, pieces, blocks, 0)

    def _move(
        self, state: State, track: Track, last: int, pieces: tuple[Piece, ...], table: Sequence[int], gone: int
    ) -> Move | None:
        """Save a request's chunks up to `last`, and pieces behind them, as far as the engine still has them.

        table: its blocks, of which the first `gone` ones may have been given up.
        """
        group = self._groups[track.group]
        size, step = group.block_tokens, group.chunk_tokens
        first, track.saved = min(track.saved, last), max(track.saved, last)
        ends = pieces[-1].end if pieces else last * step
        if not group.full:
            while gone < ends // size and table[gone] == NULL:
                gone += 1
            first = max(first, -(-gone * size // step))
            pieces = pieces if pieces and pieces[0].start >= gone * size else ()
            ends = pieces[-1].end if pieces else last * step
        if not (first < last or pieces):
            return None
        begins = first * step if first < last else pieces[0].start
        chunks = self._naming.named(state, track.group, min(first, last), last)._replace(pieces=pieces)
        return self._read(state, chunks, tuple(table[begins // size : ends // size]))

    def _read(self, state: State, chunks: Chunks, blocks: tuple[int, ...]) -> Move:
        """A save of these chunks, which reads these blocks until it is done."""
        group = self._groups[chunks.group]
        begins = chunks.first * group.chunk_tokens if chunks.digests else chunks.pieces[0].start
        move = Move(next(self._numbers), state.request.request_id, chunks, begins // group.block_tokens, blocks)
        self.reads.begin(move)
        return move
