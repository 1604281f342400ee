"""Error messages for settings, a client that is not installed, and a missing master; without any server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from kvloom import ConfigError, EngineConfig, Registry
from kvloom.config import resolve
from kvloom_backend_mooncake import client
from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.config import MooncakeConfig
from kvloom_testkit.faults import refusing_port


def test_it_is_found_by_its_entry_point() -> None:
    assert Registry.discover().get("backend", MooncakeBackend.type) is MooncakeBackend
    told = MooncakeBackend.type, MooncakeBackend.persistent, MooncakeBackend.shared, MooncakeBackend.bounded
    assert told == ("mooncake", False, True, True)


def test_neither_torch_nor_the_client_is_imported() -> None:
    code = "import sys, kvloom_backend_mooncake.backend; assert not {'torch', 'mooncake'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("master", ["", "host", "host:", ":50051", "host:0", "host:65536", "tcp://host:1", "a b:1"])
def test_a_master_that_is_no_address(master: str) -> None:
    with pytest.raises(ValidationError, match=r"write for example 127\.0\.0\.1:50051"):
        MooncakeConfig(master=master)


def test_addresses() -> None:
    assert MooncakeConfig(master="kv.example:50051").address == ("kv.example", 50051)
    assert MooncakeConfig(master="[::1]:50051").address == ("::1", 50051)


@pytest.mark.parametrize(
    ("name", "value"),
    [("metadata", "host:8080"), ("metadata", ""), ("segment", -1), ("buffer", 0), ("replicas", 0), ("timeout", 0),
     ("connect_timeout", "1 fortnight"), ("protocol", ""), ("tenant", ""), ("lease", 1)],
)  # fmt: skip
def test_settings_that_cannot_work(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        MooncakeConfig(master="127.0.0.1:50051", **{name: value})


def test_an_error_begins_with_the_path_in_yaml() -> None:
    config = EngineConfig.load({"connector": "plain", "tiers": [{"type": "mooncake", "master": "nowhere"}]})
    with pytest.raises(ConfigError, match=r"^tiers\.0\.master: .*host:port"):
        resolve(config, Registry.discover())


def test_the_login_of_a_metadata_server_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = SimpleNamespace(setup=lambda settings: -1)
    module = SimpleNamespace(ReplicateConfig=SimpleNamespace, MooncakeDistributedStore=lambda: refuses)
    monkeypatch.setattr(client, "load", lambda: module)
    monkeypatch.setattr(client.Client, "_reach_master", lambda self: None)
    config = MooncakeConfig(master="127.0.0.1:50051", metadata="redis://user:geheim@host:6379")
    with pytest.raises(ValueError, match=r"metadata redis://host:6379 \(code -1\)"):
        MooncakeBackend(config)


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    with pytest.raises(ValueError, match="pip install mooncake-transfer-engine-non-cuda"):
        MooncakeBackend(MooncakeConfig(master="127.0.0.1:1"))


def test_a_client_whose_libraries_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(client.importlib, "import_module", broken)
    with pytest.raises(ValueError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
        client.load()


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "load", lambda: None)
    with refusing_port() as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(ValueError, match=f"^master: no answer at {address}.*start mooncake_master"):
            MooncakeBackend(MooncakeConfig(master=address))


@pytest.mark.parametrize("host", ["nowhere.invalid", "no..where"])
def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(client, "load", lambda: None)
    with pytest.raises(ValueError, match=rf"^master: no answer at {re.escape(host)}:1"):
        MooncakeBackend(MooncakeConfig(master=f"{host}:1"))
    with pytest.raises(ValueError, match=r"^local_host: .* is no address of this machine"):
        MooncakeBackend(MooncakeConfig(master="127.0.0.1:1", local_host=host))


def test_the_client_is_told_how_long_to_wait_and_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_told", {})
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "7")
    for name in ("MC_LOG_LEVEL", "MC_TCP_STATUS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    wanted = client.patience(MooncakeConfig(master="a:1", timeout="1500ms", connect_timeout="250ms"))
    assert (wanted["MC_RPC_TIMEOUT_MS"], wanted["MC_TCP_STATUS_TIMEOUT_SEC"]) == ("1500", "2"), "whole seconds, upwards"
    assert (wanted["MC_RPC_CONNECT_TIMEOUT_MS"], wanted["MC_HANDSHAKE_CONNECT_TIMEOUT"]) == ("250", "1")
    for seconds in ("2", "9"):
        client._tell({name: wanted[name] for name in ("MC_RPC_TIMEOUT_MS", "MC_LOG_LEVEL")})
        client._tell({"MC_TCP_STATUS_TIMEOUT_SEC": seconds})
        told = [os.environ[name] for name in ("MC_RPC_TIMEOUT_MS", "MC_LOG_LEVEL", "MC_TCP_STATUS_TIMEOUT_SEC")]
        assert told == ["7", "ERROR", seconds]
