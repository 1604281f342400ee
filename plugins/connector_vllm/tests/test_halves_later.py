"""Saves of a step begin later than it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from halves_support import MEMORY, NOBODY, PROMPT, disk
from vllm_fakes import FakeRequest

from kvloom_connector_vllm.scheduling.plan import Scheduled


def test_a_reset_ends_saves_that_have_not_begun(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that sleeps has overwritten what they would read."""
    monkeypatch.setattr("kvloom_connector_vllm.worker.LATER_SECONDS", 20.0)
    one, saved = pretended(tiers=[MEMORY]), []
    save = one.engines[0].save
    monkeypatch.setattr(one.engines[0], "save", lambda *args, **kw: (saved.append(args), save(*args, **kw))[1])
    first, second = FakeRequest("a", PROMPT[:]), FakeRequest("b", [7] * 27)
    one.scheduler.begin(first, NOBODY)
    one.step([Scheduled("a", [range(8)], True, 0, 27)], lambda: one.compute(first, range(8), 0, 27))
    one.scheduler.end("a")
    one.scheduler.clear()
    one.scheduler.begin(second, NOBODY)
    one.step([Scheduled("b", [range(8)], True, 0, 27)], lambda: one.compute(second, range(8), 0, 27))
    one.settle()
    assert len(saved) == 1, "that of the second"


@pytest.mark.parametrize("end", ["end_saves", "end_transfers"])
def test_saves_can_be_ended_before_the_engine_sleeps(pretended: Any, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("kvloom_connector_vllm.worker.LATER_SECONDS", 20.0)
    one, request = pretended(tiers=[MEMORY]), FakeRequest("a", PROMPT[:])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", [range(8)], True, 0, 27)], lambda: one.compute(request, range(8), 0, 27))
    getattr(one.workers[0], end)()
    one.settle()
    assert one.matched(FakeRequest("b", PROMPT[:])) == 0


def test_saves_do_not_begin_beside_a_step_that_can_do_without(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that computes the end of a prompt."""
    monkeypatch.setattr("kvloom_connector_vllm.worker.LATER_SECONDS", 3600.0)
    one = pretended(tiers=[MEMORY])
    needed, tables = one.workers[0]._needed, {"a": range(8), "b": range(8, 16), "c": range(8)}
    for (name, table), begun in zip(tables.items(), (False, False, True), strict=True):
        request = FakeRequest(name, [ord(name)] * 27)
        one.scheduler.begin(request, NOBODY)
        one.step([Scheduled(name, [table], True, 0, 27)], lambda it=request, table=table: one.compute(it, table, 0, 27))
        one.scheduler.end(name)
        assert needed.is_set() == begun, "the last one gets blocks of the first"
    one.settle()  # nothing else is to be done
    assert [one.matched(FakeRequest(name * 2, [ord(name)] * 27)) for name in tables] == [24] * 3


def test_the_last_step_is_kept_when_no_other_follows(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (0.0, 20.0):
        monkeypatch.setattr("kvloom_connector_vllm.worker.LATER_SECONDS", seconds)
        one, request = pretended(tiers=[disk(tmp_path)]), FakeRequest("a", [int(seconds)] * 27)
        one.scheduler.begin(request, NOBODY)
        one.step(
            [Scheduled("a", [range(8)], True, 0, 27)], lambda one=one, it=request: one.compute(it, range(8), 0, 27)
        )
        if not seconds:
            one.workers[0]._later.shutdown()  # as the interpreter does before anything is closed
        one.workers[0].close()
        assert pretended(tiers=[disk(tmp_path)]).matched(FakeRequest("b", [int(seconds)] * 27)) == 24


def test_saves_wait_for_what_was_queued_on_the_device_by_their_step(
    pretended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom_connector_vllm.worker.LATER_SECONDS", 3600.0)
    one, request, asked = pretended(tiers=[MEMORY]), FakeRequest("a", PROMPT[:]), []
    marks, read = [object(), object()], one.engines[0].connector.read
    monkeypatch.setattr("kvloom_connector_vllm.worker.mark", lambda device: marks[0])
    monkeypatch.setattr(
        one.engines[0].connector, "read", lambda *a, **kw: (asked.append(kw["ready"]), read(*a, **kw))[1]
    )
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", [range(8)], True, 0, 27)], lambda: one.compute(request, range(8), 0, 27))
    monkeypatch.setattr("kvloom_connector_vllm.worker.mark", lambda device: marks[1])
    one.settle()
    assert asked == marks[:1]
