"""Each mutant of the reference storage is found by the requirement that it breaks, and the reference meets all.

Needs two modules of SGLang and none of what they drive: of an installed one, of the wheel that SGLANG_WHEEL names, or
of one from the package index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from engine_mutants import mutants

from kvloom_testkit.engines.process import Host
from kvloom_testkit.engines.running import Row, check
from kvloom_testkit.engines.sglang import wheel
from kvloom_testkit.engines.sglang.requirements import StorageConformance
from kvloom_testkit.engines.sglang.storages import HOST, Storage, StorageBench

pytestmark = pytest.mark.slow

REFERENCE = "kvloom_testkit.reference.sglang:DirectoryStorage"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    try:
        folder = wheel.path(tmp_path_factory.mktemp("sglang"))
    except ImportError as error:
        pytest.skip(str(error))
    search = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"], before = search, os.environ.get("PYTHONPATH")
    try:
        with Host(HOST, environment={"OMP_NUM_THREADS": "1"}) as host:
            yield host
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def rows_of(host: Host, name: str, *only: str, **extra: Any) -> list[Row]:
    subject = Storage.named(name, extra={"path": "{tmp}", **extra}, seconds=20.0)
    bench = StorageBench(subject, short=True, host=host)
    try:
        return check(bench, StorageConformance, only=only)
    finally:
        bench.close()


@pytest.mark.parametrize(("name", "breaks"), mutants("storages"))
def test_a_mutant_is_found_by_its_requirement(host: Host, name: str, breaks: str) -> None:
    (row,) = rows_of(host, name, breaks, interface_v1=1)
    assert row.outcome == "not met", row


@pytest.mark.parametrize("extra", [{}, {"interface_v1": 1}], ids=["pages", "rows"])
def test_the_reference_meets_all(host: Host, extra: dict[str, Any]) -> None:
    assert [row for row in rows_of(host, REFERENCE, **extra) if row.outcome != "met"] == []
