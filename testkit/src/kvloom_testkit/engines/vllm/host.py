"""A process that has imported vLLM and forks one for each engine: `python -m kvloom_testkit.engines.vllm.host SOCKET`.

Importing vLLM takes longer than most engines live. It takes orders, JSON lines, from the socket; a forked process makes
a connection of its own, on which `driver` answers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from kvloom_testkit.engines.vllm import driver, models

_IMPORTED = [
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader.default_loader", "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn", "vllm.lora.model_manager", "vllm.v1.sample.sampler",
    "vllm.v1.core.sched.scheduler", "transformers.models.llama.modeling_llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
]  # fmt: skip
"""Modules that an engine needs; those that a version of vLLM lacks are left out."""
_PR_SET_PDEATHSIG = 1


def main(path: str) -> None:
    """Answer orders until the kit closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        orders = connection.makefile("rw", encoding="utf-8")
        try:
            hello = _import()
        except BaseException as error:
            _tell(orders, {"error": f"{type(error).__name__}: {error}"})
            raise
        _tell(orders, {"ok": hello})
        for line in orders:
            _tell(orders, {"ok": _obey(json.loads(line), path, connection)})


def _import() -> dict[str, Any]:
    import vllm

    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each process would copy all of it at its first collection
    return {"version": vllm.__version__}


def _obey(order: dict[str, Any], path: str, connection: socket.socket) -> Any:
    if "model" in order:
        return models.make(Path(order["model"]), seed=order["seed"], kind=order["kind"])
    if "adapter" in order:
        return models.make_adapter(Path(order["adapter"]), seed=order["seed"])
    if "wait" in order:
        return os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
    child = os.fork()
    if not child:
        connection.detach()
        _become(order, path)
    return child


def _become(order: dict[str, Any], path: str) -> None:
    """Be the process of an engine, and never return."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever the connector does then
        log, nothing = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        faulthandler.register(signal.SIGUSR1, file=open(order["stack"], "w"), all_threads=True)  # noqa: SIM115
        faulthandler.enable(file=2)
        gc.unfreeze = lambda: None  # type: ignore[assignment]  # vLLM calls it when it ends, and collects everything
        driver.serve(path, order["id"])
        code = 0
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without taking thousands of modules apart


def _tell(orders: Any, answer: dict[str, Any]) -> None:
    orders.write(json.dumps(answer) + "\n")
    orders.flush()


if __name__ == "__main__":
    main(sys.argv[1])
