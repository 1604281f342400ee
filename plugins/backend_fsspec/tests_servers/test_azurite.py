"""The backend meets the requirements of storage backends on Azure's blobs, as Microsoft's emulator has them."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from kvloom import ConfigError, Engine, KVSpec, StorageBackend
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.testing import AZURE_ACCOUNT, AzuriteServer
from kvloom_testkit import BackendConformance

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")


def settings(azurite: AzuriteServer, container: str) -> dict[str, Any]:
    options = {"account_name": AZURE_ACCOUNT, "endpoint": azurite.endpoint}
    return {"url": f"az://{container}/kv", "options": options, "allow_http": True, "timeout": 30.0}  # it is slow


@pytest.fixture(scope="module")
def container(azurite: AzuriteServer) -> str:
    name = f"kv-{uuid.uuid4().hex[:12]}"
    azurite.make_container(name)
    return name


class TestAzurite(BackendConformance):
    @pytest.fixture
    def make(self, azurite: AzuriteServer, container: str) -> Callable[[], StorageBackend]:
        return lambda: FsspecBackend(FsspecBackend.Config(**settings(azurite, container)))


def test_what_is_not_there_does_not_keep_the_others(azurite: AzuriteServer, container: str) -> None:
    backend = FsspecBackend(FsspecBackend.Config(**settings(azurite, container)))
    for key in ("a", "c"):
        backend.put(key, [b"blob"])
    backend.delete_many(["0", "a", "b", "c", "d"])
    assert backend.contains_many(["a", "c"]) == [False, False]
    backend.close()


def refused(azurite: AzuriteServer, container: str) -> str:
    tier = {"type": "fsspec", **settings(azurite, container)}
    with pytest.raises(ConfigError) as caught:
        Engine.open({"connector": "plain", "tiers": ["memory", tier]}, SPEC).close()
    return str(caught.value)


def test_a_container_that_is_not_there(azurite: AzuriteServer) -> None:
    said = refused(azurite, "no-such-container")
    assert said.startswith("tiers.1: url: cannot write: az://no-such-container: ")
    assert "make it, or name another one in `url`" in said


def test_a_wrong_key(azurite: AzuriteServer, container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = base64.b64encode(b"quite something else").decode()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    said = refused(azurite, container)
    assert "credentials" in said and wrong not in said
