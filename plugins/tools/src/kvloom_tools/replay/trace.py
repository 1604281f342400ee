"""Reading a trace: one request a line, as `kvloom trace record` and Mooncake's public traces have it.

    {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds. A hash id stands for a block of tokens and all before it, so that equal ids are equal
prefixes. kvloom's own lines have more: see `kvloom_tools.trace_observer`.
"""

from __future__ import annotations

import gzip
import json
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvloom import ConfigError, leading

BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""
VERBS = frozenset(
    {"", "retrieve", "store", "retrieve_layer", "store_layer", "load", "save", "prefetch", "pin", "lookup"}
)
_AHEAD = 1 << 15
"""So many lines are put in order at once: an engine tells of a request when its writes are over."""
_AHEAD_BLOCKS = 1 << 20
"""So many blocks and pieces of lines, at most: each takes some 40 bytes."""
_MOST_LINE_BYTES = 16 << 20
_MOST_RATIO = 250
"""The highest ratio of unpacked to packed bytes. Traces have a ratio of some 20."""
_SHOWN = 5
"""The number of broken lines that are kept to be shown."""


class Piece(NamedTuple):
    """Part of a chunk."""

    start: int
    end: int
    entry: int
    """The name under which tiers hold it; see `piece_entry`."""


class Tail(NamedTuple):
    """The pieces of a request."""

    own: tuple[Piece, ...]
    """Those behind the last whole block of the sequence, in order."""
    others: tuple[Piece, ...] = ()
    """Those that shorter sequences had left of the first block or piece that was nowhere."""
    first: int = 0
    """The number of leading pieces of its own that were not asked for, because the engine had them."""
    asked: int = 0
    """For a save: leading pieces of its own that the engine did not compute."""


class Line(NamedTuple):
    """One request."""

    seconds: float
    """The time at which it began, counted from any moment."""
    input_tokens: int
    """Tokens of the whole prompt, with the tail that fills no block."""
    hash_ids: list[int]
    """One for each block of `block_tokens`, in order; the last may be of a block that is not full."""
    block_tokens: int
    verb: str = ""
    """The engine's verb; "" for a prompt that was looked up and then stored."""
    salt: int = 0
    """The number of the tenant."""
    first: int = 0
    """The number of leading blocks that were not asked for, because the engine had them."""
    served: dict[str, int] = {}  # noqa: RUF012 - never changed
    """Tokens that the recorded engine got, by tier."""
    asked: int = 0
    """For a save: leading blocks that the engine did not compute. kvloom had them already, so the engine's own cache
    had them too, or they were loaded and are counted there."""
    tail: Tail | None = None
    """None: there are whole blocks only."""


class Broken(NamedTuple):
    """A line that is no request."""

    number: int
    why: str


