"""The built-in components meet the requirements of their kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom import StorageBackend
from kvloom.builtin.dict_backend import DictBackend
from kvloom_testkit import BackendConformance


class TestDict(BackendConformance):
    @pytest.fixture
    def make(self) -> Callable[[], StorageBackend]:
        return lambda: DictBackend(DictBackend.Config())
