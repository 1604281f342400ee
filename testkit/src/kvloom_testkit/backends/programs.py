"""Programs for a fresh process, which can open a backend like the tested one."""

from __future__ import annotations

import json
import sys

import pytest

from kvloom import Config, KVSpec, StorageBackend
from kvloom_testkit.running import in_fresh_process

OPEN = """
import importlib, importlib.util, json, os, signal, sys, time

module, file, name, config, spec, entries, keys, arguments = json.loads(sys.argv[1])
try:
    module = importlib.import_module(module)
except ImportError:  # a test module, which its runner imported in a way of its own
    found = importlib.util.spec_from_file_location(module, file)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
for entry in entries:
    importlib.import_module(entry)
cls = module
for part in name.split("."):
    cls = getattr(cls, part)


def opened():
    from kvloom import KVSpec
    return cls(cls.Config.model_validate_json(config), KVSpec.from_json(spec))

"""
"""The beginning of each program: `opened()` makes another instance like the tested one."""


def run(
    program: str, backend: StorageBackend, keys: list[str], *, entries: list[str] | None = None, hash_seed: str = "0",
    arguments: list[str] | None = None,
) -> str:  # fmt: skip
    """Run a program in a fresh process that can open a backend like this one; return its output.

    entries: modules that it imports first. arguments: further arguments.
    """
    cls, config = type(backend), backend.config
    if "<locals>" in cls.__qualname__ or not isinstance(config, Config):
        pytest.skip(f"{cls.__qualname__} cannot be made in another process: it needs a class and a Config of a module")
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    spec = backend.spec or KVSpec(model="kit", num_layers=3, num_kv_heads=2, head_size=8, dtype="bfloat16")
    settings = config.model_dump_json()
    told = json.dumps(
        [cls.__module__, file, cls.__qualname__, settings, spec.to_json(), entries or [], keys, arguments or []]
    )
    return in_fresh_process(OPEN + program, told, hash_seed=hash_seed)
