"""The observer meets the requirements of its kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom_events_zmq.observer import ZmqEventsObserver
from kvloom_testkit import ObserverConformance
from kvloom_testkit.faults import free_port
from kvloom_testkit.subjects import SPEC


class TestZmqEvents(ObserverConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ZmqEventsObserver]:
        config = ZmqEventsObserver.Config(endpoint=f"tcp://127.0.0.1:{free_port()}")
        return lambda: ZmqEventsObserver(config, SPEC)
