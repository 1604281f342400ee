"""The radix token database meets the requirements of its kind, with and without a journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom_testkit import TokensConformance
from kvloom_testkit.subjects import SPEC
from kvloom_tokens_radix.database import RadixTokenDatabase


class TestRadix(TokensConformance):
    @pytest.fixture
    def make(self) -> Callable[[], RadixTokenDatabase]:
        return lambda: RadixTokenDatabase(RadixTokenDatabase.Config(min_tokens=4), SPEC)


class TestRadixWithDefaults(TokensConformance):
    slow = ("T09",)

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], RadixTokenDatabase]:
        places = iter(range(1000))
        return lambda: RadixTokenDatabase(RadixTokenDatabase.Config(path=tmp_path / str(next(places))), SPEC)
