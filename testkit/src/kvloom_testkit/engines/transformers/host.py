"""The process that has imported transformers: `python -m kvloom_testkit.engines.transformers.host SOCKET`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from kvloom_testkit.engines import hosting
from kvloom_testkit.engines.transformers import models
from kvloom_testkit.engines.transformers.driver import Driver

_IMPORTED = ["transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"]


def _load() -> dict[str, Any]:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return {"version": transformers.__version__}


if __name__ == "__main__":
    hosting.run(sys.argv[1], _load, Driver, {"model": models.make})
