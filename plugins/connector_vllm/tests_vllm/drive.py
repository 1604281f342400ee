"""One process of vLLM that does what a script says, and writes down what came out: `python drive.py SCRIPT OUT`.

The script, in JSON: `llm`, arguments of vllm.LLM; `kv`, those of KVTransferConfig or null; `do`, a list of actions,
each a mapping from one of the names of `_Driver`'s methods to its arguments. Or `footprint`: a model and a
configuration, whose groups are written down.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any


class _Driver:
    def __init__(self, script: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if script["llm"].get("pipeline_parallel_size", 1) > 1:
            _make_room_between_stages()
        kv = script.get("kv")
        more = {"kv_transfer_config": KVTransferConfig(**kv)} if kv else {}
        self.llm = LLM(**script["llm"], **more)

    @property
    def _engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def patient(self) -> Any:
        """Steps with nothing to compute wait as long as they have to; `steps` counts all of them from here on."""
        from kvloom_connector_vllm.offload import tiers

        tiers.IDLE_SECONDS = 30.0
        schedule, self._steps = self._scheduler.schedule, 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            return schedule(*args, **kwargs)

        self._scheduler.schedule = counted

    def steps(self) -> Any:
        return self._steps

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, salt: str = "", lora: str = "", together: bool = False
    ) -> Any:
        """Greedy tokens with their logprobs, and how many tokens of each prompt were found. together: as one batch."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        inputs = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        adapter = {"lora_request": LoRARequest(Path(lora).name, 1, lora)} if lora else {}
        outputs = []
        for batch in [inputs] if together else [[one] for one in inputs]:
            outputs += self.llm.generate(batch, sampling, use_tqdm=False, **adapter)
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "logprobs": [next(iter(step.values())).logprob for step in one.outputs[0].logprobs],
                "cached": one.num_cached_tokens,
                "reason": one.outputs[0].finish_reason,
            }
            for one in outputs
        ]

    def generate_again(self, **arguments: Any) -> Any:
        """As `generate`, for a caller who is handling an error."""
        try:
            raise ValueError("of the caller")
        except ValueError:
            return self.generate(**arguments)

    def fail(self, prompt: list[int], layer: int) -> Any:
        """The error of a step in which computing a layer fails, as one without memory does."""
        import torch

        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        self.llm.apply_model(lambda model: model.model.layers[layer].register_forward_pre_hook(fails))
        try:
            self.generate([prompt])
        except Exception as error:
            return type(error).__name__
        return None

    def changed_adapter(self, prompt: list[int], lora: str, other: str, file: str) -> Any:
        """Tokens with an adapter whose file becomes that of another while the request waits, after vLLM has evicted
        it."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        adapter = LoRARequest(Path(lora).name, 1, lora)
        for one in (adapter, LoRARequest("other", 2, other)):
            self.llm.generate({"prompt_token_ids": prompt[::-1]}, sampling, use_tqdm=False, lora_request=one)
        self._engine.add_request("waiting", {"prompt_token_ids": prompt}, sampling, lora_request=adapter)
        shutil.copyfile(Path(other) / file, Path(lora) / file)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        return list(outputs[0].outputs[0].token_ids)

    def embedded(self, seeds: list[int], length: int, size: int, max_tokens: int = 8) -> Any:
        """Greedy tokens behind random embeddings in place of a prompt, one for each seed, and how much was found."""
        import torch
        from vllm import SamplingParams

        found = []
        for seed in seeds:
            prompt = torch.randn(length, size, generator=torch.Generator().manual_seed(seed))
            sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            (one,) = self.llm.generate({"prompt_embeds": prompt}, sampling, use_tqdm=False)
            found.append({"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens})
        return found

    def chat(self, prompt: list[int], turns: list[list[int]], max_tokens: int = 40) -> Any:
        """Each turn is appended to everything before it, answers included."""
        found, history = [], list(prompt)
        for turn in turns:
            history += turn
            (one,) = self.generate([history], max_tokens)
            found.append({**one, "length": len(history)})
            history += one["tokens"]
        return found

    def settle(self) -> Any:
        """Steps until nothing is pending, so that what was computed is stored and known to be."""
        until = time.monotonic() + 60
        while self._engine.engine_core.engine_core.scheduler.connector.has_pending_push_work():
            assert time.monotonic() < until, "never settles"
            self._engine.step()
        return None

    def abort_while_loading(self, prompt: list[int]) -> Any:
        """Abort a request; return whether it was waiting for its KV."""
        from vllm import SamplingParams

        self._engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4))
        waiting, until = False, time.monotonic() + 60
        while not waiting and time.monotonic() < until:
            self._engine.step()
            waiting = any("REMOTE" in str(one.status) for one in self._scheduler.requests.values())
        self._engine.abort_request(list(self._scheduler.requests))
        until = time.monotonic() + 60
        while self._scheduler.requests and time.monotonic() < until:
            self._engine.step()
        return {"waiting": waiting, "left": len(self._scheduler.requests)}

    def streams(self, prompts: list[list[int]], max_tokens: int, aborted: dict[str, int]) -> Any:
        """Greedy tokens of all prompts at once; None of those that are aborted, by number, after so many tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        found: dict[str, Any] = dict.fromkeys(map(str, range(len(prompts))))
        left = dict(aborted)
        while self._engine.has_unfinished_requests():
            for one in self._engine.step():
                tokens = list(one.outputs[0].token_ids)
                if len(tokens) >= left.get(one.request_id, max_tokens + 1):
                    del left[one.request_id]
                    self._engine.abort_request([one.request_id])
                elif one.finished:
                    found[one.request_id] = tokens
        return list(found.values())

    def usage(self) -> Any:
        """The part of the engine's KV memory that is in use."""
        return self._scheduler.kv_cache_manager.usage

    def forget(self) -> Any:
        """Empty the engine's own prefix cache."""
        return self.llm.reset_prefix_cache()

    def reset(self) -> Any:
        """Empty it, and the connector's."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def metrics(self) -> Any:
        """vLLM's own, by name; those of one name are added up."""
        found: dict[str, float] = {}
        for one in self.llm.get_metrics():
            if hasattr(one, "value"):
                found[one.name] = found.get(one.name, 0) + one.value
        return found

    def close(self) -> Any:
        self._engine.engine_core.shutdown()


def _make_room_between_stages() -> None:
    """Without torch.compile, vLLM's runner for processors forgets to allocate what a stage receives."""
    from vllm.distributed import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = load_model


def main(arguments: list[str]) -> None:
    script = json.loads(Path(arguments[0]).read_text())
    if "footprint" in script:
        from kvloom_connector_vllm.adapter import footprint

        model, config, dtype = script["footprint"]
        footprint.main([model, config, arguments[1], dtype])
        return
    driver = _Driver(script)
    said = [getattr(driver, name)(**arguments) for action in script["do"] for name, arguments in action.items()]
    driver.close()
    Path(arguments[1]).write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
