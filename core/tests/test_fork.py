"""Fork and spawn: a child is never stuck on its parent's engine, never harms it, and can open one of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from core_support import CHUNK, SPEC, Gate, Shelf, kv_of, tokens_of

from kvloom import BackendError, Engine, Tier, open_tier
from kvloom.engine.engine import _named
from kvloom.memory import Pool
from kvloom.memory.pages import settle_threads
from kvloom.runtime import SystemRuntime

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
Open = Callable[..., Engine]
TOKENS, KV = tokens_of(16), kv_of(16)
LAYERS = ({"type": "memory", "capacity": "1MiB"}, {"type": "shelf", "capacity": "1MiB"})


def in_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked child; fails with its traceback, or if it takes longer than 20 seconds."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(code)
    os.close(writer)
    if not select.select([reader], [], [], 20)[0]:
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, said or f"the child hung, or died of signal {status & 127}"


VERBS: dict[str, Callable[[Engine], object]] = {
    "lookup": lambda engine: engine.lookup(TOKENS),
    "retrieve": lambda engine: engine.retrieve(TOKENS, kv=torch.zeros_like(KV)),
    "store": lambda engine: engine.store(TOKENS, kv=KV),
    "retrieve_layer": lambda engine: engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV)),
    "store_layer": lambda engine: engine.store_layer(TOKENS, kv=KV),
    "prefetch": lambda engine: engine.prefetch(TOKENS),
    "pin": lambda engine: engine.pin(TOKENS),
    "unpin": lambda engine: engine.unpin(TOKENS),
    "remove": lambda engine: engine.remove(TOKENS),
    "clear": lambda engine: engine.clear(),
    "flush": lambda engine: engine.flush(),
    "segments": lambda engine: engine.segments(TOKENS),
    "passage": lambda engine: engine.passage(TOKENS),
    "find": lambda engine: engine.find(SEGMENTS),
    "locate": lambda engine: engine.locate(SEGMENTS),
    "touch": lambda engine: engine.touch(SEGMENTS),
    "changes": lambda engine: engine.changes(),
    "memory": lambda engine: engine.memory,
    "load": lambda engine: engine.load(SEGMENTS, kv=torch.zeros_like(KV)),
    "load_layers": lambda engine: engine.load_layers(SEGMENTS, kv=torch.zeros_like(KV)),
    "save": lambda engine: engine.save(SEGMENTS, kv=KV),
    "counters": lambda engine: engine.counters(),
    "health": lambda engine: engine.health(),
    "tiers": lambda engine: engine.tiers,
    "sibling": lambda engine: engine.sibling(SPEC),
}
NOT_VERBS = {"open", "close", "get_or_create", "get", "destroy", "chunk_tokens", "salt", "after_fork_in_child"}
SEGMENTS: list[Any] = []


def test_every_verb_is_tried_below() -> None:
    public = {name for name in dir(Engine) if not name.startswith("_")}
    assert public - NOT_VERBS - set(VERBS) == set()


@pytest.fixture
def engine(open_engine: Open) -> Engine:
    engine = open_engine(*LAYERS)
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    SEGMENTS[:] = engine.segments(TOKENS)
    return engine


@pytest.fixture
def locked(engine: Engine) -> Iterator[None]:
    """Every lock is held, as if by a thread that is not there in a child."""
    stack = engine._stack
    locks = [
        engine._events._changed,
        engine._background.workers._changed,
        engine._background.loaders._changed,
        stack.memory._lock,
        stack.memory.write_back._answered,
        _named._lock,
    ]
    locks += [stack.memory.pool.lock, stack.memory.pool._freed, stack.memory.pool.pages._wake]
    for tier in stack.stored:
        locks += [value for value in vars(tier).values() if hasattr(value, "notify_all")]
        locks += [tier.ledger._lock]
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("locked")
def test_a_verb_is_refused_in_a_child_whoever_held_a_lock(engine: Engine, verb: str) -> None:
    parent = os.getpid()

    def work() -> None:
        with pytest.raises(BackendError, match=f"opened in process {parent}; open one in this process"):
            VERBS[verb](engine)

    in_child(work)


@pytest.mark.usefixtures("locked")
def test_closing_and_collecting_in_a_child_do_nothing(engine: Engine) -> None:
    shelf = Shelf.shelves["default"]
    closed: list[int] = []
    shelf.close = lambda: closed.append(1)  # type: ignore[method-assign]
    before = shelf.blobs

    def work() -> None:
        with engine:
            pass
        engine.close()
        for tier in engine._stack.tiers.values():
            tier.close()
        engine._stack.memory.pool.close()
        engine._events.close()
        gc.collect()
        assert not closed and shelf.blobs == before

    in_child(work)


def test_the_parent_goes_on(engine: Engine) -> None:
    for _ in range(5):
        in_child(engine.close)
        back = torch.zeros_like(KV)
        assert engine.retrieve(TOKENS, kv=back).all() and torch.equal(back, KV)
        other = tokens_of(16, seed=7)
        engine.store(other, kv=KV)
        assert engine.flush(20)
        engine.remove(other)


def test_a_lease_is_harmless_in_a_child_and_shows_no_kv(engine: Engine) -> None:
    memory = engine._stack.memory
    key = engine.segments(TOKENS)[0].key
    (loaded,) = memory.lease([key])
    assert loaded is not None and loaded.chunk.tensor.any()
    with memory.pool.lock, memory._lock:
        in_child(lambda: _read_and_release(memory, loaded, key))
    assert loaded.chunk.tensor.any()
    loaded.release()


def _read_and_release(memory: Any, loaded: Any, key: Any) -> None:
    if sys.platform == "linux":
        assert not loaded.chunk.tensor.any(), "the parent's KV is not the child's"
    assert memory.lease([key]) == [None], "no zeros in its place either"
    loaded.release()
    assert memory.pool.reserve(4096) is None
    with pytest.raises(BackendError, match="this tier was opened in process"):
        memory.get(key)


def test_a_task_of_the_parent_ends_at_once_in_a_child(engine: Engine, gate: Any) -> None:
    other = tokens_of(16, seed=3)
    Shelf.shelves["default"].before = gate
    tasks = [engine.load(engine.segments(other), kv=torch.zeros_like(KV)), engine.prefetch(other)]
    with tasks[0]._changed, tasks[0]._touching:
        in_child(lambda: [_refused(task) for task in tasks])
    gate.open()
    for task in tasks:
        task.result(20)


def _refused(task: Any) -> None:
    with pytest.raises(BackendError, match="opened in process"):
        task.result()
    task.cancel()


def test_layers_of_the_parent_end_at_once_in_a_child(engine: Engine, gate: Gate) -> None:
    keys = [segment.key for segment in engine.segments(TOKENS)]
    engine._stack.memory.remove(keys)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    storing = engine.store_layer(tokens_of(16, seed=4), kv=KV)
    loading = engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV))
    gate.reached()

    def work() -> None:
        with pytest.raises(BackendError, match="opened in process"):
            loading.wait(0)
        with pytest.raises(BackendError, match="the storing is closed"):
            storing.layer(0)
        loading.close()
        storing.close()

    with storing._reading, loading._changed, loading._writing:
        in_child(work)
    gate.open()
    assert loading.result().all()
    loading.close()
    storing.close()


def test_a_child_opens_its_own(registry: Any, engine: Engine) -> None:
    def work(parent: int = os.getpid()) -> None:
        config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": list(LAYERS)}
        with Engine.open(config, SPEC, registry=registry) as mine:
            mine.store(TOKENS, kv=KV)
            back = torch.zeros_like(KV)
            assert mine.retrieve(TOKENS, kv=back).all() and torch.equal(back, KV)

            def grandchild(child: int = os.getpid()) -> None:
                with pytest.raises(BackendError, match=f"opened in process {child};"):
                    mine.lookup(TOKENS)
                with pytest.raises(BackendError, match=f"opened in process {parent};"):
                    engine.lookup(TOKENS)

            in_child(grandchild)
            assert mine.lookup(TOKENS).tokens == 16

    in_child(work)


def test_engines_by_name_are_those_of_the_process(locked_name: Engine) -> None:
    def work() -> None:
        assert Engine.get("one") is None
        mine = Engine.get_or_create("one", {"connector": "plain", "tiers": ["memory"]}, SPEC)
        assert mine is not locked_name and Engine.get("one") is mine
        Engine.destroy("one")

    with _named._lock:
        in_child(work)
    assert Engine.get("one") is locked_name


@pytest.fixture
def locked_name() -> Iterator[Engine]:
    yield Engine.get_or_create("one", {"connector": "plain", "tiers": ["memory"]}, SPEC)
    Engine.destroy("one")


def test_a_tier_on_its_own_is_refused_in_a_child() -> None:
    for block in ("memory", "dict"):
        tier = open_tier(block, SPEC)
        with Engine.open({"tiers": ["memory"], "connector": "plain", "chunk_tokens": 4}, SPEC) as engine:
            key = engine.segments(TOKENS)[0].key

        def work(tier: Tier = tier, key: Any = key) -> None:
            for verb in (
                lambda: tier.get(key),
                lambda: tier.put(key, KV[:, :, :4]),
                lambda: tier.find([key]),
                lambda: tier.contains(key),
            ):
                with pytest.raises(BackendError, match="this tier was opened in process"):
                    verb()
            tier.close()

        in_child(work)
        tier.close()


def test_torch_does_not_wait_for_the_parents_threads() -> None:
    """In a process of its own, because OpenMP does what it does once a process."""
    script = """
