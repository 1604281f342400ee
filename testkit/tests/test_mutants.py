"""The kit is right: every mutant is caught by the requirement that it breaks, and each requirement has a mutant."""

from __future__ import annotations

from pathlib import Path

import mutation
import pytest

from kvloom_testkit import mutants
from kvloom_testkit.kinds import CLASSES, conformance_of
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.requirements import requirements_of

SETTINGS: dict[str, dict[str, object]] = {"backend": {"path": "{tmp}"}}
KINDS = pytest.mark.parametrize("kind", CLASSES)


@KINDS
def test_every_requirement_has_a_mutant(kind: str) -> None:
    broken = {one.breaks for one in mutants.of(kind) if issubclass(one, Mutant)}
    assert broken == {one.id for one in requirements_of(conformance_of(kind))}


@KINDS
def test_every_mutant_is_caught(kind: str, tmp_path: Path) -> None:
    found = [one for one in mutants.of(kind) if issubclass(one, Mutant)]
    wanted = [(f"Test{one.__name__}", one.__module__, one.__name__, kind, [one.breaks]) for one in found]
    seen = mutation.run(tmp_path / "kit", wanted, SETTINGS.get(kind, {}))
    outcomes = {one.__name__: seen.get(f"Test{one.__name__}::{one.breaks}", ("did not run", "")) for one in found}
    assert [name for name, (outcome, _) in outcomes.items() if outcome != "failed"] == []


@KINDS
def test_what_is_odd_and_right_passes(kind: str, tmp_path: Path) -> None:
    found = [one for one in mutants.of(kind) if issubclass(one, Oddity)]
    wanted = [(f"Test{one.__name__}", one.__module__, one.__name__, kind, None) for one in found]
    seen = mutation.run(tmp_path / "kit", wanted, SETTINGS.get(kind, {}))
    assert seen or not found
    assert {key: said for key, (outcome, said) in seen.items() if outcome == "failed"} == {}
