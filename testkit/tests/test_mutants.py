"""The kit is right: every mutant is caught by the requirement that it breaks, and each requirement has a mutant."""

from __future__ import annotations

import mutation
import pytest

from kvloom_testkit import mutants
from kvloom_testkit.kinds import CLASSES, conformance_of
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.requirements import requirements_of

SETTINGS: dict[str, dict[str, object]] = {"backend": {"path": "{tmp}"}}
"""Of mutants and oddities, by kind."""
KINDS = pytest.mark.parametrize("kind", CLASSES)
Outcomes = dict[str, tuple[str, str]]


def label(cls: type) -> str:
    return f"Test_{cls.__module__.rsplit('.', 1)[-1]}_{cls.__name__}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of every mutant on its requirement, of every oddity on all: few sessions of pytest, which take long to start."""
    wanted: mutation.Wanted = [
        (label(one), one.__module__, one.__name__, kind, [one.breaks] if issubclass(one, Mutant) else None)
        for kind in CLASSES
        for one in mutants.of(kind)
    ]
    seen: Outcomes = {}
    for _ in range(3):  # what is a matter of which thread comes first may get past once
        seen |= mutation.run(tmp_path_factory.mktemp("kit"), wanted, SETTINGS)
        wanted = [row for row in wanted if row[4] and seen.get(f"{row[0]}::{row[4][0]}", ("",))[0] != "failed"]
        if not wanted:
            break
    return seen


@KINDS
def test_every_requirement_has_a_mutant(kind: str) -> None:
    broken = {one.breaks for one in mutants.of(kind) if issubclass(one, Mutant)}
    assert broken == {one.id for one in requirements_of(conformance_of(kind))}


@KINDS
def test_every_mutant_is_caught(kind: str, outcomes: Outcomes) -> None:
    found = [one for one in mutants.of(kind) if issubclass(one, Mutant)]
    seen = {one.__name__: outcomes.get(f"{label(one)}::{one.breaks}", ("did not run", ""))[0] for one in found}
    assert {name: outcome for name, outcome in seen.items() if outcome != "failed"} == {}


@KINDS
def test_what_is_odd_and_right_passes(kind: str, outcomes: Outcomes) -> None:
    odd = [one for one in mutants.of(kind) if issubclass(one, Oddity)]
    assert odd
    for one in odd:
        seen = {key: found for key, found in outcomes.items() if key.startswith(label(one) + "::")}
        assert {key.split("::")[1] for key in seen} == {each.id for each in requirements_of(conformance_of(kind))}
        assert {key: said for key, (outcome, said) in seen.items() if outcome == "failed"} == {}