import os, signal, torch
from kvloom import Engine, KVSpec
spec = KVSpec(model="wide", num_layers=8, num_kv_heads=8, head_size=128, dtype="float32")
config = {"chunk_tokens": 64, "connector": "plain", "tiers": [{"type": "memory", "capacity": "64MiB"}]}
torch.set_num_threads(2)
torch.ones(1 << 22).add_(1)
tokens, kv = torch.arange(128), torch.randn(2, 8, 128, 1024)
if os.fork() == 0:
    signal.alarm(30)
    with Engine.open(config, spec) as engine:
        engine.store(tokens, kv=kv)
        back = torch.zeros_like(kv)
        assert engine.retrieve(tokens, kv=back).all() and (back == kv).all()
    os._exit(0)
assert os.wait()[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_threads_of_a_child_may_be_the_first_to_use_torch() -> None:
    """Torch makes its pool of threads anew after a fork; threads that race that step find no pool, one time of four."""
    many = torch.zeros(1 << 20)

    def work() -> None:
        settle_threads()
        together = threading.Barrier(8)

        def convert(_: int) -> torch.Tensor:
            together.wait()
            return many.to(torch.bfloat16)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(convert, range(8)))

    for _ in range(16):
        in_child(work)


def test_pools_that_are_gone_are_not_told() -> None:
    from kvloom.forks import _aware

    gc.collect()
    before = len(_aware)
    pool = Pool(1 << 20, SystemRuntime())
    assert len(_aware) == before + 1
    pool.close()
    del pool
    gc.collect()
    assert len(_aware) <= before


def start_children(method: str, folder: Path, times: int) -> None:
    script = Path(__file__).with_name("fork_support.py")
    command = [sys.executable, script, method, folder, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{times} children by {method}\n"
    assert not list(folder.rglob("*.tmp")) and not any((folder / "scratch").glob("*")), "no unfinished file"


def test_children_of_a_busy_parent(tmp_path: Path) -> None:
    """By fork; spawn and forkserver are slow."""
    pytest.importorskip("kvloom_backend_disk")
    start_children("fork", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "times"), [("fork", 20), ("spawn", 4), ("forkserver", 4)])
def test_many_children_of_a_busy_parent(tmp_path: Path, method: str, times: int) -> None:
    pytest.importorskip("kvloom_backend_disk")
    start_children(method, tmp_path, times)
