"""The shapes of requests, a line each, for `kvloom trace replay`: no tokens, no keys, no salts.

    {"timestamp": 1763870000123.456, "input_length": 6955, "output_length": 0, "hash_ids": [917355, 40021],
     "chunk_tokens": 256, "verb": "retrieve", "salt": 0, "first": 0, "served": {"memory": 512}}

The first four are those of Mooncake's traces; a save also has `copied`, the number of chunks read from the engine. A
hash id stands for a chunk and all before it: a digest with a secret that is only in memory, so that a known text cannot
be recognised among the prompts.

`hash_ids` are of whole chunks only. What follows them is in `pieces`, as `[start, end, id]` with tokens counted from
the first chunk of the line: the sequence's own tail, and what was found in the place of a chunk that was nowhere. From
a token database that cuts anywhere, all that follows the first segment that is no whole chunk is in `pieces`. `first`
and `copied` count chunks, `first_piece` and `copied_pieces` those of the tail. A call about the later chunks of a
sequence alone is a line of these only, and its `input_length` is theirs.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kvloom import ByteSize, Config, Event, KVSpec, Observer, one_line, salt_tag_of

if TYPE_CHECKING:
    from kvloom import Request

log = logging.getLogger("kvloom.trace")

_ID_BYTES = 6
"""The size of a hash id: exact in JSON wherever it is read; among ten million chunks one pair may share one."""
_MOST_SALTS = 1 << 16
"""Tenants that get a number of their own; all others share one."""


class TraceConfig(Config):
    path: Path
    """The file to write to. An existing file is never touched: the second one is called `name.2.jsonl`."""
    max_bytes: ByteSize = Field(default=ByteSize(1 << 30), gt=0)
    """Recording stops before the file is longer."""


class TraceObserver(Observer):
    """Writes a line for each request once it is over. A disk that is full ends the recording and nothing else."""

    type = "trace"
    Config = TraceConfig
    sees_requests = True

    def __init__(self, config: TraceConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._secret = os.urandom(32)
        self._salts: dict[str, int] = {}
        self.path = config.path.expanduser()
        """The path of the file, once there is a first request."""
        self._file: int | None = None
        self._ended = False
        self._left_bytes = int(config.max_bytes)
        if self.path.is_dir():
            raise ValueError(f"path: {self.path} is a directory; name a file in it")
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"path: {self.path.parent} is not a writable directory; make it")
        self.lines = 0
        self.lost = 0
        """Requests that came when recording had ended."""

    def on_event(self, event: Event) -> None:
        """Only requests count."""

    def on_request(self, request: Request, caller: object) -> None:
        """Raises OSError, once, if the file cannot be written to any more."""
        if request.verb == "lookup":  # moves nothing, and a scheduler asks again and again
            return
        if self._ended:
            self.lost += 1
            return
        line = json.dumps(self._line(request), separators=(",", ":")).encode() + b"\n"
        if len(line) > self._left_bytes:
            self._stop("it has its full length")
            self.lost += 1
            return
        try:
            if self._file is None:  # not before: a process that only looks leaves no file behind
                self.path, self._file = _new_file(self.path)
            _write_all(self._file, line)
        except OSError as error:
            self._stop(str(error))
            self.lost += 1
            raise
        self._left_bytes -= len(line)
        self.lines += 1

    def close(self) -> None:
        self._ended = True
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _line(self, request: Request) -> dict[str, object]:
        namespace = request.keys[0].namespace if request.keys else ""
        starts = _starts(request)
        begin, whole = (starts[0] if starts else 0), _whole(request, starts)
        tail = len(request.keys) - whole
        line: dict[str, object] = {
            "timestamp": round(request.began * 1000, 3),
            "input_length": request.num_tokens - begin,
            "output_length": 0,  # unknown to a cache
            "hash_ids": [self._hash_id(key.digest) for key in request.keys[:whole]],
            "chunk_tokens": request.chunk_tokens,
            "verb": request.verb,
            "salt": self._salt(salt_tag_of(namespace)),
            "first": min(request.first, whole),
        }
        own = zip(starts[whole:], request.ends[whole:], request.keys[whole:], strict=True)
        pieces = [
            [start - begin, end - begin, self._hash_id(key.digest)] for start, end, key in (*own, *request.pieces)
        ]
        if pieces:
            line["pieces"] = pieces
        if request.first > whole and tail:
            line["first_piece"] = min(request.first - whole, tail)
        if request.verb == "save":  # of these the engine had computed the KV: a larger cache could have given it
            copied = sum(step.chunks for step in request.steps if step.name == "copy")
            line["copied"] = max(0, copied - tail)  # the last ones
            if tail:
                line["copied_pieces"] = min(copied, tail)
        if request.sources:
            line["served"] = dict(request.sources)
        return line

    def _hash_id(self, digest: bytes) -> int:
        return int.from_bytes(blake2b(digest, digest_size=_ID_BYTES, key=self._secret).digest(), "little")

    def _salt(self, tag: str) -> int:
        if len(self._salts) < _MOST_SALTS:
            return self._salts.setdefault(tag, len(self._salts))
        return self._salts.get(tag, _MOST_SALTS)

    def _stop(self, why: str) -> None:
        log.warning("%s: recording ends after %d requests: %s", self.path, self.lines, one_line(why))
        self.close()


def _starts(request: Request) -> list[int]:
    """The first token of each of a request's segments, which follow one another."""
    if not request.ends:
        return []
    begin = 0 if request.first else max(0, request.ends[-1] - request.tokens)
    return [begin, *request.ends[:-1]]


def _whole(request: Request, starts: Sequence[int]) -> int:
    """The number of leading segments that are whole chunks."""
    step = request.chunk_tokens
    for count, (start, end) in enumerate(zip(starts, request.ends, strict=True)):
        if start % step or end - start != step:
            return count
    return len(starts)


def _new_file(path: Path) -> tuple[Path, int]:
    """A file that was not there before: of several processes each has its own. Raises OSError."""
    for candidate in _names(path):
        try:
            return candidate, os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError:
            continue
    raise AssertionError("there is always another name")


def _names(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.stem}.{number}{path.suffix}")
        number += 1


def _write_all(file: int, line: bytes) -> None:
    """Write all of it or, in the end, nothing: part of a line for which there was no room is removed."""
    before = os.lseek(file, 0, os.SEEK_END)
    done = 0
    try:
        while done < len(line):
            count = os.write(file, line[done:])
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count
    except OSError:
        os.ftruncate(file, before)
        raise
