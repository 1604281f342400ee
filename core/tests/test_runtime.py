"""Threads with deadlines: an overdue call is given up, keeps its own thread, and the number of them is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import pytest
from core_support import eventually
from simulation.fibers import Process, Scheduler
from simulation.runtime import SimRuntime

from kvloom import BackendError, DeadlineExceeded
from kvloom.runtime import Batch, Call, SystemRuntime, Workers


@pytest.fixture
def workers():
    runtime = SystemRuntime()
    workers = Workers(runtime, name="test", threads=2)
    yield workers
    workers.close(5.0)


SOON, LATER = 0.05, 30.0


def in_virtual_time(work: Callable[[SimRuntime, Workers], None]) -> None:
    scheduler = Scheduler("workers")
    runtime = SimRuntime(scheduler, Process("mine"), Random(0))
    try:
        scheduler.run(lambda: work(runtime, Workers(runtime, name="test", threads=2)))
    finally:
        scheduler.end()


def test_results_and_errors_come_back(workers: Workers) -> None:
    assert workers.run(lambda: 7, seconds=LATER) == 7
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda: 1 // 0, seconds=LATER)


def test_a_call_that_is_done_has_its_result_already() -> None:
    """`done` and `peek` take no lock: whoever sees the one must find the other."""
    calls: list[Call[int]] = []
    seen: list[tuple[bool, int | None]] = []

    class Watching(SystemRuntime):
        def now(self) -> float:
            seen.extend((call.done, call.peek()) for call in calls)
            return super().now()

    workers = Workers(Watching(), name="test", threads=1)
    calls.append(workers.submit(lambda: 7))
    assert calls[0].result() == 7
    assert (True, None) not in seen
    workers.close(1.0)


def test_an_overdue_call_is_abandoned_and_bounded() -> None:
    def work(runtime: SimRuntime, workers: Workers) -> None:
        for abandoned in (1, 2):
            with pytest.raises(DeadlineExceeded):
                workers.run(lambda: runtime.sleep(LATER), seconds=SOON)
            assert workers.abandoned == abandoned
        assert workers.stuck
        with pytest.raises(BackendError, match="held by calls past their deadline"):
            workers.submit(lambda: 1)
        runtime.sleep(LATER)
        assert not workers.stuck
        assert workers.run(lambda: 3, seconds=LATER) == 3, "open again once one has returned"

    in_virtual_time(work)


def test_each_call_of_a_batch_has_its_time_after_the_one_before() -> None:
    def work(runtime: SimRuntime, workers: Workers) -> None:
        def slowly(batch: Batch[int]) -> None:
            for number in range(3):
                runtime.sleep(0.8 * SOON)
                batch.give(number, number)
            runtime.sleep(LATER)

        calls = workers.submit_batch(slowly, 4, seconds=SOON)
        assert [call.result() for call in calls[:3]] == [0, 1, 2]
        with pytest.raises(DeadlineExceeded):
            calls[3].result()
        assert workers.abandoned == 1

    in_virtual_time(work)


def test_a_call_that_a_batch_does_not_answer_has_its_error(workers: Workers) -> None:
    def half(batch: Batch[int]) -> None:
        batch.give(1, 7)
        raise ZeroDivisionError

    first, second = workers.submit_batch(half, 2)
    assert second.result() == 7
    with pytest.raises(ZeroDivisionError):
        first.result()


def test_a_queued_batch_is_only_gone_when_nobody_wants_any_of_it(workers: Workers) -> None:
    gate, ran = threading.Event(), []
    busy = [workers.submit(gate.wait) for _ in range(2)]
    assert eventually(lambda: all(call.running for call in busy))
    calls = [workers.submit_batch(lambda batch: ran.append([batch.wanted(0), batch.wanted(1)]), 2) for _ in range(2)]
    assert calls[0][0].cancel() and calls[1][0].cancel() and calls[1][1].cancel()
    gate.set()
    calls[0][1].result()
    assert ran == [[False, True]]


def test_a_queued_call_that_is_given_up_never_runs(workers: Workers) -> None:
    gate = threading.Event()
    ran = []
    busy = [workers.submit(gate.wait) for _ in range(2)]
    assert eventually(lambda: not any(call._state == "queued" for call in busy))
    queued = workers.submit(lambda: ran.append(1), seconds=SOON)
    with pytest.raises(DeadlineExceeded):
        queued.result()
    assert queued.cancel() is False, "it was cancelled already"
    gate.set()
    for call in busy:
        call.result()
    workers.run(lambda: None, seconds=LATER)
    assert not ran and not workers.abandoned


def test_no_more_threads_than_asked_for(workers: Workers) -> None:
    gate = threading.Barrier(3, timeout=0.2)
    calls = [workers.submit(gate.wait) for _ in range(3)]
    errors = []
    for call in calls:
        try:
            call.result()
        except threading.BrokenBarrierError as error:
            errors.append(error)
    assert errors, "three at once would have passed the barrier"


def test_a_machine_without_threads_is_a_failed_call_at_most(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    gate = threading.Event()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more)
        with pytest.raises(BackendError, match="can't start new thread"):
            workers.submit(lambda: ran.append(1))
    first = workers.submit(gate.wait)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more)
        second = workers.submit(lambda: ran.append(2), seconds=60)
    gate.set()
    assert first.result() and second.result() is None and ran == [2]


def test_a_function_takes_over_calls_that_have_not_begun(workers: Workers) -> None:
    gate, other, taken = threading.Event(), threading.Event(), list[int | None]()
    others: list[Call[int]] = []

    def run(batch: Batch[int]) -> None:
        gate.wait(20)
        taken.extend(batch.absorb(call) for call in others)
        batch.give(1, 7)

    busy = workers.submit(lambda: other.wait(20))
    first = workers.submit_batch(run, 1, seconds=60)[0]
    assert eventually(lambda: first.running and busy.running)
    others += [workers.submit(lambda: 1, seconds=60) for _ in range(3)]
    assert others[1].cancel()
    gate.set()
    assert first.result() is None and taken == [1, None, 2]
    assert others[0].result() == 7 and others[2].result() is None, "it has no result but what the function gives it"
    other.set()
    assert busy.result() and workers.abandoned == 0


def test_closing_cancels_what_has_not_begun(workers: Workers) -> None:
    gate = threading.Event()
    running = [workers.submit(gate.wait) for _ in range(2)]
    assert eventually(lambda: not any(call._state == "queued" for call in running))
    queued = workers.submit(lambda: 1)
    threading.Timer(0.05, gate.set).start()
    workers.close(5.0)
    with pytest.raises(BackendError, match="cancelled"):
        queued.result()
    assert all(call.result() for call in running)
    with pytest.raises(BackendError, match="closed"):
        workers.submit(lambda: 1)


def test_a_cancelled_call_is_not_overdue_and_its_result_is_discarded(workers: Workers) -> None:
    gate, discarded = threading.Event(), []
    calls = [workers.submit(lambda: gate.wait() and 7, seconds=LATER, discard=discarded.append) for _ in range(2)]
    assert eventually(lambda: not any(call._state == "queued" for call in calls))
    for call in calls:
        call.cancel()
    assert not workers.abandoned and not workers.stuck
    late = workers.submit(lambda: 3, seconds=LATER)
    gate.set()
    assert late.result() == 3
    until = SystemRuntime.now() + LATER
    while len(discarded) < 2 and SystemRuntime.now() < until:
        SystemRuntime.sleep(0.001)
    assert discarded == [7, 7]


def test_waiting_in_the_queue_does_not_use_up_the_time_to_run() -> None:
    def work(runtime: SimRuntime, workers: Workers) -> None:
        calls = [workers.submit(lambda: runtime.sleep(0.15), seconds=0.25) for _ in range(3)]
        for call in calls:
            call.result()
        assert 0.3 <= runtime.now() < 0.4, "the third waited, and ran"

    in_virtual_time(work)
