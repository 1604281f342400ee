"""The scheduler's half beside an engine and workers that are simulated, and planted faults, each of which is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from scheduling import Sessions, Simulation, Violation
from scheduling_beside import Beside

from kvloom_connector_vllm.scheduling.messages import Report
from kvloom_connector_vllm.scheduling.plan import Boundary, Group, Move, Reads, Scheduled, Step
from kvloom_connector_vllm.scheduling.planner import Planner
from kvloom_connector_vllm.scheduling.saving import Saves, State
from kvloom_connector_vllm.scheduling.scheduler import Scheduler


def simulated(seeds: Iterable[int], operations: int, *, simulation: type[Simulation] = Simulation) -> Counter[str]:
    done: Counter[str] = Counter()
    for seed in seeds:
        try:
            done += simulation(seed).run(operations)
        except Violation as error:
            raise AssertionError(f"{simulation.__name__}({seed}).run({operations}): {error}") from error
    return done


def test_requests_come_and_go_and_no_kv_is_wrong() -> None:
    done = simulated(range(8), 400)
    assert min(done[what] for what in ("hits", "stored", "preempted", "failed")) > 5, "or it tests nothing"


def test_another_connector_loads_too_and_no_kv_is_wrong() -> None:
    done = simulated(range(8), 400, simulation=Beside)
    assert min(done[what] for what in ("hits", "stored", "others", "wrong")) > 5, "or it tests nothing"


def test_requests_get_more_inputs_and_no_kv_is_wrong() -> None:
    done = simulated(range(8), 400, simulation=Sessions)
    assert min(done[what] for what in ("hits", "stored", "preempted", "continued")) > 5, "or it tests nothing"


@pytest.mark.slow
@pytest.mark.parametrize("simulation", [Simulation, Beside, Sessions])
def test_a_hundred_thousand_operations(simulation: type[Simulation]) -> None:
    simulated(range(100, 200), 1000, simulation=simulation)


def _step_for_the_known(
    self: Planner, scheduled: Iterable[Scheduled], *more: Any, real: Any = Planner.step, **others: bool
) -> Step:
    return real(self, [one for one in scheduled if self.request(one.request)], *more, **others)


def _step_of_tables(
    self: Planner, scheduled: Iterable[Scheduled], boundaries: Iterable[Boundary], written: Sequence[int], *,
    real: Any = Planner.step, **others: bool,
) -> Step:  # fmt: skip
    return real(self, scheduled, boundaries, **others)


def _all_states(self: Saves, state: State, boundary: Boundary, *, real: Any = Saves.at_boundary) -> Move | None:
    size = self._groups[boundary.group].block_tokens
    return real(self, state, boundary._replace(tokens=-(-boundary.tokens // size) * size))


def _move_of_everything(self: Saves, *arguments: Any, real: Any = Saves._move) -> Move | None:
    return real(self, *arguments[:-1], 0)


def _first_rank_is_enough(self: Scheduler, report: Report, *, real: Any = Scheduler.report, **others: bool) -> None:
    report.saved = Counter(dict.fromkeys(report.saved, len(self._ranks)))
    real(self, report, **others)


def _keeps_all(self: Saves, fence: set[int], *, now: bool) -> Sequence[Move]:
    ended, self.ended = self.ended, []
    return tuple(ended)


def _window_too_short(self: Group, tokens: int, *, real: Any = Group.first) -> int:
    return min(tokens, real(self, tokens) + 1) if self.window else real(self, tokens)


def _no_states(self: Group, tokens: int, *, real: Any = Group.first) -> int:
    return tokens if self.state else real(self, tokens)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "blocks are not fenced": (Reads, "find", lambda self, blocks, found: None),
    "blocks of unknown requests are not fenced": (Planner, "step", _step_for_the_known),
    "blocks that are set to zero are not fenced": (Planner, "step", _step_of_tables),
    "blocks are free when one rank has read them": (Scheduler, "report", _first_rank_is_enough),
    "saves of requests that are over are begun though their blocks go": (Saves, "take_ended", _keeps_all),
    "blocks that were given up are saved": (Saves, "_move", _move_of_everything),
    "states are saved where they are not whole": (Saves, "at_boundary", _all_states),
    "a reset seals nothing": (Planner, "seal", lambda self: None),
    "a failed load is tried again": (Planner, "doubt", lambda self, failed, everything=False: None),
    "windows are loaded without their first token": (Group, "first", _window_too_short),
    "states are not loaded": (Group, "first", _no_states),
}


def _certain_at_once(self: Planner, number: int, *, failed: bool) -> None:
    self._uncertain = 0


BESIDE: dict[str, tuple[Any, str, Any]] = {
    "blocks that others load into are not fenced": (Planner, "give", lambda self, request, blocks: None),
    "what is computed while others load is saved": (Planner, "_others_load", lambda self, scheduled: False),
    "what was computed with KV that others lacked is saved": (Planner, "ascertain", _certain_at_once),
}


@pytest.mark.parametrize("fault", [*FAULTS, *BESIDE])
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    where, name, wrong = (FAULTS | BESIDE)[fault]
    monkeypatch.setattr(where, name, wrong)
    simulation = Beside if fault in BESIDE else Simulation
    with pytest.raises(AssertionError, match=rf"{simulation.__name__}\(\d+\)"):
        simulated(range(30), 400, simulation=simulation)