@dataclass
class Trace:
    """A trace in a file, gzipped or not. Go through it once; what was wrong with it is known afterwards."""

    path: Path
    block_tokens: int | None = None
    """Block size of lines that give none; None: 512, as in Mooncake's."""
    chunk_tokens: int | None = None
    """Tokens of the smallest chunks that are made of it; None: chunks are blocks."""
    lines: int = 0
    """Read so far, broken ones too, empty ones not."""
    broken: int = 0
    first_broken: list[Broken] = field(default_factory=list)
    late: int = 0
    """Lines that began before one that was replayed already."""

    def requests(self, progress: Callable[[int], None] = lambda num_bytes: None) -> Iterator[Line]:
        """In the order in which they began. progress: told of bytes of the file that were read.

        Raises ConfigError with the path if it cannot be read at all, or has a line longer than any trace's.
        """
        waiting: list[Line] = []
        blocks, ends = 0, 0.0
        for line in self._parsed(progress):
            waiting.append(line)
            blocks += _size(line)
            if len(waiting) >= 2 * _AHEAD or blocks >= 2 * _AHEAD_BLOCKS:
                waiting.sort(key=_seconds)
                half = max(1, len(waiting) // 2)
                now, waiting = waiting[:half], waiting[half:]
                blocks -= sum(map(_size, now))
                self.late += sum(one.seconds < ends for one in now)
                ends = now[-1].seconds
                yield from now
        waiting.sort(key=_seconds)
        yield from waiting

    def _parsed(self, progress: Callable[[int], None]) -> Iterator[Line]:
        number = 0
        for text in self._texts(progress):
            number += 1
            if not text.strip():
                continue
            self.lines += 1
            try:
                yield _line(text, self.block_tokens or BLOCK_TOKENS, self.chunk_tokens)
            except (ValueError, TypeError) as error:
                self._broke(number, str(error))

    def _broke(self, number: int, why: str) -> None:
        self.broken += 1
        if len(self.first_broken) < _SHOWN:
            self.first_broken.append(Broken(number, why))

    def _texts(self, progress: Callable[[int], None]) -> Iterator[bytes]:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # opening a pipe waits, and a device may have no end
                raise ConfigError(str(self.path), "is no regular file; name one that has a trace")
            with self.path.open("rb") as file:
                packed = file.peek(2)[:2] == b"\x1f\x8b"
                source: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
                at = unpacked = number = 0
                while text := source.readline(_MOST_LINE_BYTES + 1):
                    unpacked += len(text)
                    number += 1
                    if packed and unpacked > _MOST_RATIO * file.tell() + _MOST_LINE_BYTES:
                        raise EOFError("no trace is packed as tightly")
                    if len(text) > _MOST_LINE_BYTES:
                        problem = f"line {number} has more than {_MOST_LINE_BYTES} bytes; name a file with a trace"
                        raise ConfigError(str(self.path), problem)
                    yield text
                    if self.lines % 1024 == 0:
                        progress(file.tell() - at)
                        at = file.tell()
                progress(file.tell() - at)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # what came before it counts
            self.lines += 1
            self._broke(self.lines, f"the file is cut short or damaged from here on: {error}")
        except OSError as error:
            raise ConfigError(str(self.path), f"cannot be read: {error.strerror}") from None


def _seconds(line: Line) -> float:
    return line.seconds


def _size(line: Line) -> int:
    """Its blocks and pieces."""
    tail = line.tail
    return len(line.hash_ids) + (0 if tail is None else len(tail.own) + len(tail.others))


def _line(text: bytes, block_tokens: int, chunk_tokens: int | None) -> Line:
    """Raises ValueError or TypeError that says what is wrong."""
    try:
        value = json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"should be an object, not {type(value).__name__}")
    get = value.get
    stamp, length, ids = get("timestamp"), get("input_length"), get("hash_ids")
    if not isinstance(stamp, int | float) or stamp is True or stamp is False or not abs(stamp) < 1e15:  # NaN is not
        raise ValueError("timestamp: should be milliseconds")
    if type(length) is not int or not 0 <= length < _MOST_TOKENS:
        raise ValueError(f"input_length: should be a number of tokens, fewer than {_MOST_TOKENS}")
    if type(ids) is not list or not set(map(type, ids)) <= _INTEGERS or (ids and min(ids) < 0):
        raise ValueError("hash_ids: should be a list of whole numbers from 0")
    if len(set(ids)) < len(ids):
        raise ValueError("hash_ids: a block is there twice")
    own = len(value) > 3 + ("output_length" in value)  # more than Mooncake's fields
    if own:
        block_tokens = get("chunk_tokens", block_tokens)
        if type(block_tokens) is not int or not 1 <= block_tokens <= _MOST_BLOCK_TOKENS:
            raise ValueError(f"chunk_tokens: should be a number of tokens, at most {_MOST_BLOCK_TOKENS}")
    if (len(ids) - 1) * block_tokens >= max(length, 1):
        raise ValueError(f"hash_ids: {len(ids)} blocks of {block_tokens} are more than {length} tokens")
    chunks = min(length, len(ids) * block_tokens) // (chunk_tokens or block_tokens)
    most = max(len(ids), min(_MOST_CHUNKS, _MOST_PARTS * len(ids)))
    if chunks > most:
        raise ValueError(f"hash_ids: {chunks} chunks of {chunk_tokens} tokens; of {len(ids)} blocks at most {most}")
    if not own:
        if len(ids) < length // block_tokens:
            raise ValueError(f"hash_ids: {len(ids)} blocks of {block_tokens} are fewer than {length} tokens")
        return _new((stamp / 1000, length, ids, block_tokens, "", 0, 0, _NOTHING, 0, None))
    tail = _tail(value, len(ids), block_tokens, length) if "pieces" in value else None
    return _new((stamp / 1000, length, ids, block_tokens, *_own(value, len(ids)), tail))


