"""The connector meets the requirements of the conformance kit, in both orders that its pool can have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom_connector_sglang.testing import harness
from kvloom_testkit import ConnectorConformance, ConnectorHarness


class TestLayerFirst(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return harness


class TestPageFirst(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return lambda: harness(layout="page_first")
