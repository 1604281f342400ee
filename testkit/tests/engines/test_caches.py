"""Each mutant of the reference cache is found by the requirement that it breaks, and the reference meets all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_mutants import mutants

from kvloom_testkit.engines.process import Host
from kvloom_testkit.engines.running import Row, check
from kvloom_testkit.engines.transformers.caches import ENVIRONMENT, HOST, CacheBench, Cached
from kvloom_testkit.engines.transformers.requirements import CacheConformance

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")

REFERENCE = "kvloom_testkit.reference.transformers:DirectoryCache"
REFUSED = {"G08", "G09", "G16", "G17"}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host(HOST, environment=ENVIRONMENT) as host:
        yield host


def rows_of(host: Host, subject: Cached, *only: str) -> list[Row]:
    bench = CacheBench(subject, short=True, host=host)
    try:
        return check(bench, CacheConformance, only=only)
    finally:
        bench.close()


@pytest.mark.parametrize(("name", "breaks"), mutants("caches"))
def test_a_mutant_is_found_by_its_requirement(host: Host, name: str, breaks: str) -> None:
    (row,) = rows_of(host, Cached.wrapper(name, extra={"path": "{tmp}"}, seconds=20.0), breaks)
    assert row.outcome == "not met", row


def test_the_reference_meets_all_or_refuses(host: Host) -> None:
    rows = rows_of(host, Cached.wrapper(REFERENCE, extra={"path": "{tmp}"}))
    assert {row.id for row in rows if row.outcome == "skipped"} == REFUSED
    assert [row for row in rows if row.outcome not in ("met", "skipped")] == []


def test_transformers_own_cache_meets_what_applies(host: Host) -> None:
    rows = rows_of(host, Cached.cache("transformers:DynamicCache"))
    assert {row.outcome for row in rows} == {"met", "skipped"} and rows[0].outcome == "met"
