"""Ctrl-C at any moment: the caller gets its KeyboardInterrupt, and engine, pool and locks of keys stay whole."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from core_support import CHUNK, SPEC, Gate, Shelf, kv_of, tokens_of

from kvloom import Engine, interrupts
from kvloom.builtin.plain import PlainConnector
from kvloom.pipeline.task import Task
from kvloom.runtime import SystemRuntime

CONFIG = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": ["memory", {"type": "dict"}]}
TOKENS, KV = tokens_of(3 * CHUNK), kv_of(3 * CHUNK)
HANGS = 60
"""Seconds after which something that should not take one counts as hanging."""

Do = Callable[[Engine, torch.Tensor], object]


class Interrupt:
    """A trace function that raises KeyboardInterrupt at one event, counted from 1."""

    def __init__(self, at: int, *events: str) -> None:
        self.at = at
        self.events = events
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Interrupt:
        frame.f_trace_opcodes = "opcode" in self.events
        if event in self.events and frame.f_code.co_name != "__del__":  # Python ignores what is raised there
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise AssertionError(f"it hangs: {sys._current_frames()}")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS)
    gc.disable()  # what is collected is collected on this thread, and loses the interrupt
    try:
        yield
    finally:
        signal.alarm(0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def store(engine: Engine, kv: torch.Tensor) -> None:
    engine.store(TOKENS, kv=kv)


def retrieve(engine: Engine, kv: torch.Tensor) -> None:
    engine.retrieve(TOKENS, kv=kv)


def retrieve_from_below(engine: Engine, kv: torch.Tensor) -> None:
    engine._stack.memory.remove(engine._stack.memory.chunks())
    engine.retrieve(TOKENS, kv=kv)


def store_by_layers(engine: Engine, kv: torch.Tensor) -> None:
    with engine.store_layer(TOKENS, kv=kv) as storing:
        for layer in range(storing.num_layers):
            storing.layer(layer)
        storing.finish()


def retrieve_by_layers(engine: Engine, kv: torch.Tensor) -> None:
    with engine.retrieve_layer(TOKENS, kv=kv) as loading:
        for _ in loading:
            pass


def tasks(engine: Engine, kv: torch.Tensor) -> None:
    segments = engine.segments(TOKENS)
    engine.prefetch(TOKENS).result()
    engine.load(segments, kv=kv).result()
    engine.save(segments, kv=kv).cancel()


def operators_verbs(engine: Engine, kv: torch.Tensor) -> None:
    engine.pin(TOKENS)
    engine.lookup(TOKENS + 1)
    engine.unpin(TOKENS)
    engine.flush()
    engine.remove(TOKENS)
    engine.health(), engine.counters()


def tiers_verbs(engine: Engine, kv: torch.Tensor) -> None:
    for tier in engine.tiers.values():
        key = engine.segments(TOKENS)[0].key
        tier.put(key, kv[:, :, :CHUNK])
        tier.get(key)


# The main thread has no more to do than to hand over: the same few calls for each of these.
VERBS: list[tuple[Do, bool]] = [
    (store, False), (store_by_layers, False), (retrieve, True), (retrieve_from_below, True),
    (retrieve_by_layers, True), (tasks, True), (operators_verbs, True), (tiers_verbs, False),
]  # fmt: skip


def interrupted_at(number: int, events: tuple[str, ...], do: Do, engine: Engine, kv: torch.Tensor) -> bool:
    """Do it and interrupt it; whether it was, before it was done."""
    interrupt, before = Interrupt(number, *events), sys.gettrace()
    try:
        sys.settrace(interrupt)
        do(engine, kv)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert interrupt.seen < number
    return False


def close_lost(engine: Engine) -> None:
    """Close what was interrupted on its way from the engine to whoever called."""
    for handle in tuple(engine._by_layer):
        handle.close()


def check_whole(engine: Engine) -> None:
    """Nothing is claimed or in use, and a prompt can be stored and comes back."""
    interrupts._servers.finish()
    for task in tuple(engine._background._tasks):
        assert task.wait(HANGS)
    engine.clear()
    engine.unpin(TOKENS)
    assert not engine._stack.storer._locks._taken
    assert engine._stack.memory.pool.used_bytes == 0
    back = torch.zeros_like(KV)
    engine.store(TOKENS, kv=KV)
    assert engine.retrieve(TOKENS, kv=back).all() and torch.equal(back, KV)


def interrupt_everywhere(do: Do, stored: bool, *events: str) -> int:
    number = 0
    with Engine.open(CONFIG, SPEC) as engine:
        check_whole(engine)
        going = True
        while going:
            number += 1
            if not stored:
                engine.clear()
            kv = torch.zeros_like(KV) if stored else KV.clone()
            going = interrupted_at(number, events, do, engine, kv)
            close_lost(engine)
            kv.fill_(7)  # it is the caller's again: nobody reads or writes it
            check_whole(engine)
            assert do is tasks or (kv == 7).all()
    return number


@pytest.mark.parametrize(("do", "stored"), VERBS, ids=lambda value: getattr(value, "__name__", ""))
def test_interrupted_at_every_call_and_return(do: Do, stored: bool) -> None:
    assert interrupt_everywhere(do, stored, "call", "return") > 10


@pytest.mark.slow
@pytest.mark.parametrize(("do", "stored"), VERBS, ids=lambda value: getattr(value, "__name__", ""))
def test_interrupted_at_every_bytecode(do: Do, stored: bool) -> None:
    signal.alarm(10 * HANGS)
    assert interrupt_everywhere(do, stored, "opcode") > 100


def test_asking_to_be_told_interrupted_at_every_call_and_return() -> None:
    going, number = True, 0
    while going:
        number += 1
        task = Task(SystemRuntime())
        do: Do = lambda *_, task=task: task.when_done(lambda: None)  # type: ignore[misc]  # noqa: E731
        going = interrupted_at(number, ("call", "return"), do, None, KV)  # type: ignore[arg-type]
        ending = threading.Thread(target=task.fail, args=(ValueError(),), daemon=True)
        ending.start()
        ending.join(10)
        assert task.done
    assert number > 5


@pytest.mark.parametrize("verb", ["open", "close"])
def test_opening_and_closing_interrupted_at_every_call_and_return(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Engine] = []
    init = Engine.__init__

    def noting(self: Engine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(Engine, "__init__", noting)
    going, number = True, 0
    while going:
        number += 1
        engine = Engine.open(CONFIG, SPEC) if verb == "close" else None
        do: Do = (lambda engine, _: engine.close()) if engine else (lambda engine, _: Engine.open(CONFIG, SPEC))
        going = interrupted_at(number, ("call", "return"), do, engine, KV)  # type: ignore[arg-type]
        interrupts._servers.finish()
        while opened:
            one = opened.pop()
            closed = one._closed
            one.close()
            assert closed or going or verb == "open"  # else it was lost on its way, or not begun to be closed
            assert one._stack.memory.pool.used_bytes == 0
    assert number > 10


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Sends it to this process's main thread, which is to be waiting."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    yield lambda: signal.pthread_kill(main, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("verb", [store, retrieve, store_by_layers])
def test_the_caller_is_held_until_a_copy_is_over(
    verb: Do, ctrl_c: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, over = threading.Event(), []

    def slow(copy: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(*args: Any, **where: Any) -> Any:
            ctrl_c()
            over.append(not left.wait(0.1))  # that long a copy goes on for
            return copy(*args, **where)

        return interrupted

    with Engine.open(CONFIG, SPEC) as engine:
        if verb is retrieve:
            engine.store(TOKENS, kv=KV)
        with monkeypatch.context() as patch:
            for name in ("read", "write", "read_layer"):
                patch.setattr(PlainConnector, name, slow(getattr(PlainConnector, name)))
            with pytest.raises(KeyboardInterrupt):
                verb(engine, torch.zeros_like(KV))
            left.set()
        assert over and all(over)
        check_whole(engine)


def test_the_caller_does_not_wait_for_a_tier(
    ctrl_c: Callable[[], None], open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = open_engine({"type": "memory", "capacity": "1MiB"}, {"type": "shelf"}), Gate()
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "put" else None
    engine.store(TOKENS, kv=KV)
    flush = engine._stack.flush
    monkeypatch.setattr(engine._stack, "flush", lambda until: (ctrl_c(), flush(until))[1])
    with pytest.raises(KeyboardInterrupt):
        engine.flush()
    gate.open()  # not before


def test_what_nobody_waits_for_any_more_is_discarded(ctrl_c: Callable[[], None]) -> None:
    discarded: list[str] = []
    left = threading.Event()

    def work() -> str:
        ctrl_c()
        left.wait(HANGS)
        return "handle"

    with pytest.raises(KeyboardInterrupt):
        SystemRuntime().uninterrupted(work, discard=discarded.append, leave=True)
    left.set()
    interrupts._servers.finish()
    assert discarded == ["handle"]


def test_a_second_interrupt_does_not_shorten_the_wait(ctrl_c: Callable[[], None]) -> None:
    left, over = threading.Event(), []

    def work() -> None:
        for _ in range(3):
            ctrl_c()
            over.append(not left.wait(0.05))

    with pytest.raises(KeyboardInterrupt):
        SystemRuntime().uninterrupted(work)
    left.set()
    assert over == [True] * 3


def test_a_signal_handler_may_use_the_engine() -> None:
    runtime, handled = SystemRuntime(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, lambda *_: runtime.uninterrupted(handled.set))
    try:
        assert runtime.uninterrupted(lambda: signal.pthread_kill(main, signal.SIGUSR1) or handled.wait(HANGS))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_it_runs_on_another_thread_with_the_callers_settings() -> None:
    runtime = SystemRuntime()
    name = contextvars.ContextVar("name", default="")
    name.set("caller's")
    settings = lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), name.get())  # noqa: E731
    assert runtime.uninterrupted(threading.get_ident) != threading.get_ident()
    assert runtime.uninterrupted(settings) == (False, True, "caller's")
    with torch.inference_mode():
        assert runtime.uninterrupted(settings) == (True, False, "caller's")
    with torch.no_grad():
        assert runtime.uninterrupted(settings) == (False, False, "caller's")
    assert runtime.uninterrupted(settings) == (False, True, "caller's")
    with pytest.raises(ZeroDivisionError):
        runtime.uninterrupted(lambda: 1 // 0)


def test_another_thread_does_it_itself() -> None:
    seen: list[bool] = []
    runtime = SystemRuntime()

    def run() -> None:
        seen.append(runtime.uninterrupted(threading.get_ident) == threading.get_ident())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]


def test_one_thread_is_enough() -> None:
    runtime = SystemRuntime()
    for _ in range(100):
        runtime.uninterrupted(int)
    count = sum(thread.name == "kvloom-verbs" for thread in threading.enumerate())
    idents = {runtime.uninterrupted(threading.get_ident) for _ in range(100)}
    assert len(idents) <= 2 and count <= 2


def test_the_last_thread_of_the_machine_is_enough() -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    child = os.fork()
    if child == 0:
        signal.alarm(HANGS)
        threading.Thread.start = no_more  # type: ignore[method-assign]
        os._exit(SystemRuntime().uninterrupted(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    runtime = SystemRuntime()
    runtime.uninterrupted(int)
    child = os.fork()
    if child == 0:
        signal.alarm(HANGS)
        os._exit(runtime.uninterrupted(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_last_thread_that_there_is_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(interrupts, "_servers", interrupts._Servers(threading.get_ident()))
    monkeypatch.setattr(threading.Thread, "start", none_left)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    assert interrupts.uninterrupted(lambda: 7) == 7
