"""The observers meet the requirements of their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observe_support import SPEC

from kvloom_observe.live.observer import LiveObserver
from kvloom_observe.otel import OpenTelemetryObserver
from kvloom_observe.prometheus.observer import PrometheusObserver
from kvloom_testkit import ObserverConformance
from kvloom_testkit.faults import refusing_port


class TestPrometheus(ObserverConformance):
    @pytest.fixture
    def make(self) -> Callable[[], Any]:
        return lambda: PrometheusObserver(PrometheusObserver.Config(port=0), SPEC)


class TestOpenTelemetry(ObserverConformance):
    @pytest.fixture
    def make(self) -> Iterator[Callable[[], Any]]:
        with refusing_port() as port:
            config = OpenTelemetryObserver.Config(endpoint=f"http://127.0.0.1:{port}/v1/traces", timeout=0.2)
            yield lambda: OpenTelemetryObserver(config, SPEC)


class TestLive(ObserverConformance):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Any]:
        return lambda: LiveObserver(LiveObserver.Config(), SPEC)
