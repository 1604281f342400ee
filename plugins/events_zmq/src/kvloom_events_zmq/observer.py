"""Publishes chunks that enter or leave kvloom's tiers, in the form in which vLLM publishes those of its own cache."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from kvloom import ByteSize, ChunkEvent, ChunkKey, Config, Event, KVSpec, Observer, salt_tag_of
from kvloom_events_zmq.naming import Named, Names, block_hashes
from kvloom_events_zmq.publisher import Publisher, Settings, acquire, release
from kvloom_events_zmq.wire import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, Hash

_PORT = re.compile(
    r":(\*|\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])\Z",
    re.ASCII,
)
_UNSALTED = "-"


class EventsLostError(RuntimeError):
    """Events were not published. The engine counts it as an `observer_error`."""


_MOST = (1 << 31) - 1
"""ZeroMQ counts in 32 bits."""


class ZmqEventsConfig(Config):
    endpoint: str = "tcp://127.0.0.1:5557"
    """The address to publish on. Anyone who can connect reads the tokens of prompts: restrict access by network."""
    replay_endpoint: str | None = None
    """The address at which subscribers ask for batches that they missed."""
    topic: str = ""
    """The first part of every message, which subscribers may choose by."""
    block_tokens: int | None = Field(default=None, ge=1, le=_MOST)
    """Tokens of a block, as the router counts them; by default a chunk is one block."""
    hashes: Literal["int", "bytes"] = "int"
    """The last 64 bits of a block's hash, or all 32 bytes."""
    salted: bool = False
    """Also publish KV that is stored under a salt."""
    data_parallel_rank: int | None = Field(default=None, ge=0, le=_MOST)
    """Said in every batch, where an engine is one of several that share the work."""
    hwm: int = Field(default=4096, ge=1, le=_MOST)
    """Batches, of some 64 KiB at most, that may wait for one slow subscriber; it loses those beyond, which are
    counted."""
    max_waiting: int = Field(default=100_000, ge=1, le=_MOST)
    """Events, of 64 MiB together at most, that may wait to be sent; those beyond are dropped, and counted."""
    batch: int = Field(default=1024, ge=1, le=_MOST)
    """Events in one message at most."""
    max_connections: int = Field(default=64, ge=1, le=_MOST)
    """Connections to an endpoint; with more, all are dropped and may connect again."""
    replay_batches: int = Field(default=10_000, ge=1, le=_MOST)
    """Number of batches kept for subscribers that missed some, of 64 MiB together at most."""
    remember: ByteSize = Field(default=ByteSize(64 << 20), ge=0)
    """Memory for the tokens of chunks that are stored later than they are named."""

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_endpoint(cls, value: str | None, info: ValidationInfo) -> str | None:
        """A path begins where the configuration file is; `@name` is none."""
        scheme, _, place = (value or "").partition("://")
        if value is not None and (scheme not in ("tcp", "ipc", "inproc") or not place or value == "ipc://*"):
            raise ValueError(f"not an endpoint: {value!r}; write tcp://ADDRESS:PORT or ipc://PATH")
        if scheme == "tcp" and not _PORT.search(place):  # ZeroMQ would take another one, 34463 for 99999
            raise ValueError(f"{value!r} has no port from 0 to 65535, nor * for any that is free")
        if scheme != "ipc" or place.startswith("@"):
            return value
        directory = (info.context or {}).get("directory", Path())
        return f"ipc://{directory / os.path.expanduser(place)}"


class ZmqEventsObserver(Observer):
    """BlockStored, BlockRemoved and AllBlocksCleared. Of several ranks the first speaks for all: others are silent."""

    type = "events_zmq"
    sees_chunks = True
    Config = ZmqEventsConfig

    def __init__(self, config: ZmqEventsConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._settings = config
        self._names = Names(int(config.remember))
        self.unnamed = 0
        """Chunks that entered a tier and were not published, because their tokens are unknown."""
        self._missed = 0
        """The part of the publisher's that was counted."""
        self.publisher: Publisher | None = None
        if spec is None or spec.rank == 0:
            self.publisher = acquire(
                Settings(
                    config.endpoint, config.replay_endpoint, config.topic, config.hwm, config.max_waiting,
                    config.batch, config.replay_batches, config.data_parallel_rank, config.max_connections,
                )
            )  # fmt: skip

    def on_event(self, event: Event) -> None:
        """Sums are for others."""

    def on_chunks(self, event: ChunkEvent) -> None:
        if self.publisher is None:
            return
        if event.name == "named":
            self._names.learn(event.segments, event.tokens)
            return
        keys = [key for key in event.keys if self._settings.salted or salt_tag_of(key.namespace) == _UNSALTED]
        medium = "CPU" if event.in_memory else "STORAGE"
        events: list[AnyEvent] = []
        if event.name == "stored":
            events += [one for key in keys if (one := self._stored(key, medium, event.tier)) is not None]
        elif event.name == "removed":
            # For an unknown chunk, the last block, which is behind all others.
            hashes = [each for key in keys for each in self._hashes(key) or [self._hash(key)]]
            events += [BlockRemoved(hashes, medium, ownership=event.tier)] if hashes else []
        elif event.name == "cleared":
            events.append(AllBlocksCleared())
        dropped = self.publisher.publish(events) if events else 0
        missed, self._missed = self.publisher.missed - self._missed, self.publisher.missed
        if dropped and (failure := self.publisher.failure) is not None:
            text = f"{dropped} KV events are not published: its thread failed: {type(failure).__name__}: {failure}"
            raise EventsLostError(text)
        if dropped:
            raise EventsLostError(f"{dropped} KV events found too many waiting; raise `max_waiting`")
        if missed:
            raise EventsLostError(f"{missed} KV events did not reach a subscriber that reads too slowly; raise `hwm`")

    def close(self) -> None:
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            release(publisher)

    def _stored(self, key: ChunkKey, medium: str, tier: str) -> BlockStored | None:
        named = self._names.of(key)
        hashes = [] if named is None else self._hashes(key, named)
        if named is None or not hashes:
            self.unnamed += 1
            return None
        tokens = np.frombuffer(named.tokens, "<i4").tolist()
        tag = salt_tag_of(key.namespace)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if named.parent is None else self._hash(named.parent),
            token_ids=tokens,
            block_size=len(tokens) // len(hashes),
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=None if tag == _UNSALTED else [[tag] for _ in hashes],
            ownership=tier,
        )

    def _hashes(self, key: ChunkKey, named: Named | None = None) -> Sequence[Hash]:
        """The hashes of a chunk's blocks; none if it is not made of whole blocks, or its length is unknown."""
        size = self._settings.block_tokens
        if size is None:
            return [self._hash(key)]
        named = named or self._names.of(key)
        if named is None or named.start % size or len(named.tokens) // 4 % size:
            return []
        return block_hashes(key, len(named.tokens) // 4 // size, self._settings.hashes)

    def _hash(self, key: ChunkKey) -> Hash:
        return block_hashes(key, 1, self._settings.hashes)[0]