_INTEGERS = {int}
_MOST_TOKENS = 1 << 31
_MOST_BLOCK_TOKENS = 1 << 20
_MOST_PARTS = 1 << 10
"""So many chunks of a block, at most: one of 8,192 tokens in chunks of 16 has half."""
_MOST_CHUNKS = 1 << 18
"""So many chunks of a line, at most, where they are parts of its blocks: 4 million tokens in chunks of 16. Each takes
some 200 bytes in each configuration, and a line of 40 bytes may have a thousand million tokens."""
_MOST_PIECES = 1 << 16
_MOST_ID = 1 << 64
_NOTHING: dict[str, int] = {}


def _new(fields: tuple[Any, ...]) -> Line:
    return tuple.__new__(Line, fields)


def _are_counts(numbers: Collection[Any]) -> bool:
    return set(map(type, numbers)) <= _INTEGERS and min(numbers, default=0) >= 0


def _own(value: dict[str, Any], blocks: int) -> tuple[str, int, int, dict[str, int], int]:
    """The fields that only kvloom's lines have."""
    verb, salt, first, served = value.get("verb", ""), value.get("salt", 0), value.get("first", 0), value.get("served")
    if verb not in VERBS:
        raise ValueError(f"verb: {str(verb)[:40]!r} is none that is known")
    if type(salt) is not int:
        raise ValueError("salt: should be a whole number")
    if type(first) is not int or not 0 <= first <= blocks:
        raise ValueError("first: should be the number of a block")
    if served is not None and not (isinstance(served, dict) and _are_counts(served.values())):
        raise ValueError("served: should be tokens by tier")
    copied = value.get("copied")
    if copied is not None and (type(copied) is not int or copied < 0):
        raise ValueError("copied: should be a number of blocks")
    return verb, salt, first, served or _NOTHING, first if copied is None else max(first, blocks - copied)


# -- pieces ------------------------------------------------------------------------------------------------------------


def piece_entry(number: int, tokens: int, block_tokens: int) -> int:
    """The name under which tiers hold a piece: negative, and says its length. One as long as a block is a block."""
    return number if tokens == block_tokens else -(number * _MOST_TOKENS + tokens)


def piece_tokens(entry: int) -> int:
    """The tokens of a piece."""
    return -entry % _MOST_TOKENS


def tail_of(pieces: Sequence[tuple[int, int, int]], whole_tokens: int, block_tokens: int) -> Tail:
    """From starts, ends and ids. whole_tokens: of the whole blocks before the tail."""
    found = [Piece(start, end, piece_entry(number, end - start, block_tokens)) for start, end, number in pieces]
    own = leading(sorted(found, key=_end), whole_tokens)
    return Tail(tuple(own), tuple(piece for piece in found if piece not in own))


def _end(piece: Piece) -> int:
    return piece.end


def _tail(value: dict[str, Any], blocks: int, block_tokens: int, length: int) -> Tail:
    """Raises ValueError that says what is wrong."""
    pieces = value["pieces"]
    if type(pieces) is not list or len(pieces) > _MOST_PIECES:
        raise ValueError("pieces: should be a list of [start, end, id]")
    for piece in pieces:
        if type(piece) is not list or len(piece) != 3 or not set(map(type, piece)) <= _INTEGERS:
            raise ValueError("pieces: should be a list of [start, end, id]")
        start, end, number = piece
        if not (0 <= start < end <= min(length, start + block_tokens) and 0 <= number < _MOST_ID):
            raise ValueError(
                f"pieces: {str(piece)[:80]} is no part of a block of {block_tokens} within {length} tokens"
            )
    tail = tail_of(pieces, blocks * block_tokens, block_tokens)
    entries = [*value["hash_ids"], *(piece.entry for piece in (*tail.own, *tail.others))]
    if len(set(entries)) < len(entries):
        raise ValueError("pieces: one is there twice, or is a block, too")
    first, copied = value.get("first_piece", 0), value.get("copied_pieces")
    if type(first) is not int or not 0 <= first <= len(tail.own):
        raise ValueError("first_piece: should be the number of a piece of the tail")
    if copied is not None and (type(copied) is not int or copied < 0):
        raise ValueError("copied_pieces: should be a number of pieces")
    asked = first if copied is None else max(first, len(tail.own) - copied)
    return tail._replace(first=first, asked=asked)
