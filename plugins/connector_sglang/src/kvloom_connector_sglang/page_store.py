"""HiCache's pages in kvloom's tiers, by SGLang's hashes. Nothing here raises once it is open."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvloom import ChunkKey, ConfigError, Engine, EngineConfig, KVSpec, Segment, one_line, salt_tag

from .settings import Geometry

logger = logging.getLogger("kvloom.connector_sglang")

_MOST_WARNINGS = 100
"""Different texts; what is said after them is only for debugging."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Moved:
    """One call that moved pages."""

    pages: int
    bytes: int
    seconds: float


class PageStore:
    """The pages of one rank. Called from several threads at once.

    config: what the YAML file says. timeout: seconds that a call may take to move pages or ask for them; afterwards it
    is a miss, and SGLang's memory is left alone. `clear` and `close` end with the tiers' deadlines. Raises ConfigError
    if it cannot work.
    """

    def __init__(self, config: EngineConfig, spec: KVSpec, geometry: Geometry, *, timeout: float = 30.0) -> None:
        self._page_tokens = geometry.page_tokens
        self._timeout = timeout
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._reads: list[Moved] = []
        self._writes: list[Moved] = []
        self._page_bytes = geometry.page_elements * spec.torch_dtype.itemsize
        self._engine = Engine.open(_completed(config, geometry), spec)
        self._namespace = f"{self._engine.fingerprint}/{salt_tag(config.salt)}"

    @property
    def engine(self) -> Engine:
        return self._engine

    def exists(self, keys: Sequence[str]) -> int:
        """Count the leading pages that the tiers report."""
        found = self._forgiving("find", lambda: self._engine.find(self._segments(keys), timeout=self._timeout), None)
        return 0 if found is None else _leading(found)

    def get(self, keys: Sequence[str], **where: Any) -> list[bool]:
        """Fill pages; which of them hold their KV now, every byte of it verified. where: as for the connector."""
        began = time.monotonic()

        def load() -> torch.Tensor:
            return self._engine.load(self._segments(keys), **where).result(self._timeout)

        loaded = self._forgiving("get", load, None)
        there = [False] * len(keys) if loaded is None else loaded.tolist()
        self._moved("read", self._reads, there, began)
        return there

    def set(self, keys: Sequence[str], **where: Any) -> list[bool]:
        """Keep pages; which of them the tiers now say they hold. SGLang may overwrite them on return.

        Where no memory tier takes them, this waits until they are written.
        """
        began = time.monotonic()

        def left() -> float:
            return max(0.0, began + self._timeout - time.monotonic())

        def save() -> torch.Tensor:
            segments = self._segments(keys)
            self._engine.save(segments, **where).result(self._timeout)
            found = self._engine.find(segments, timeout=left())
            if not found.all() and self._engine.flush(left()):  # pages being written are not found yet
                found = self._engine.find(segments, timeout=left())
            return found

        kept = self._forgiving("set", save, None)
        there = [False] * len(keys) if kept is None else kept.tolist()
        self._moved("written", self._writes, there, began)
        return there

    def clear(self) -> bool:
        """Delete every page of this model and rank, under any salt; whether all of it is gone."""

        def clear() -> bool:
            self._engine.clear()
            return True

        return self._forgiving("clear", clear, False)

    def counts(self) -> Mapping[str, int]:
        """Pages `read`, `not read`, `written`, `not written`, and calls that `failed`."""
        with self._lock:
            return dict(self._counts)

    def take_moved(self) -> tuple[list[Moved], list[Moved]]:
        """The calls that read and wrote pages since this was last asked."""
        with self._lock:
            reads, self._reads = self._reads, []
            writes, self._writes = self._writes, []
        return reads, writes

    def miss(self, pages: int, why: str) -> list[bool]:
        """Count pages that were not moved because of how they were asked for."""
        self._complain(why)
        with self._lock:
            self._counts["refused"] += pages
        return [False] * pages

    def close(self) -> None:
        """Write accepted pages, within the tiers' deadlines. Idempotent."""
        self._forgiving("close", self._engine.close, None)

    def _segments(self, keys: Sequence[str]) -> list[Segment]:
        # SGLang's hash covers all that comes before a page, but does not say how much: each page is by itself. It is
        # the same for all models and ranks, and a tier tells chunks apart by their digests.
        step = self._page_tokens
        digests = (hashlib.sha256(f"{self._namespace}/{key}".encode()).digest() for key in keys)
        return [
            Segment(number * step, (number + 1) * step, ChunkKey(self._namespace, 0, digest))
            for number, digest in enumerate(digests)
        ]

    def _moved(self, verb: str, log: list[Moved], there: Sequence[bool], began: float) -> None:
        pages = sum(there)
        with self._lock:
            self._counts[verb] += pages
            self._counts[f"not {verb}"] += len(there) - pages
            if pages:
                log.append(Moved(pages, pages * self._page_bytes, time.monotonic() - began))
                del log[:-1024]  # it is not read

    def _forgiving(self, verb: str, work: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return work()
        except Exception as error:
            self._complain(f"{verb}: {type(error).__name__}: {error}")
            with self._lock:
                self._counts["failed"] += 1
            return otherwise

    def _complain(self, text: str) -> None:
        said = one_line(text)
        with self._lock:
            new = said not in self._warned and len(self._warned) < _MOST_WARNINGS
            if new:
                self._warned.add(said)
        logger.log(logging.WARNING if new else logging.DEBUG, "%s", said)


def _completed(config: EngineConfig, geometry: Geometry) -> EngineConfig:
    """The configuration with what SGLang says. Raises ConfigError for what would have no effect or be wrong."""
    if config.connector.type not in ("sglang", EngineConfig().connector.type):
        text = f"{config.connector.type!r} does not read SGLang's memory; write connector: sglang"
        raise ConfigError("connector", text)
    if config.tokens.type != EngineConfig().tokens.type:
        raise ConfigError("tokens", "SGLang's own hashes name the pages; remove this block")
    if config.blend is not None:
        raise ConfigError("blend", "SGLang only reuses KV of prefixes; remove this block")
    block = config.connector.model_copy(update={"type": "sglang"})
    block.model_extra["geometry"] = geometry.model_dump()  # type: ignore[index]
    return config.model_copy(update={"connector": block, "chunk_tokens": geometry.page_tokens})


def _leading(found: torch.Tensor) -> int:
    missing = (~found).nonzero()
    return int(missing[0]) if len(missing) else len(found)
