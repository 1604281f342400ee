"""The kit is right: every mutant is caught by the requirement that it breaks, and each requirement has a mutant."""

from __future__ import annotations

import mutation
import pytest
from places import in_memory

from kvloom_testkit import mutants
from kvloom_testkit.kinds import CLASSES, conformance_of
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.requirements import requirements_of

SETTINGS: dict[str, dict[str, object]] = {"backend": {"path": "{tmp}"}}
"""Settings of mutants and oddities, by kind."""
PROCESSES = {"B23", "B24", "B26", "B36", "B37", "B45", "B46", "B47", "B48", "B49", "S11", "T09"}
"""Requirements that start processes."""
RACES = {"B09", "B10", "B11", "B18", "B20", "B33", "B56", "S09", "X14"}
"""Requirements that are about threads which meet."""
LARGE = {"B38", "B44"}
"""Requirements that take long for another reason."""
KINDS = pytest.mark.parametrize("kind", CLASSES)
PARTS = pytest.mark.parametrize("outcomes", ["quick", pytest.param("slow", marks=pytest.mark.slow)], indirect=True)
Outcomes = dict[str, tuple[str, str]]


def label(cls: type) -> str:
    """A name of its own: kinds have mutants of the same name, in modules of the same name."""
    return f"Test_{'_'.join(cls.__module__.split('.')[-2:])}_{cls.__name__}"


def ids_of(one: type, kind: str, part: str) -> set[str]:
    """The requirements that one is tried on: a mutant on its own, an oddity on all; in a part of the tests."""
    slow = PROCESSES | RACES | LARGE
    ids = {one.breaks} if issubclass(one, Mutant) else {each.id for each in requirements_of(conformance_of(kind))}
    return ids & slow if part == "slow" else ids - slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Outcomes]:
    """The name of the part, and what became of everything in it: few sessions of pytest, which take long to start."""
    wanted: mutation.Wanted = [
        (label(one), one.__module__, one.__name__, kind, sorted(ids), issubclass(one, Oddity))
        for kind in CLASSES
        for one in mutants.of(kind)
        if (ids := ids_of(one, kind, request.param))
    ]
    seen: Outcomes = {}
    for _ in range(3):  # what is a matter of which thread comes first may get past once
        with in_memory(tmp_path_factory.mktemp("kit")) as place:
            seen |= mutation.run(place, wanted, SETTINGS)
        wanted = [row for row in wanted if not row[5] and seen.get(f"{row[0]}::{row[4][0]}", ("",))[0] != "failed"]
        if not wanted:
            break
    return request.param, seen


@KINDS
def test_every_requirement_has_a_mutant(kind: str) -> None:
    broken = {one.breaks for one in mutants.of(kind) if issubclass(one, Mutant)}
    assert broken == {one.id for one in requirements_of(conformance_of(kind))}


@PARTS
@KINDS
def test_every_mutant_is_caught(kind: str, outcomes: tuple[str, Outcomes]) -> None:
    part, found = outcomes
    mine = [one for one in mutants.of(kind) if issubclass(one, Mutant) and ids_of(one, kind, part)]
    seen = {one.__name__: found.get(f"{label(one)}::{one.breaks}", ("did not run", ""))[0] for one in mine}
    assert {name: outcome for name, outcome in seen.items() if outcome != "failed"} == {}


@PARTS
@KINDS
def test_what_is_odd_and_right_passes(kind: str, outcomes: tuple[str, Outcomes]) -> None:
    part, found = outcomes
    odd = [one for one in mutants.of(kind) if issubclass(one, Oddity)]
    assert odd
    for one in odd:
        seen = {key: outcome for key, outcome in found.items() if key.startswith(label(one) + "::")}
        assert {key.split("::")[1] for key in seen} == ids_of(one, kind, part)
        assert {key: said for key, (outcome, said) in seen.items() if outcome == "failed"} == {}
