"""The process that has SGLang's interface of storages: `python -m kvloom_testkit.engines.sglang.host SOCKET`.

It imports two modules of SGLang and none of what needs a GPU; `pip install --no-deps sglang` is enough.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

from kvloom_testkit.engines import hosting
from kvloom_testkit.engines.sglang.driver import Driver


def _load() -> dict[str, Any]:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed: pip install --no-deps sglang")
    package = types.ModuleType("sglang")  # its own __init__ imports all of it
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["sglang"] = package
    importlib.import_module("sglang.srt.mem_cache.storage")
    importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    return {"version": importlib.metadata.version("sglang")}


if __name__ == "__main__":
    hosting.run(sys.argv[1], _load, Driver)
