"""Intervals, and which tasks count."""

from __future__ import annotations

import random

import pytest

from kvloom_eval.scores import statistics


def test_an_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    chance, below, above = random.Random(0), 0, 0
    for _ in range(200):
        found = statistics.mean([float(chance.random() < 0.6) for _ in range(40)])
        below += found.high < 0.6
        above += found.low > 0.6
    assert 1 <= below <= 11 and 1 <= above <= 11


def test_differences_are_of_the_same_items() -> None:
    exact = [float(number % 2) for number in range(40)]
    ours = [*exact[:-2], 0.0, 0.0]
    loss = statistics.mean(statistics.differences(ours, exact))
    assert loss.mean == pytest.approx(-1 / 40) and loss.high <= 0 and loss.low > -0.1
    with pytest.raises(ValueError):
        statistics.differences(ours[:-1], exact)


def test_tasks_weigh_alike_whatever_their_items() -> None:
    found = statistics.stratified({"one": [1.0] * 100, "other": [0.0] * 4})
    assert found == statistics.Mean(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no items"):
        statistics.stratified({"one": []})


@pytest.mark.parametrize(
    ("exact", "without", "reason"),
    [
        ([1.0] * 9 + [0.0], [0.0] * 10, ""),
        ([1.0] + [0.0] * 9, [0.0] * 10, "not above chance"),
        ([1.0] * 2 + [0.0] * 8, [0.0] * 10, "not above chance"),
        ([1.0] * 10, [1.0] * 9 + [0.0], "not below exact"),
    ],
)
def test_a_task_counts_if_the_model_can_do_it_and_needs_the_context(
    exact: list[float], without: list[float], reason: str
) -> None:
    found = statistics.dropped(exact, without, 0.125)
    assert reason in found and bool(found) == bool(reason)
