"""Drives one engine of vLLM, whose scheduler and worker are in this process, as the kit says."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

from kvloom_testkit.engines.damage import damage
from kvloom_testkit.engines.rename_barrier import RenamesTogether
from kvloom_testkit.engines.slow_writes import WritesSlowly
from kvloom_testkit.engines.vllm.memory import groups_of
from kvloom_testkit.engines.vllm.waits import waits
from kvloom_testkit.engines.vllm.watch import Watch


class Driver(RenamesTogether, WritesSlowly):
    """The calls. Blocks and tokens are counted as vLLM counts them; prompts are lists of token ids."""

    def __init__(self) -> None:
        self._names = 0

    def start(self, llm: dict[str, Any], kv: dict[str, Any] | None, settle: float, patience: float) -> dict[str, Any]:
        """Start the engine. kv: arguments of KVTransferConfig. settle: seconds that stores may take unseen.

        patience: seconds after which what holds blocks or requests is taken to hold them for ever.
        """
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if llm.get("tensor_parallel_size", 1) > 1:
            _fork_ranks()
        more = {"kv_transfer_config": KVTransferConfig(**kv)} if kv else {}
        self._llm = LLM(**llm, **more)
        self._engine: Any = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._settle, self._patience = settle, patience
        worker = getattr(core.model_executor, "driver_worker", None)  # None with ranks, in processes of their own
        runner = worker and worker.worker.model_runner
        self._model = runner and runner.model
        config, caches = (runner.kv_cache_config, runner.kv_caches) if runner else (self._scheduler.kv_cache_config, ())
        self._watch = Watch(self._scheduler, groups_of(config, caches))
        if runner:
            runner._zero_block_ids = self._watch.keep_poison(runner._zero_block_ids)
        if runner and has_kv_transfer_group():
            connector = get_kv_transfer_group()
            connector.bind_connector_metadata = self._watch.overwrite_after(connector.bind_connector_metadata)
        self._waits = waits(self._scheduler.connector)
        return {"block": self._scheduler.block_size, "blocks": self._pool.num_gpu_blocks, **self.state()}

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def generate(self, requests: list[dict[str, Any]], together: bool = False) -> list[dict[str, Any]]:
        """Answer requests greedily, one after the other or as one batch.

        Each has `prompt`, and may have `max_tokens`, `salt`, `lora` (a directory). Of each the tokens, their
        logprobs, the reason of its end, the number of its tokens that were found, and those that the connector claimed.
        """
        batches = [requests] if together else [[one] for one in requests]
        answers = []
        for batch in batches:
            names = [self._add(**one) for one in batch]
            done = self._run(names)
            for name in names:
                output = done[name]
                (one,) = output.outputs
                pairs = zip(one.token_ids, one.logprobs or [], strict=False)  # none where it ended with an error
                answers.append({
                    "tokens": list(one.token_ids),
                    "logprobs": [steps[token].logprob for token, steps in pairs],
                    "reason": one.finish_reason,
                    "cached": output.num_cached_tokens or 0,
                    "claimed": self._watch.claimed.pop(name, 0),
                })  # fmt: skip
        return answers

    def write_one(self, **request: Any) -> list[dict[str, Any]]:
        """Answer a request, and wait until it is stored."""
        answers = self.generate([request])
        self.settle()
        return answers

    def read_one(self, connector: bool, **request: Any) -> list[dict[str, Any]]:
        """Answer a request, and empty the engine's own cache. connector: as `forget` has it."""
        answers = self.generate([request])
        self.forget(connector)
        return answers

    def time(self, requests: list[dict[str, Any]]) -> float:
        """Answer requests as one batch; the seconds that it took."""
        begin = time.perf_counter()
        self._run([self._add(**one) for one in requests])
        return time.perf_counter() - begin

    def abort(self, requests: list[dict[str, Any]], steps: int) -> int:
        """Add requests, step some times, abort those that are left and let the engine end them; their number."""
        names = [self._add(**one) for one in requests]
        left = set(names)
        for _ in range(steps):
            left -= {one.request_id for one in self._engine.step() if one.finished}
        self._engine.abort_request(sorted(left))
        until = time.monotonic() + self._patience
        while self._scheduler.has_requests() and time.monotonic() < until:
            self._engine.step()
        return len(left)

    def settle(self) -> None:
        """Step until the connector has nothing more to do, as far as it says, and give it some time besides."""
        least, until = time.monotonic() + self._settle, time.monotonic() + self._patience
        while time.monotonic() < least or (self._scheduler.has_requests() and time.monotonic() < until):
            self._engine.step()
            time.sleep(0.01)

    def forget(self, connector: bool = False) -> bool:
        """Empty the engine's own prefix cache; false where blocks are still held after long. connector: its, too."""
        until = time.monotonic() + self._patience
        reset = self._llm.reset_prefix_cache
        while not (done := bool(reset(reset_connector=connector))) and time.monotonic() < until:
            self._engine.step()
            time.sleep(0.01)
        return done

    def reset(self) -> bool:
        """Empty both caches; return whether the connector said that it was done. vLLM takes None for that, too."""
        connector = self._scheduler.connector
        said: list[bool | None] = []
        reset = connector.reset_cache

        def heard() -> bool | None:
            said.append(reset())
            return said[-1]

        connector.reset_cache = heard
        try:
            return bool(self._llm.reset_prefix_cache(reset_connector=True)) and said == [True]
        finally:
            connector.reset_cache = reset

    def supports_reset(self) -> bool:
        """Return whether the connector has a `reset_cache` of its own."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import base

        return type(self._scheduler.connector).reset_cache is not base.KVConnectorBase_V1.reset_cache

    def break_loads(self, how: str, folder: str, asked: bool) -> None:
        """Damage all files of a directory when the next request has been promised KV: `remove`, `cut` or `flip`.

        asked: when the connector was asked for the first time, which may not answer before it has loaded.
        """
        if asked:
            self._watch.when_asked = lambda: damage(Path(folder), how)
        else:
            self._watch.when_promised = lambda: damage(Path(folder), how)

    def fail(self, **request: Any) -> bool:
        """Answer a request whose last layer fails, as one without memory does; return whether that ended the step."""
        import torch

        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("out of memory, says the kit")

        layers = max((one for one in self._model.modules() if isinstance(one, torch.nn.ModuleList)), key=len)
        hook = layers[-1].register_forward_pre_hook(fails)
        try:
            self.generate([request])
        except torch.OutOfMemoryError:
            return True
        finally:
            hook.remove()
        return False

    def overwrite_given(self) -> None:
        """From now on, overwrite blocks that a step gives to a request at its start. Not for models with states."""
        self._watch.overwrites = True

    def watch(self, on: bool) -> None:
        """Look, or don't, at every block in every step; it takes time."""
        self._watch.look(on)

    def seen(self) -> dict[str, Any]:
        """The faults that were seen in every step since the last call, by kind; and the number of loads and steps."""
        return self._watch.take()

    def waits(self) -> dict[str, float]:
        """The longest seconds in each of the engine's calls to its connector since the last time."""
        found = dict(self._waits)
        self._waits.clear()
        return found

    def state(self) -> dict[str, int]:
        """Free blocks, requests that the scheduler knows, threads, descriptors, and preemptions so far."""
        preemptions = sum(one.value for one in self._llm.get_metrics() if one.name == "vllm:num_preemptions")  # type: ignore[attr-defined]
        return {
            "free": self._pool.get_num_free_blocks(),
            "requests": len(self._scheduler.requests),
            "threads": max(threading.active_count(), len(os.listdir("/proc/self/task"))),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "preemptions": int(preemptions),
        }

    def close(self) -> None:
        """End the engine in order."""
        self._engine.engine_core.shutdown()

    def _add(self, prompt: list[int], max_tokens: int = 8, salt: str = "", lora: str = "") -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._names += 1
        name = f"kit{self._names}"
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False)
        inputs: dict[str, Any] = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        # One id for each directory: vLLM keeps adapters by id.
        adapter = LoRARequest(Path(lora).name, _number_of(lora), lora) if lora else None
        self._engine.add_request(name, inputs, params, lora_request=adapter)
        return name

    def _run(self, names: list[str]) -> dict[str, Any]:
        done: dict[str, Any] = {}
        while len(done) < len(names):
            done |= {one.request_id: one for one in self._engine.step() if one.finished and one.request_id in names}
        return done


_numbers: dict[str, int] = {}


def _number_of(lora: str) -> int:
    return _numbers.setdefault(lora, len(_numbers) + 1)


def _fork_ranks() -> None:
    """Have processes of ranks forked from this one, instead of each importing vLLM anew."""
    from vllm.v1.executor import multiproc_executor

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or it wants a core for each rank, and one besides
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
