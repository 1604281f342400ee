"""The kit on the memory of another process, with the master's own lease of ten seconds, and on one's own segment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom import StorageBackend
from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.config import MooncakeConfig
from kvloom_backend_mooncake.testing import MooncakeMaster, MooncakePeer
from kvloom_testkit import BackendConformance

NO_FORKS = pytest.mark.xfail(reason="Mooncake's client has threads of its own, and none after a fork", strict=True)


class _Mooncake(BackendConformance):
    @NO_FORKS
    def test_B23_an_instance_survives_a_fork(self, names, opened):
        super().test_B23_an_instance_survives_a_fork(names, opened)


class TestMooncake(_Mooncake):
    @pytest.fixture
    def make(self, master: MooncakeMaster, peer: MooncakePeer) -> Callable[[], StorageBackend]:
        config = MooncakeConfig(master=master.address, local_host="127.0.0.1", buffer=1 << 20)
        return lambda: MooncakeBackend(config)
