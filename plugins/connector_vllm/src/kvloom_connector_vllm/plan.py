"""The terms that plans are made of: chunks and their owners, moves of KV, and the steps of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .tail import Piece


class Owner(NamedTuple):
    """The owner of chunks, beside what their digests cover."""

    adapter: str = ""
    """Name and digest of the weights of a LoRA adapter."""
    tenant: str = "-"
    """`salt_tag` of the cache salt: clients write salts, of any length, and this is kept and sent with each step."""
    generation: str = ""
    """A text that changes with each reset, so that older KV has other names."""


class Chunks(NamedTuple):
    """Consecutive chunks of one sequence, and the pieces that follow them."""

    owner: Owner
    first: int
    """The number of the first, counted from the beginning of the sequence."""
    digests: tuple[bytes, ...]
    pieces: tuple[Piece, ...] = ()


class Move(NamedTuple):
    """KV of consecutive chunks and pieces, from or to the engine's blocks."""

    number: int
    """The operation's number."""
    request: str
    chunks: Chunks
    first_block: int
    """First block of `blocks`, counted in the sequence, in blocks."""
    blocks: tuple[int, ...]
    """The ids of all blocks of the chunks, in order; -1 for those that are left alone."""


@dataclass(frozen=True, slots=True)
class Step:
    """The worker's job in one step of the engine, beside computing."""

    loads: tuple[Move, ...] = ()
    saves: tuple[Move, ...] = ()
    """Saves that include KV of this step: begun when it has been computed."""
    ended: tuple[Move, ...] = ()
    """Saves of requests that are over: begun before this step computes, which gives none of their blocks away."""
    touched: tuple[Chunks, ...] = ()
    """Chains that are in use, the part that the engine's own prefix cache had included."""
    fence: tuple[int, ...] = ()
    """Saves that have to be done reading, or given up, before this step computes."""
    cancelled: tuple[str, ...] = ()
    """Requests whose loads are no longer waited for."""

    def __bool__(self) -> bool:
        return any((self.loads, self.saves, self.ended, self.touched, self.fence, self.cancelled))


IDLE = Step()


class Request(Protocol):
    """The part of an engine's request that is read here; it is live, and its hashes grow."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_prompt_tokens: int


class Scheduled(NamedTuple):
    """A request's part of one step."""

    request: str
    blocks: Sequence[int]
    """All of its blocks if `fresh`, otherwise those that are new."""
    fresh: bool
    """It was not running before: new, or back after a preemption."""
    computed: int
    """Number of tokens whose KV is in place before the step."""
    after: int
    """Tokens whose KV is certain to be there after it: without those that are only guessed."""


class Offer(NamedTuple):
    """The KV that the tiers hold for a request."""

    chunks: int = 0
    """Number of whole chunks from the beginning on, those included that the engine has itself."""
    pieces: tuple[Piece, ...] = ()
    """Those that follow them."""


NOTHING = Offer()
