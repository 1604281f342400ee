"""On real vLLM, each mutant is found by the requirement that it breaks, and oddities meet all."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvloom_testkit.engines.bench import ENVIRONMENT, HOST, Bench
from kvloom_testkit.engines.process import Host
from kvloom_testkit.engines.running import Row, check
from kvloom_testkit.engines.subject import Subject
from kvloom_testkit.mutants import Mutant, Oddity, engines
from kvloom_testkit.mutants.engines.odd import StoresLater
from kvloom_testkit.reference.vllm.connector import DirectoryConnector
from kvloom_testkit.reference.vllm.groups import GroupsConnector
from kvloom_testkit.reference.vllm.tier import DirectoryTier

CLASSES = [
    cls
    for found in iter_modules(engines.__path__, f"{engines.__name__}.")
    for cls in vars(import_module(found.name)).values()
    if isinstance(cls, type) and cls.__module__ == found.name and issubclass(cls, (Mutant, Oddity))
]
MUTANTS = pytest.mark.parametrize(
    "mutant", [pytest.param(one, id=f"{one.breaks}-{one.__name__}") for one in CLASSES if issubclass(one, Mutant)]
)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host(HOST, environment=ENVIRONMENT) as host:
        yield host


def rows_of(host: Host, cls: type, *only: str, extra: dict[str, Any] | None = None, **options: float) -> list[Row]:
    """The rows of a connector, or a secondary tier, that keeps its files where the kit says."""
    make = Subject.of_tier if issubclass(cls, DirectoryTier) else Subject.named
    subject = make(f"{cls.__module__}:{cls.__name__}", extra={"path": "{tmp}", **(extra or {})}, **options)
    bench = Bench(subject, short=True, host=host)
    try:
        return check(bench, only=only)
    finally:
        bench.close()


@MUTANTS
def test_a_mutant_is_found_by_its_requirement(host: Host, mutant: type[Mutant]) -> None:
    (row,) = rows_of(host, mutant, mutant.breaks, seconds=10.0)
    if (row.id, row.outcome) == ("E29", "skipped"):
        pytest.skip(row.reason)
    assert row.outcome == "not met", row


def test_saves_may_take_as_long_as_is_said(host: Host) -> None:
    (row,) = rows_of(host, StoresLater, "E04", extra={"late": 2.0}, settle=3.0)
    assert row.outcome == "met", row


SKIPPED = {("E29", "skipped"), ("E16", "skipped")}
"""vLLM has no prefix cache for latents on processors without AMX, and does not reset secondary tiers."""
RIGHT = [DirectoryConnector, GroupsConnector, DirectoryTier, *(one for one in CLASSES if issubclass(one, Oddity))]


@pytest.mark.parametrize("cls", RIGHT, ids=lambda one: one.__name__)
def test_what_is_right_meets_all(host: Host, cls: type) -> None:
    """All but states, of a connector that takes models with one group only."""
    found = {(row.id, row.outcome) for row in rows_of(host, cls) if row.outcome != "met"} - SKIPPED
    assert found == (set() if issubclass(cls, (GroupsConnector, DirectoryTier)) else {("E31", "not met")})
