"""One process of vLLM that does what a script says, and writes down what came out: `python drive_blend.py SCRIPT OUT`.

The script, in JSON: `llm`, arguments of vllm.LLM; `kv`, those of KVTransferConfig or null; `do`, a list of actions,
each a mapping from one of the names of `_Driver`'s methods to its arguments.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class _Driver:
    def __init__(self, script: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        kv = script.get("kv")
        more = {"kv_transfer_config": KVTransferConfig(**kv)} if kv else {}
        self.llm = LLM(**script["llm"], **more)

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def _twin(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker.twin

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, params: dict[str, Any] | None = None,
        prompt_logprobs: int | None = None, salt: str = "", lora: str = "", together: bool = False,
    ) -> Any:  # fmt: skip
        """Greedy tokens, and how many tokens of each prompt vLLM did not compute. together: as one batch."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": params} if params else None,
        )  # fmt: skip
        inputs = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        adapter = {"lora_request": LoRARequest(Path(lora).name, 1, lora)} if lora else {}
        outputs = []
        for batch in [inputs] if together else [[one] for one in inputs]:
            outputs += self.llm.generate(batch, sampling, use_tqdm=False, **adapter)
        return [
            {"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens,
             "reason": one.outputs[0].finish_reason}
            for one in outputs
        ]  # fmt: skip

    def remember(self, passages: list[list[int]], salt: str | None = None) -> Any:
        return [self.llm.collective_rpc("kvloom_remember", args=(one, salt))[0] for one in passages]

    def watch(self) -> Any:
        """From now on, note what the twin blends."""
        blend, self._seen = self._twin.blend, []

        def noted(prompt: Any) -> Any:
            done = blend(prompt)
            self._seen.append([done.exact_tokens, done.blended_tokens, done.computed_share])
            return done

        self._twin.blend = noted

    def seen(self) -> Any:
        """Blends since the last call: exact and blended tokens, and the share of rows computed."""
        seen, self._seen[:] = list(self._seen), []
        return seen

    def break_twin(self, how: str) -> Any:
        """raises: each prefill fails. lost: what is found is gone by the time it is blended. late: answers are."""
        twin = self._twin
        if how == "raises":

            def broken(prompt: Any) -> Any:
                raise RuntimeError("planted")

            twin.blend = broken
        elif how == "lost":
            answers, stored = iter([True]), twin.stored
            twin.stored = lambda prompt: stored(prompt) if next(answers, False) else 0
        else:
            from kvloom_blend.vllm import scheduler

            scheduler.ANSWER_SECONDS = 0.1
            twin.stored = lambda prompt: time.sleep(1) or len(prompt.tokens)

    def abort_while_blending(self, prompt: list[int], salt: str) -> Any:
        """Abort a request; return whether it was waiting for its KV, and its remains."""
        from vllm import SamplingParams

        blend = self._twin.blend
        self._twin.blend = lambda prompt: time.sleep(0.5) or blend(prompt)
        engine = self.llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": prompt, "cache_salt": salt}, SamplingParams(max_tokens=4))
        waiting, until = False, time.monotonic() + 60
        while not waiting and time.monotonic() < until:
            engine.step()
            waiting = any("REMOTE" in str(one.status) for one in self._scheduler.requests.values())
        engine.abort_request(list(self._scheduler.requests))
        until = time.monotonic() + 60
        while self._scheduler.requests and time.monotonic() < until:
            engine.step()
        self._twin.blend = blend
        left = len(self._scheduler.requests)
        return {"waiting": waiting, "left": left, "usage": self._scheduler.kv_cache_manager.usage}

    def reset(self) -> Any:
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def metrics(self) -> Any:
        """vLLM's own, by name; those of one name are added up."""
        found: dict[str, float] = {}
        for one in self.llm.get_metrics():
            if hasattr(one, "value"):
                found[one.name] = found.get(one.name, 0) + one.value
        return found

    def usage(self) -> Any:
        return self._scheduler.kv_cache_manager.usage

    def close(self) -> Any:
        self.llm.llm_engine.engine_core.shutdown()


def main(arguments: list[str]) -> None:
    script = json.loads(Path(arguments[0]).read_text())
    driver = _Driver(script)
    said = [getattr(driver, name)(**arguments) for action in script["do"] for name, arguments in action.items()]
    driver.close()
    Path(arguments[1]).write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
