from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.config import MooncakeConfig
from kvloom_backend_mooncake.testing import MooncakeMaster, MooncakePeer

Open = Callable[..., MooncakeBackend]


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")


@pytest.fixture(scope="module")
def master(installed: None) -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as master:
        yield master


@pytest.fixture(scope="module")
def peer(master: MooncakeMaster) -> Iterator[MooncakePeer]:
    """Contributes what the others use."""
    with MooncakePeer(master.address) as peer:
        yield peer


@pytest.fixture
def open_backend() -> Iterator[Open]:
    """Backends of one master or another, closed at the end."""
    opened: list[MooncakeBackend] = []

    def open_backend(master: Any, **settings: Any) -> MooncakeBackend:
        address = master if isinstance(master, str) else master.address
        settings = {"local_host": "127.0.0.1", "buffer": 1 << 20, **settings}
        opened.append(MooncakeBackend(MooncakeConfig(master=address, **settings)))
        return opened[-1]

    yield open_backend
    for backend in opened:
        backend.close()
