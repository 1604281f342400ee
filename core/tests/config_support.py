"""Support for the configuration's tests: a backend with a setting, and the lines of refused configurations."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

import kvloom
from kvloom import ConfigError, EngineConfig, KVSpec, Registry, hookimpl
from kvloom.builtin.dict_backend import DictBackend
from kvloom.config import resolve

GiB = 1 << 30
SPEC = KVSpec(model="tiny", num_layers=1, num_kv_heads=1, head_size=4, dtype="float32")


class Shelf(DictBackend):
    """A backend with a setting, and a constructor that can be made to raise."""

    type = "shelf"

    class Config(kvloom.Config):
        shelf: str = "default"

    def __init__(self, config: Any, spec: KVSpec | None = None, *, fault: BaseException | None = None) -> None:
        super().__init__(config, spec)
        self.spec = spec
        if fault:
            raise fault


def plugins_made_here(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The plugins of the core, and `type: shelf`."""
    module = ModuleType("made_here")
    module.kvloom_storage_backends = hookimpl(lambda: [Shelf])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    core = EntryPoint("builtin", "kvloom.builtin", "kvloom.v1")
    return Registry.discover(entry_points=[core, EntryPoint("made_here", "made_here", "kvloom.v1")])


def lines(caught: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return str(caught.value).splitlines()


def refused(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(source)
    return lines(caught)


def unresolved(source: Any, registry: Registry) -> list[str]:
    config = EngineConfig.load(source)
    with pytest.raises(ConfigError) as caught:
        resolve(config, registry)
    return lines(caught)
