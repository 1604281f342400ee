"""Settings that cannot work are named when vLLM looks up the class that they are for: before it loads a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvloom import check_config
from kvloom_connector_vllm.adapter import check_when_looked_up
from kvloom_connector_vllm.configured import Settings


class KVLoomConnector:
    """Takes the place of the real one, which needs vLLM."""

    @classmethod
    def check_settings(cls, extra: Any) -> None:
        check_config(Settings.read(extra, ranks=1).engine)


class OffloadingConnector:
    """vLLM's own."""


class Factory:
    @classmethod
    def get_connector_class(cls, kv_transfer_config: Any) -> Any:
        return {"KVLoomConnector": KVLoomConnector, "OffloadingConnector": OffloadingConnector}[
            kv_transfer_config.kv_connector
        ]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Factory, "get_connector_class", Factory.get_connector_class)
    check_when_looked_up(Factory)
    check_when_looked_up(Factory)
    return Factory


def looked_up(factory: Any, name: str, extra: Any) -> Any:
    return factory.get_connector_class(SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra))


OFFLOADING = {"spec_name": "KVLoomOffloadingSpec"}


@pytest.mark.parametrize(("name", "extra", "said"), [
    ("KVLoomConnector", {"config": "/nowhere/kvloom.yaml"}, "/nowhere/kvloom.yaml: cannot be read"),
    ("KVLoomConnector", {"config": {"tiers": [{"type": "disk"}]}}, "tiers.0.path: missing"),
    ("KVLoomConnector", {"config": {"tiers": [{"type": "dsik"}]}}, "tiers.0.type: "),
    ("KVLoomConnector", {}, "kv_connector_extra_config.config: missing"),
    ("KVLoomConnector", {"conf": 1}, "kv_connector_extra_config.conf: unknown key"),
    ("OffloadingConnector", {**OFFLOADING, "config": "/nowhere/kvloom.yaml"}, "/nowhere/kvloom.yaml: cannot be read"),
    ("OffloadingConnector", {**OFFLOADING, "config": {}, "staging": "x"}, "kv_connector_extra_config.staging: "),
    ("OffloadingConnector", OFFLOADING, "kv_connector_extra_config.config: "),
    ("OffloadingConnector", {"secondary_tiers": [{"type": "fs"}, {"type": "KVLoomTier"}]},
     "kv_connector_extra_config.secondary_tiers.1.config: missing"),
    ("OffloadingConnector", {"secondary_tiers": [{"type": "KVLoomTier", "config": "/nowhere"}]}, "/nowhere: "),
])  # fmt: skip
def test_what_cannot_work_is_the_last_line(factory: Any, name: str, extra: Any, said: str) -> None:
    with pytest.raises(RuntimeError) as error:
        looked_up(factory, name, extra)
    assert str(error.value).startswith(f"{name}: {said}")
    assert not isinstance(error.value, ValueError), "pydantic puts its own text in place of a ValueError"


@pytest.mark.parametrize(("name", "extra", "paths"), [
    ("KVLoomConnector", {"conf": 1, "cnf": 2, "async_load": 3, "by_layer": 4}, ["cnf", "conf", "async_load", "by_layer",
     "config"]),
    ("KVLoomConnector", {"async_load": 3, "config": {"tiers": [{"type": "disk"}], "chunk_tokens": 0}},
     ["async_load", "tiers.0.path", "chunk_tokens"]),
    ("KVLoomConnector", {"by_layer": 3, "config": {"tokens": "radix", "connector": "transformers"}},
     ["by_layer", "connector", "tokens"]),
    ("OffloadingConnector",
     {**OFFLOADING, "staging": "x", "patience": "y", "secondary_tiers": [{"type": "KVLoomTier"}]},
     ["config", "staging", "patience", "secondary_tiers.0.config"]),
])  # fmt: skip
def test_all_that_cannot_work_is_said_at_once(factory: Any, name: str, extra: Any, paths: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        looked_up(factory, name, extra)
    lines = str(error.value).removeprefix(f"{name}: ").splitlines()
    said = [line.partition(": ")[0].removeprefix("kv_connector_extra_config.") for line in lines]
    assert sorted(said) == sorted(paths)


@pytest.mark.parametrize(("name", "extra"), [
    ("KVLoomConnector", {"config": {"tiers": [{"type": "memory", "capacity": "1MiB"}]}}),
    ("OffloadingConnector", {**OFFLOADING, "config": {}, "staging": "1GiB"}),
    ("OffloadingConnector", {"spec_name": "CPUOffloadingSpec"}),
    ("OffloadingConnector", {"secondary_tiers": "KVLoomTier"}),
])  # fmt: skip
def test_what_can_work_is_found(factory: Any, name: str, extra: Any) -> None:
    assert looked_up(factory, name, extra).__name__ == name
