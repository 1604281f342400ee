"""Every codec's blobs in Mooncake's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from shared_stores import CodecsOnAStore

from kvloom import ByteSize, StorageBackend
from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.config import MooncakeConfig
from kvloom_backend_mooncake.testing import MooncakeMaster, MooncakePeer


@pytest.fixture(scope="module")
def tier(master: MooncakeMaster, peer: MooncakePeer) -> dict[str, Any]:
    return {
        "type": "mooncake", "master": master.address, "local_host": "127.0.0.1",
        "buffer": "16MiB", "deadline": "60s",
    }  # fmt: skip


@pytest.fixture(scope="module")
def store(master: MooncakeMaster, peer: MooncakePeer) -> Iterator[StorageBackend]:
    backend = MooncakeBackend(MooncakeConfig(master=master.address, local_host="127.0.0.1", buffer=ByteSize(16 << 20)))
    yield backend
    backend.close()


class TestCodecs(CodecsOnAStore):
    """In the memory of another process."""
