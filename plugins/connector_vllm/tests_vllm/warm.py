"""A process that has imported vLLM, and forks for each script: `python warm.py MODULE`, orders on its standard input.

Importing vLLM takes longer than most scripts do. Forked processes have the same seed of `hash()`; where two processes
must agree without that, a test asks for a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
IMPORTED = [
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor", "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama", "vllm.model_executor.models.gemma3", "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.layers.quantization.online.base", "vllm.lora.model_manager", "vllm.v1.sample.sampler",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", "compressed_tensors.compressors",
    "transformers.models.llama.modeling_llama", "transformers.models.llama.tokenization_llama", "kvloom.engine.engine",
    "kvloom_connector_vllm.adapter.connector", "kvloom_connector_vllm.adapter.offloading",
    "kvloom_backend_disk.backend", "kvloom_serde_cachegen.serializer", "kvloom_connector_transformers.connector",
    "kvloom_connector_vllm.paged.connector", "vllm.v1.core.sched.scheduler",
    "vllm.plugins.lora_resolvers.filesystem_resolver", "vllm.entrypoints.launchers.cli_args",
]  # fmt: skip
PLAIN = {
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""Settings of every vLLM process here. Without torch.compile, which would compile the sampler in each process anew."""


def environment(search: Sequence[Path] = (), **more: str) -> dict[str, str]:
    path = [*map(str, search), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **PLAIN, "PYTHONPATH": os.pathsep.join(path), **more}


class Warm:
    """The process, from outside. `module.main(arguments)` is called in each process that it forks."""

    def __init__(self, module: str, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def start(self, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> int:
        """The process's number. log: where what it prints goes."""
        return int(self._ask({"arguments": list(map(str, arguments)), "env": dict(env), "log": str(log)}))

    def wait(self, process: int, timeout: float) -> int:
        """The exit status; TimeoutExpired if it did not end, with it and its children killed."""
        handle = os.pidfd_open(process)
        try:
            if not select.select([handle], [], [], timeout)[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                self._ask({"wait": process})
                raise subprocess.TimeoutExpired(f"process {process}", timeout)
            return int(self._ask({"wait": process}))
        finally:
            os.close(handle)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve(answers: TextIO) -> list[str] | None:
    """Answer orders. In a process that was forked: its arguments; None when there are no more orders."""
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                answers.close()
                _become(order)
                return list(order["arguments"])
        print(json.dumps(answer), file=answers, flush=True)
    return None


def _become(order: Mapping[str, Any]) -> None:
    os.setsid()
    log, nothing = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(order["env"])
    gc.unfreeze = lambda: None  # vLLM calls it when it ends, and collects everything
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for one in (
        utils,
        multiproc_executor,
    ):  # on processors vLLM spawns: threads of OpenMP cannot be forked; here is one
        one.get_mp_context = lambda: multiprocessing.get_context("fork")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    module = importlib.import_module(sys.argv[1])
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # which another version has elsewhere: it only takes longer
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each process would copy all of it at its first collection
    arguments = _serve(answers)
    if arguments is not None:
        code = 0
        try:
            module.main(arguments)
        except BaseException:
            traceback.print_exc()
            code = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)  # without taking thousands of modules apart


if __name__ == "__main__":
    main()
