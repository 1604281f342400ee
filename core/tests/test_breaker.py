"""The breaker: some failures in a row open it, one probe at a time is let through, and the back-off grows."""

from __future__ import annotations

import pytest

from kvloom import CorruptBlobError
from kvloom.builtin.dict_backend import DictBackend
from kvloom.contracts.component import Config
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.stored.breaker import FAILURES, FIRST_SECONDS, MOST_SECONDS, Breaker
from kvloom.tiers.stored.calls import Calls


class Clock(SystemRuntime):
    """Time stands still unless it is moved."""

    time = 100.0

    def now(self) -> float:  # type: ignore[override]
        return self.time

    def random(self) -> float:
        return 0.5


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    assert [breaker.failed("read") for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    return breaker


def test_a_success_in_between_starts_the_count_over(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(3 * FAILURES):
        assert not breaker.failed("read")
        assert not breaker.succeeded("read") and not breaker.open
    opened(clock)


def test_one_probe_at_a_time_and_further_apart_each_time(clock: Clock) -> None:
    breaker = opened(clock)
    pause = FIRST_SECONDS
    for _ in range(10):
        assert not breaker.probe_is_due and not breaker.take_probe()
        clock.time += pause * 0.99
        assert not breaker.take_probe()
        clock.time += pause * 0.02
        assert breaker.probe_is_due
        assert breaker.take_probe() and not breaker.take_probe(), "one"
        assert not breaker.failed("read"), "it is open already"
        pause = min(MOST_SECONDS, 2 * pause)
    assert pause == MOST_SECONDS


def test_a_probe_closes_it_and_only_real_work_forgets_the_back_off(clock: Clock) -> None:
    breaker = opened(clock)
    clock.time += 2 * FIRST_SECONDS
    assert breaker.take_probe() and breaker.answered() and not breaker.open
    for _ in range(FAILURES):
        breaker.failed("read")
    assert breaker.open and breaker.probe_at - clock.time == pytest.approx(4 * FIRST_SECONDS)
    clock.time = breaker.probe_at
    assert breaker.take_probe() and breaker.answered()
    assert not breaker.succeeded("read")
    for _ in range(FAILURES):
        breaker.failed("read")
    assert breaker.probe_at - clock.time == pytest.approx(FIRST_SECONDS)


def test_a_sign_of_life_brings_the_probe_forward(clock: Clock) -> None:
    breaker = opened(clock)
    breaker.probe_now()
    assert breaker.take_probe()


def test_one_verb_that_works_does_not_hide_another_that_fails(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(FAILURES - 1):
        breaker.failed("read")
        assert not breaker.succeeded("contains")
    assert breaker.failed("read") and breaker.open
    assert not breaker.succeeded("contains") and breaker.open
    assert breaker.succeeded("read") and not breaker.open


@pytest.mark.parametrize("broken", ["get", "contains"])
def test_a_probe_asks_for_all_that_serving_needs(clock: Clock, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DictBackend, key: str) -> None:
        raise OSError(5, "Input/output error")

    calls = Calls("dict", DictBackend(Config()), EventBus((), clock), clock, deadline=10.0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(DictBackend, broken, fail)
            for _ in range(FAILURES):
                calls.failed("read", OSError(5, "Input/output error"), calls.reading)
            clock.time = calls.reading.probe_at
            assert calls.paused and calls._probe is not None
            calls._probe.wait()
            assert calls.paused, "what answers half of the questions is not back"
        clock.time = calls.reading.probe_at
        assert calls.paused
        calls._probe.wait()
        assert not calls.paused
    finally:
        calls.close()


def test_what_lies_where_a_probe_looks_keeps_nothing_paused(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def special(self: DictBackend, key: str) -> None:
        raise CorruptBlobError("not a regular file")

    asked: list[str] = []
    monkeypatch.setattr(DictBackend, "get", special)
    monkeypatch.setattr(DictBackend, "put", lambda self, key, blob: asked.append(key))
    calls = Calls("dict", DictBackend(Config()), EventBus((), clock), clock, deadline=10.0)
    monkeypatch.setattr(clock, "random", iter([0.5, 0.25, 0.5, 0.125] * 9).__next__, raising=False)
    try:
        for breaker in (calls.reading, calls.writing):
            for _ in range(FAILURES):
                calls.failed("read", OSError(5, "Input/output error"), breaker)
            clock.time = breaker.probe_at
        assert calls.paused and calls._probe is not None
        calls._probe.wait()
        assert not calls.paused
        calls.try_writing()
        assert not calls.writing.open and asked[0] not in ("probe", "spec/probe"), "nobody can foresee it"
    finally:
        calls.close()


def test_what_a_call_finds_in_a_store_is_not_held_against_it(clock: Clock) -> None:
    calls = Calls("dict", DictBackend(Config()), EventBus((), clock), clock, deadline=10.0)

    def found() -> None:
        raise CorruptBlobError("not a regular file")

    try:
        for _ in range(2 * FAILURES):
            with pytest.raises(CorruptBlobError):
                calls.judged("put", found, calls.writing)()
        assert not calls.writing.open
    finally:
        calls.close()
