"""The kit on a segment of one's own, with memory that has to be registered, as for RDMA."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom import StorageBackend
from kvloom_backend_mooncake import memories
from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.config import MooncakeConfig
from kvloom_backend_mooncake.testing import MooncakeMaster, MooncakePeer
from kvloom_testkit import BackendConformance


class TestRegistered(BackendConformance):
    @pytest.fixture
    def make(
        self, master: MooncakeMaster, peer: MooncakePeer, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], StorageBackend]:
        monkeypatch.setattr(memories, "NEED_NOT_KNOW", frozenset())
        config = MooncakeConfig(master=master.address, local_host="127.0.0.1", segment=0, buffer=1 << 20)
        return lambda: MooncakeBackend(config)

    @pytest.mark.skip(reason="see test_conformance; the setting of this module is not passed on to other processes")
    def test_B23_an_instance_survives_a_fork(self, names, opened):
        pass
