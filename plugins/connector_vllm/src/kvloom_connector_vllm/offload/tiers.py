"""Tiers for pieces that vLLM's own offloading names by hash: failures are misses."""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvloom import ChunkKey, ConfigError, Engine, EngineConfig, KVSpec, Segment, one_line, salt_tag

from .pages import OffloadPagesConnector
from .settings import PieceGeometry

log = logging.getLogger(__name__)

CLOSING_SECONDS = 30.0
"""Time to write accepted chunks when the engine ends."""

IDLE_SECONDS = 0.005
"""Minimum time of a step while something is under way. Otherwise vLLM runs hundreds of empty steps for a load, which
keep the interpreter from the threads that load."""

_MOST_WARNINGS = 100
"""Different texts; what is said after them is only for debugging."""

_T = TypeVar("_T")


class Found(enum.Enum):
    HIT = "it is in a slot, verified, until the step is over"
    COMING = "it is there as far as the tiers say, and is being read or written"
    ASKED = "the tiers are being asked"
    MISS = "it is not there, or not in time"


@dataclass(eq=False, slots=True)
class Asking:
    """One request's questions."""

    answers: dict[bytes, bool | None] = field(default_factory=dict)
    """Answers of the tiers; None while they are asked."""
    since: float | None = None
    """Time at which it first had to wait."""

    def waited(self, now: float) -> float:
        """Seconds since it first had to."""
        if self.since is None:
            self.since = now
        return now - self.since


class Pace:
    """Waits in steps that follow each other fast: they compute nothing, which vLLM does not say."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last = now, -math.inf

    def __call__(self, under_way: Collection[Future[Any]]) -> None:
        """Wait until one of them is over, at most until IDLE_SECONDS after the last call."""
        left = self._last + IDLE_SECONDS - self._now()
        if left > 0 and under_way and not any(one.done() for one in under_way):
            wait(under_way, left, FIRST_COMPLETED)
        self._last = self._now()


class Tiers:
    """An engine whose chunks are pieces, and where failures are misses: for any number of threads."""

    def __init__(self, config: EngineConfig, spec: KVSpec, geometry: PieceGeometry, *, timeout: float = 30.0) -> None:
        """timeout: seconds that `find`, `load` and `save` may take. Raises ConfigError for a wrong configuration."""
        self._engine = Engine.open(_completed(config, geometry), spec)
        self._namespace = f"{self._engine.fingerprint}/{salt_tag(config.salt)}"
        self._timeout = timeout
        self._warned: set[str] = set()

    @property
    def engine(self) -> Engine:
        return self._engine

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether the tiers report it. A tier that has not answered in time reports nothing."""

        def find() -> list[bool]:
            found: list[bool] = self._engine.find(self._segments(keys), timeout=self._timeout).tolist()
            return found

        return self._forgiving("find", find, [False] * len(keys))

    def load(self, keys: Sequence[bytes], **where: Any) -> list[bool]:
        """Load the keys; for each, whether it is in place, every byte verified. After return nothing is written any
        more."""

        def load() -> list[bool]:
            loaded: list[bool] = self._engine.load(self._segments(keys), **where).result(self._timeout).tolist()
            return loaded

        return self._forgiving("load", load, [False] * len(keys))

    def save(self, keys: Sequence[bytes], **where: Any) -> bool:
        """Keep them. On return nothing is read any more."""

        def save() -> bool:
            self._engine.save(self._segments(keys), **where).result(self._timeout)
            return True

        return self._forgiving("save", save, False)

    def clear(self) -> bool:
        """Delete everything of this model; whether all of it is gone."""

        def clear() -> bool:
            self._engine.clear()
            return True

        return self._forgiving("clear", clear, False)

    def close(self) -> None:
        self._forgiving("close", self._engine.close, None)

    def _segments(self, keys: Sequence[bytes]) -> list[Segment]:
        # vLLM's hash covers all that comes before, but does not say how much: each piece is by itself. It is the same
        # for all models, and a tier tells chunks apart by their digests.
        begun = hashlib.sha256(f"{self._namespace}/".encode())
        digests = (_digest(begun, key) for key in keys)
        return [Segment(at, at + 1, ChunkKey(self._namespace, 0, digest)) for at, digest in enumerate(digests)]

    def _forgiving(self, verb: str, work: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return work()
        except Exception as error:
            text = one_line(f"{verb}: {type(error).__name__}: {error}")
            new = text not in self._warned and len(self._warned) < _MOST_WARNINGS
            if new:
                self._warned.add(text)
            log.log(logging.WARNING if new else logging.DEBUG, "%s", text)
            return otherwise


def _digest(begun: hashlib._Hash, key: bytes) -> bytes:
    whole = begun.copy()
    whole.update(key)
    return whole.digest()


def _completed(config: EngineConfig, geometry: PieceGeometry) -> EngineConfig:
    """The configuration with what vLLM says. Raises ConfigError for what would have no effect or be wrong."""
    default = EngineConfig()
    if config.connector.type not in (OffloadPagesConnector.type, default.connector.type):
        text = f"{config.connector.type!r} does not read what vLLM offloads; write connector: vllm_offload"
        raise ConfigError("connector", text)
    if config.tokens.type != default.tokens.type:
        raise ConfigError("tokens", "vLLM's own block hashes name the chunks; remove this block")
    if config.blend is not None:
        raise ConfigError("blend", "vLLM only reuses KV of prefixes; remove this block")
    block = type(config.connector)(type=OffloadPagesConnector.type, geometry=geometry.model_dump())
    return config.model_copy(update={"connector": block, "chunk_tokens": 1})
