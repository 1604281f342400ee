"""The process that has imported vLLM: `python -m kvloom_testkit.engines.vllm.host SOCKET`."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvloom_testkit.engines import hosting
from kvloom_testkit.engines.transformers import models
from kvloom_testkit.engines.vllm.driver import Driver

_IMPORTED = [
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor", "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama", "vllm.v1.attention.backends.cpu_attn", "vllm.lora.model_manager",
    "vllm.v1.sample.sampler", "vllm.v1.core.sched.scheduler", "transformers.models.llama.modeling_llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
]  # fmt: skip
"""Modules that an engine needs; those that a version of vLLM lacks are left out."""


def _load() -> dict[str, Any]:
    import vllm

    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return {"version": vllm.__version__}


def _sweep() -> None:
    """Remove the shared memory of ranks, which is named after files of this process's own temporary directory."""
    for file in Path(tempfile.gettempdir()).glob("vllm_dist_*"):
        for memory in Path("/dev/shm").glob(f"{file.name}*"):
            memory.unlink(missing_ok=True)


if __name__ == "__main__":
    hosting.run(sys.argv[1], _load, Driver, {"model": models.make, "adapter": models.make_adapter}, _sweep)
