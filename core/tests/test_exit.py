"""A process that ends, with an engine closed or not: it ends well, and what was accepted is kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children_support import ended
from core_support import Gate, Shelf, kv_of, tokens_of
from policies_support import count

from kvloom import BackendError, Engine, KVSpec

SPEC = KVSpec(model="m", num_layers=8, num_kv_heads=8, head_size=64, dtype="float32")
PROMPTS = 2
PROGRAM = f"""
import sys, time, torch
from kvloom import Engine, KVSpec

spec = KVSpec.from_json({SPEC.to_json()!r})
tokens, kv = torch.arange(320), torch.ones(2, 8, 320, 512)

def opened(path, **tier):
    tiers = [{{"type": "memory", "capacity": "64MiB"}}, {{"type": "disk", "path": path, "deadline": "60s"}} | tier]
    return Engine.open({{"connector": "plain", "chunk_tokens": 16, "tiers": tiers}}, spec)

def saving(engine):
    for prompt in range({PROMPTS}):
        engine.save(engine.segments(tokens + prompt), kv=kv)
    return engine
"""
ENDS = {
    "left open": "engine = saving(opened(sys.argv[1]))",
    "forgotten": "saving(opened(sys.argv[1]))",
    "closed": "saving(opened(sys.argv[1])).close()",
    "a sibling": "engine = opened(sys.argv[1]); saving(engine.sibling(spec))",
}
HANGING_STORE = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import logging, threading
from importlib.metadata import EntryPoint, entry_points
from core_support import Shelf
from kvloom import Registry

logging.disable()
mine = EntryPoint("core_support", "core_support", "kvloom.v1")
registry = Registry.discover(entry_points=[*entry_points(group="kvloom.v1", name="builtin"), mine])
config = {{"connector": "plain", "tiers": ["memory", {{"type": "shelf", "deadline": "200ms"}}]}}
engine = saving(Engine.open(config, spec, registry=registry))
Shelf.shelves["default"].before = lambda verb, key: threading.Event().wait()
"""


def is_there(path: Path) -> None:
    config = {"connector": "plain", "chunk_tokens": 16, "tiers": [{"type": "disk", "path": str(path)}]}
    with Engine.open(config, SPEC) as engine:
        assert [engine.lookup(torch.arange(320) + prompt).tokens for prompt in range(PROMPTS)] == [320] * PROMPTS


def test_what_was_accepted_is_there_afterwards_and_a_store_that_hangs_keeps_nobody(tmp_path: Path) -> None:
    programs = [(PROGRAM + end, tmp_path / name) for name, end in ENDS.items()]
    *kept, hanging = ended(*programs, (PROGRAM + HANGING_STORE,))
    assert hanging == (0, "", "")
    for name, end in zip(ENDS, kept, strict=True):
        assert end == (0, "", ""), name
        is_there(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("end", [*ENDS, "a store that hangs"])
def test_a_process_that_was_not_forked_ends_like_that_too(tmp_path: Path, end: str) -> None:
    program = PROGRAM + ENDS.get(end, HANGING_STORE)
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if end in ENDS:
        is_there(tmp_path)


def test_a_closed_engine_has_no_threads(tmp_path: Path) -> None:
    tiers = [{"type": "memory", "capacity": "1GiB"}, {"type": "disk", "path": str(tmp_path)}]
    Engine.open({"connector": "plain", "tiers": tiers}, SPEC).close()  # the process keeps one thread for all engines
    others = set(threading.enumerate())
    for _ in range(5):
        Engine.open({"connector": "plain", "tiers": tiers}, SPEC).close()
        assert [thread.name for thread in threading.enumerate() if thread not in others] == []


def test_a_prefetch_does_not_keep_a_save_from_being_done(open_engine: Callable[..., Engine], gate: Gate) -> None:
    shelf = {"type": "shelf", "deadline": "20s"}
    with open_engine(shelf) as engine:
        for first in range(8):
            engine.store(tokens_of(16) + first, kv=kv_of(16))
    engine = open_engine({"type": "memory", "capacity": "1MiB"}, shelf)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    prefetches = [engine.prefetch(tokens_of(16) + first) for first in range(8)]
    gate.reached()
    save = engine.save(engine.segments(tokens_of(16) + 8), kv=kv_of(16))
    threading.Timer(0.3, gate.open).start()
    engine.close()
    assert save.result(0.0).all()
    assert all(task.done and task.cancelled for task in prefetches)


def test_saves_for_which_there_is_no_time_are_counted(
    open_engine: Callable[..., Engine], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine({"type": "memory", "capacity": "1MiB"}, {"type": "shelf", "deadline": "100ms"})
    monkeypatch.setattr(engine._stack.storer, "keep", lambda *_: gate("keep", ""))
    saves = [engine.save(engine.segments(tokens_of(16) + first), kv=kv_of(16)) for first in range(12)]
    engine.close()
    for save in saves:
        with pytest.raises(BackendError, match="closed"):
            save.result(0.0)
    assert count(engine, "dropped", "closed before it was stored") == 4 * (12 - engine._background.workers.threads)
