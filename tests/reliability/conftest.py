"""Fixtures of the reliability tests, and the count of what each did, printed behind the results."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Tally = Callable[..., None]


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Call it with the counts of what was done: `tally(reads=1)`."""
    test = request.function.__name__

    def add(**counts: int) -> None:
        for name, number in counts.items():
            request.node.user_properties.append(("counted", (f"{test}: {name.replace('_', ' ')}", number)))

    return add


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory (tmpfs), where there is such a thing."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="kvloom-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["disk", "ram"])
def store_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory on a disk's file system, then one in memory."""
    path: Path = tmp_path if request.param == "disk" else request.getfixturevalue("ram_path")
    return path
