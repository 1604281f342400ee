"""Fixtures of the tools' tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from clock_support import Hang, skipping_clock
from hypothesis import settings

from kvloom.runtime import SystemRuntime

settings.register_profile("kvloom", deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", 25)))
settings.load_profile("kvloom")

torch.set_num_threads(1)


@pytest.fixture
def hang() -> Iterator[Hang]:
    """A gate that store calls hang at, on a clock that skips ahead while everybody waits."""
    with skipping_clock() as clock:
        hang = Hang(clock)
        yield hang
        hang.open()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the wall clock."""
    ahead, wall = 0.0, time.time

    def move(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    for owner, name in ((time, "time"), (SystemRuntime, "wall")):
        monkeypatch.setattr(owner, name, staticmethod(lambda: wall() + ahead))
    return move
