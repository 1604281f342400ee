"""The processes that the reliability tests start, kill, and let meet.

They are forked from a process with everything imported and no thread, so a child starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import random
import struct
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from reliability_support import GENEROUS_SECONDS, WIDE, kv_of, open_engine, retrieved, tokens_of

from kvloom import BackendError, Engine, StorageBackend, envelope

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "pydantic", "kvloom.engine", "kvloom_backend_disk.backend"])

CHUNK_TOKENS = 32
CHUNK_BYTES = CHUNK_TOKENS * 8192
"""Long enough for O_DIRECT."""
PROMPTS = 24


def prompt(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and KV of one to four chunks."""
    count = CHUNK_TOKENS * (1 + seed % 4)
    return tokens_of(count, seed), kv_of(count, seed, WIDE)


def open_on(path: str, capacity: str | None = "10MiB", deadline: str = "60s", **given: Any) -> Engine:
    return open_engine(
        {"type": "memory", "capacity": "6MiB"},
        {"type": "disk", "path": path, "capacity": capacity, "deadline": deadline},
        spec=WIDE,
        chunk_tokens=CHUNK_TOKENS,
        **given,
    )


def store_for_ever(path: str, seed: int, ready: Connection) -> NoReturn:
    """Store, and now and then whatever else changes the store, until killed."""
    logging.disable()
    torch.set_num_threads(1)
    rng = random.Random(seed)
    engine = open_on(path)
    ready.send(None)
    while True:
        tokens, kv = prompt(rng.randrange(PROMPTS))
        roll = rng.random()
        if roll < 0.75:
            engine.store(tokens, kv=kv)
        elif roll < 0.85:
            engine.retrieve(tokens, kv=torch.zeros_like(kv))
        elif roll < 0.95:
            engine.flush()
        else:
            with contextlib.suppress(BackendError):
                engine.remove(tokens) if roll < 0.99 else engine.clear()


def later_version(path: str, capacity: str | None, orders: Connection) -> None:
    """An engine of a version to come on a directory."""
    later_version_on({"type": "disk", "path": path, "capacity": capacity, "deadline": "60s"}, orders)


def later_version_on(tier: dict[str, Any], orders: Connection) -> None:
    """An engine of a version to come, which does what it is told: (verb, prompt) to tokens retrieved, until None."""
    envelope.VERSION += 1
    envelope.PLAIN_VERSION = envelope.VERSION
    memory = {"type": "memory", "capacity": "6MiB"}
    with (
        open_engine(memory, tier, spec=WIDE, chunk_tokens=CHUNK_TOKENS) as engine,
        contextlib.suppress(EOFError),
    ):
        for verb, seed in iter(orders.recv, None):
            tokens, kv = prompt(seed)
            if verb == "store":
                engine.store(tokens, kv=kv)
                orders.send(engine.flush(GENEROUS_SECONDS))
            else:
                orders.send(retrieved(engine, tokens, kv))


def versions_in(store: StorageBackend) -> dict[str, int]:
    """The version of every chunk's blob in a store."""
    keys = [entry.key for entry in store.scan() if not entry.key.startswith("spec/")]
    return {key: struct.unpack_from("<H", bytes(store.get(key) or b"")[:16], 8)[0] for key in keys}
