"""Drives one engine of vLLM, whose scheduler and worker are in this process, as the kit says: JSON lines on a socket.

Each line is `{"call": NAME, "args": {...}}`, with the name of a method of `Driver`. The answer is `{"ok": ...}` or
`{"error": "TYPE: TEXT", "where": TRACEBACK}`.
"""

from __future__ import annotations

import json
import operator
import os
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from kvloom_testkit.engines.damage import damage
from kvloom_testkit.engines.vllm.watch import Watch

_MOST_CHARACTERS = 4000
"""Of an error, and of its traceback."""


def serve(path: str, identity: str) -> None:
    """Answer calls until the kit closes the connection; the first one is `start`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw", encoding="utf-8")
        _write(lines, json.dumps({"hello": identity, "process": os.getpid()}))
        driver = Driver()
        for line in lines:
            order = json.loads(line)
            try:
                # Numbers may be a connector's own, of numpy or torch.
                answer = json.dumps({"ok": getattr(driver, order["call"])(**order["args"])}, default=operator.index)
            except Exception as error:
                where = traceback.format_exc()
                print(where, flush=True)
                said = f"{type(error).__name__}: {error}"
                answer = json.dumps({"error": said[:_MOST_CHARACTERS], "where": where[-_MOST_CHARACTERS:]})
            _write(lines, answer)


def _write(lines: Any, message: str) -> None:
    lines.write(message + "\n")
    lines.flush()


class Driver:
    """The calls. Blocks and tokens are counted as vLLM counts them; prompts are lists of token ids."""

    def __init__(self) -> None:
        self._names = 0

    def start(self, llm: dict[str, Any], kv: dict[str, Any] | None, settle: float, patience: float) -> dict[str, Any]:
        """Start the engine. kv: arguments of KVTransferConfig. settle: seconds that stores may take unseen.

        patience: seconds after which what holds blocks or requests is taken to hold them for ever.
        """
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more = {"kv_transfer_config": KVTransferConfig(**kv)} if kv else {}
        self._llm = LLM(**llm, **more)
        self._engine: Any = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._settle, self._patience = settle, patience
        runner = core.model_executor.driver_worker.worker.model_runner
        self._watch = Watch(self._scheduler, runner.kv_caches)
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

    def forget(self) -> bool:
        """Empty the engine's own prefix cache, not the connector's; false where blocks are still held after long."""
        until = time.monotonic() + self._patience
        while not (done := bool(self._llm.reset_prefix_cache())) and time.monotonic() < until:
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

    def break_loads(self, how: str, folder: str) -> None:
        """Damage all files of a directory when the next request has been promised KV: `remove`, `cut` or `flip`."""
        self._watch.when_promised = lambda: damage(Path(folder), how)

    def watch(self, on: bool) -> None:
        """Look, or don't, at every block in every step; it takes time."""
        self._watch.look(on)

    def seen(self) -> dict[str, Any]:
        """The faults that were seen in every step since the last call, by kind; and the number of loads and steps."""
        return self._watch.take()

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
