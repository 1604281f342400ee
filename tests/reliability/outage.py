"""Serving on a directory before, during and after an outage of its file system."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hurry import HurriedRuntime
from reliability_children import open_on, prompt
from reliability_support import (
    audit,
    events,
    eventually,
    forget_memory,
    ledger_bytes,
    plugins_with,
    retrieved,
)

from kvloom import Engine

OLD, NEW = range(4), range(4, 8)
"""Prompts stored before the outage, and while it lasts: 10 chunks each, 2.5 MiB."""


def open_hurried(path: Path | str, capacity: str | None = "10MiB", **given: Any) -> Engine:
    """Time flies on it: nobody has half a minute for the next listing."""
    return open_on(str(path), capacity, "1h", runtime=HurriedRuntime(), **given)


def serve_through(engine: Engine, path: Path, begin: Callable[[], None], end: Callable[[], None]) -> dict[str, int]:
    """Fails if serving stops, gives a wrong byte, does not recover, or loses count; what it saw otherwise."""
    for seed in OLD:
        _stored(engine, seed)
    forget_memory(engine)
    assert all(_comes(engine, seed) for seed in OLD), "healthy"
    exactly_counted(engine, path)

    forget_memory(engine)
    before = _trouble(engine)
    begin()
    hits = 0
    for _ in range(2):
        hits += sum(_comes(engine, seed) for seed in OLD)
        for seed in NEW:
            _stored(engine, seed)
            assert _comes(engine, seed), "memory serves what was just stored"
        forget_memory(engine)
    trouble = _trouble(engine) - before
    assert trouble or hits == 2 * len(OLD), "nothing fails unseen"  # what is mapped needs nobody's permission any more
    end()

    for seed in [*OLD, *NEW]:
        eventually(lambda seed=seed: _through(engine, seed), f"prompt {seed} in the tier after the outage")  # type: ignore[misc]
    exactly_counted(engine, path)
    forget_memory(engine)
    return {"prompts_hit_meanwhile": hits, "events_of_trouble": trouble}


def exactly_counted(engine: Engine, path: Path) -> None:
    eventually(lambda: engine.flush() and ledger_bytes(engine) == audit(path).bytes, "exact accounting")
    eventually(lambda: not audit(path).unfinished, "the last unfinished file gone")
    assert not audit(path).broken


def _stored(engine: Engine, seed: int) -> None:
    tokens, kv = prompt(seed)
    engine.store(tokens, kv=kv)
    assert engine.flush(), "no write hangs"


def _comes(engine: Engine, seed: int) -> bool:
    tokens, kv = prompt(seed)
    engine.lookup(tokens)
    return retrieved(engine, tokens, kv) == len(tokens)


def _through(engine: Engine, seed: int) -> bool:
    _stored(engine, seed)
    forget_memory(engine)
    return _comes(engine, seed)


def _trouble(engine: Engine) -> int:
    return sum(events(engine, name) for name in ("dropped", "tier_error", "missed", "evicted", "tier_paused"))


def serve_without_permission(path: str, user: int, what: str, reports: Connection) -> None:
    """Run as `user`, who owns `path` and removes its own permissions; report the outcome, or a traceback."""
    logging.disable()
    try:
        known = plugins_with()
        if os.getuid() == 0:
            os.chown(path, user, user)
            os.setgid(user)
            os.setuid(user)
        with open_hurried(path, registry=known) as engine:
            reports.send(serve_through(engine, Path(path), lambda: _deny(path, what), lambda: _allow(path)))
    except BaseException:
        _allow(path)
        reports.send(traceback.format_exc())


def _deny(path: str, what: str) -> None:
    if what == "the directory":
        os.chmod(path, 0)
    elif what == "writing":
        for folder, _, _ in os.walk(path, topdown=False):
            os.chmod(folder, 0o500)
    else:
        for folder, _, names in os.walk(path):
            for name in names:
                os.chmod(Path(folder, name), 0)


def _allow(path: str) -> None:
    os.chmod(path, 0o700)
    for folder, folders, names in os.walk(path):
        for name in folders:
            os.chmod(Path(folder, name), 0o700)
        for name in names:
            os.chmod(Path(folder, name), 0o600)
