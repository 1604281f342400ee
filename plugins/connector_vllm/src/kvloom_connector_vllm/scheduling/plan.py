"""The terms that plans are made of: chunks and their owners, moves of KV, and the steps of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
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


NULL = 0
"""The block that the engine has in a table in place of those that it has given up."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that have their blocks from one table of the engine's, and attend to the same tokens.

    Full attention, unless there is a `window` or a `span`, or it is a `state`.
    """

    block_tokens: int
    chunk_tokens: int
    """A multiple of `block_tokens`."""
    window: int = 0
    """Tokens that a token attends to, itself included."""
    span: int = 0
    """A token attends to those before it since the last multiple of so many tokens."""
    state: bool = False
    """A token needs the state behind the one before it, and nothing else. A block holds one state, which is that of its
    last token where the engine says so (`Boundary`); a chunk is a block."""

    @property
    def full(self) -> bool:
        return not (self.window or self.span or self.state)

    def first(self, tokens: int) -> int:
        """The first token that the one after the first `tokens` ones attends to. Grows with `tokens`."""
        if self.window or self.state:
            return max(0, tokens + 1 - (self.window or 2))
        return tokens - tokens % self.span if self.span else 0

    @classmethod
    def of(
        cls, block_tokens: int, *, most: int, hash_tokens: int, window: int = 0, span: int = 0, state: bool = False
    ) -> Group:  # fmt: skip
        """A group with chunks of `most` tokens at most: so short that the engine still has all of a chunk when its last
        token is computed. They are whole blocks and hashes, and divide `most`.
        """
        if state:
            return cls(block_tokens, block_tokens, state=True)
        unit = lcm(block_tokens, hash_tokens)
        fits = (size for size in range(most, 0, -unit) if most % size == 0)
        if window:
            chunk = next((size for size in fits if size <= window), unit)
        else:
            chunk = next((size for size in fits if not span % size), unit)
        return cls(block_tokens, chunk, window, span)


class Chunks(NamedTuple):
    """Consecutive chunks of one sequence, and the pieces that follow them."""

    owner: Owner
    first: int
    """The number of the first, counted from the beginning of the sequence."""
    digests: tuple[bytes, ...]
    pieces: tuple[Piece, ...] = ()
    group: int = 0
    """The number of their group."""


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


class Reads:
    """Saves that are planned or under way, and the blocks that they read. A block has one number, whichever group's
    table it is in."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        """By the number of the save."""
        self._saves: dict[int, set[int]] = {}
        """By block: requests that share a block may both be saving it."""

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def begin(self, save: Move) -> None:
        self.blocks[save.number] = save.blocks
        for block in save.blocks:
            self._saves.setdefault(block, set()).add(save.number)

    def end(self, number: int) -> None:
        for block in self.blocks.pop(number, ()):
            saves = self._saves[block]
            saves.discard(number)
            if not saves:
                del self._saves[block]

    def find(self, blocks: Sequence[int], found: set[int]) -> None:
        """Add the saves that read any of these blocks to `found`."""
        for block in blocks:
            found.update(self._saves.get(block, ()))


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
    uncertain: int = 0
    """A number, if this step computes with KV that another connector loads meanwhile: nothing is saved until the
    workers have reported it, which they do once they know what came."""

    def __bool__(self) -> bool:
        return any((self.loads, self.saves, self.ended, self.touched, self.fence, self.cancelled, self.uncertain))


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
    blocks: Sequence[Sequence[int]]
    """By group, all of its blocks if `fresh`, otherwise those that are new. Empty: none."""
    fresh: bool
    """It was not running before: new, or back after a preemption."""
    computed: int
    """Number of tokens whose KV is in place before the step."""
    after: int
    """Tokens whose KV is certain to be there after it: without those that are only guessed."""


class Boundary(NamedTuple):
    """A block that holds the state at a boundary of blocks once the step has been computed, and until it is given to
    another request."""

    request: str
    group: int
    block: int
    tokens: int
    """The number of tokens that the state stands for."""


class Offer(NamedTuple):
    """The KV of one group that the tiers hold for a request, as far as it is needed."""

    chunks: int = 0
    """Number of whole chunks from the beginning on, those included that are not needed."""
    pieces: tuple[Piece, ...] = ()
    """Those that follow them."""


class Hit(NamedTuple):
    """The KV that the tiers hold for a request."""

    tokens: int
    """Length of the prefix, the part that the engine has itself included."""
    offers: tuple[Offer, ...]
    """By group."""


NOTHING = Hit(0, ())
