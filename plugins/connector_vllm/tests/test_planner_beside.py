"""The planner, and both halves, beside another connector, which loads KV into the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
from halves_support import MEMORY, PROMPT
from test_planner import NOBODY, planner
from vllm_fakes import FakeRequest

from kvloom_connector_vllm.scheduling.plan import Scheduled

TABLE = [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize("failed", [False, True])
def test_a_request_that_ends_in_such_a_step_is_saved_once_all_has_come(failed: bool) -> None:
    one, request = planner(), FakeRequest("r", list(range(15)))
    one.begin(request, NOBODY)
    step = one.step([Scheduled("r", TABLE, True, 8, 15)], awaits_loads=True)
    assert step.uncertain and not step.saves
    request.append(100, 101, 102)
    one.step([Scheduled("r", (), False, 15, 17)])
    one.end("r", TABLE)
    assert one.owes and not one.step([]).ended, "it is not known yet whether all came"
    one.ascertain(step.uncertain, failed=failed)
    assert [save.blocks for save in one.step([]).ended] == ([] if failed else [(5, 6)])
    assert bool(one.reading) is not failed


def test_the_last_of_several_such_steps_decides() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(17))), NOBODY)
    first = one.step([Scheduled("r", TABLE, True, 8, 12)], awaits_loads=True)
    one.begin(FakeRequest("s", list(range(17))), NOBODY)
    second = one.step([Scheduled("s", [[10, 11, 12, 13, 14]], True, 8, 17)], awaits_loads=True)
    one.ascertain(first.uncertain, failed=False)
    assert not one.step([Scheduled("r", (), False, 12, 17)]).saves
    one.ascertain(second.uncertain, failed=False)
    assert len(one.step([Scheduled("r", (), False, 17, 18), Scheduled("s", (), False, 17, 18)]).saves) == 2


def test_loads_of_its_own_within_a_step_are_not_another_connectors() -> None:
    one = planner()
    one.begin(FakeRequest("r", list(range(17))), NOBODY, local=8)
    assert not one.step([Scheduled("r", TABLE, True, 8, 17)], awaits_loads=True).uncertain


def test_a_request_that_comes_back_and_waits_for_another_connector_has_computed_nothing() -> None:
    one, request = planner(save_generated=True), FakeRequest("r", list(range(15)))
    one.begin(request, NOBODY)
    one.step([Scheduled("r", TABLE, True, 0, 15)])
    request.tokens += [100, 101, 102]
    one.step([Scheduled("r", (), False, 15, 17)])
    request.rehash()  # too late for a save
    one.give("r", [[10, 11, 12, 13, 14]])
    assert not one.end("r", [[10, 11, 12, 13, 14]])


def test_each_rank_reports_such_a_step(pretended: Any) -> None:
    """Else nothing would be saved any more."""
    one, request = pretended(tiers=[MEMORY], ranks=2), FakeRequest("r", PROMPT[:])
    one.scheduler.begin(request, NOBODY)
    orders = one.scheduler.orders([Scheduled("r", [range(1, 8)], True, 8, len(PROMPT))], awaits_loads=True)
    assert orders.step.uncertain
    for worker in one.workers:
        worker.fence(orders)
        worker.begin(orders)
        worker.load(wait=False)
        worker.save()
        assert worker.report().ascertained == orders.step.uncertain
