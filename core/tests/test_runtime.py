"""Threads with deadlines: an overdue call is given up, keeps its own thread, and the number of them is bounded."""

from __future__ import annotations

import threading

import pytest

from kvloom import BackendError, DeadlineExceeded
from kvloom.runtime import SystemRuntime, Workers


@pytest.fixture
def workers():
    runtime = SystemRuntime()
    workers = Workers(runtime, name="test", threads=2)
    yield workers
    workers.close(5.0)


def soon() -> float:
    return SystemRuntime.now() + 0.05


def later() -> float:
    return SystemRuntime.now() + 30


def test_results_and_errors_come_back(workers: Workers) -> None:
    assert workers.run(lambda: 7, later()) == 7
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda: 1 // 0, later())


def test_an_overdue_call_is_abandoned_and_bounded(workers: Workers) -> None:
    gate = threading.Event()
    for abandoned in (1, 2):
        with pytest.raises(DeadlineExceeded):
            workers.run(gate.wait, soon())
        assert workers.abandoned == abandoned
    assert workers.stuck
    with pytest.raises(BackendError, match="held by calls past their deadline"):
        workers.submit(lambda: 1)
    gate.set()
    while workers.stuck:
        SystemRuntime.sleep(0.001)
    assert workers.run(lambda: 3, later()) == 3, "open again once one has returned"


def test_a_queued_call_that_is_given_up_never_runs(workers: Workers) -> None:
    gate = threading.Event()
    ran = []
    busy = [workers.submit(gate.wait) for _ in range(2)]
    while any(call._state == "queued" for call in busy):
        SystemRuntime.sleep(0.001)
    queued = workers.submit(lambda: ran.append(1))
    with pytest.raises(DeadlineExceeded):
        queued.result(soon())
    assert queued.cancel() is False, "it was cancelled already"
    gate.set()
    for call in busy:
        call.result(later())
    workers.run(lambda: None, later())
    assert not ran and not workers.abandoned


def test_no_more_threads_than_asked_for(workers: Workers) -> None:
    gate = threading.Barrier(3, timeout=0.2)
    calls = [workers.submit(gate.wait) for _ in range(3)]
    errors = []
    for call in calls:
        try:
            call.result(later())
        except threading.BrokenBarrierError as error:
            errors.append(error)
    assert errors, "three at once would have passed the barrier"


def test_closing_cancels_what_has_not_begun(workers: Workers) -> None:
    gate = threading.Event()
    running = [workers.submit(gate.wait) for _ in range(2)]
    while any(call._state == "queued" for call in running):
        SystemRuntime.sleep(0.001)
    queued = workers.submit(lambda: 1)
    threading.Timer(0.05, gate.set).start()
    workers.close(5.0)
    with pytest.raises(BackendError, match="cancelled"):
        queued.result(later())
    assert all(call.result(later()) for call in running)
    with pytest.raises(BackendError, match="closed"):
        workers.submit(lambda: 1)
