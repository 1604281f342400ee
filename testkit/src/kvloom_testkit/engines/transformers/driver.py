"""Drives one model of transformers, with a cache around it or plain, as the kit says."""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from typing import Any

import torch

from kvloom_testkit.engines.rename_barrier import RenamesTogether
from kvloom_testkit.engines.slow_writes import WritesSlowly

_PAD = 2


class Driver(RenamesTogether, WritesSlowly):
    """The calls. Prompts are lists of token ids; all rows of a call are one batch."""

    def start(self, model: str, dtype: str, name: str, module: str | None, extra: dict[str, Any], wraps: bool) -> None:
        """Load the model. module: None for the plain model. wraps: `name` takes the model, or else it is a cache."""
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None
        self._looks = self._look()
        self._computed = 0
        self._context: Any = None
        self._generate = self._model.generate
        if module is not None:
            made = getattr(importlib.import_module(module), name)
            if wraps:
                self._context = made(self._model, **extra)
                self._generate = self._context.__enter__().generate
            else:
                self._generate = self._with_cache(made, extra)
        self._counting = self._model.register_forward_pre_hook(self._count, with_kwargs=True)

    def generate(self, rows: list[list[int]], max_tokens: int = 8, **options: Any) -> dict[str, Any]:
        """The answers to a batch, greedy unless `options` say otherwise; shorter rows are padded on the left.

        Of each row the tokens and their logprobs; and the number of tokens of each prompt that were not computed.
        """
        length = max(map(len, rows))
        ids = torch.tensor([[_PAD] * (length - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        return self._answer(ids, mask, max_tokens, **options)

    def write_one(self, rows: list[list[int]]) -> list[dict[str, Any]]:
        """Answer a batch, which stores it."""
        return [self.generate(rows)]

    read_one = write_one

    def own(self, rows: list[list[int]], split: int, max_tokens: int = 8, **options: Any) -> dict[str, Any]:
        """The plain model's answers, the first `split` tokens of all rows being in a cache of transformers' own."""
        from transformers import DynamicCache

        if split:
            ids = torch.tensor(rows)
            cache = DynamicCache(config=self._model.config)
            with torch.no_grad():
                self._model(input_ids=ids[:, :split], past_key_values=cache, use_cache=True)
            return self._answer(ids, torch.ones_like(ids), max_tokens, past_key_values=cache, **options)
        return self.generate(rows, max_tokens, **options)

    def _answer(self, ids: torch.Tensor, mask: torch.Tensor, max_tokens: int, **options: Any) -> dict[str, Any]:
        before = ids.clone()
        self._computed = 0
        usual = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": _PAD}
        asked = {**usual, "max_new_tokens": max_tokens, **options}
        with torch.no_grad():
            output = self._generate(input_ids=ids, attention_mask=mask, **asked)
        new = output.sequences[:, ids.shape[1] :]
        steps = torch.stack(output.logits).float().log_softmax(-1).transpose(0, 1)
        plain = len(steps) == len(new)  # not with beams, whose logits are in another order
        return {
            "tokens": new.tolist(),
            "logprobs": steps.gather(-1, new[..., None]).squeeze(-1).tolist() if plain else [],
            "cached": ids.shape[1] + new.shape[1] - 1 - self._computed,
            "untouched": bool(torch.equal(ids, before)),
        }

    def time(self, prompts: list[list[int]]) -> float:
        """Answer prompts one by one; the seconds that it took."""
        begin = time.perf_counter()
        for prompt in prompts:
            self.generate([prompt])
        return time.perf_counter() - begin

    def state(self) -> dict[str, int]:
        """Threads and descriptors of the process."""
        return {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}

    def leave(self) -> bool:
        """Leave the cache; return whether the model is as it was before."""
        self._leave()
        self._counting.remove()
        return self._look() == self._looks

    def close(self) -> None:
        """Leave the cache."""
        self._leave()

    def _leave(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def _with_cache(self, made: Any, extra: dict[str, Any]) -> Any:
        def generate(**asked: Any) -> Any:
            return self._model.generate(past_key_values=made(config=self._model.config, **extra), **asked)

        return generate

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if ids is None:
            ids = args[0] if args else kwargs["inputs_embeds"]
        self._computed += int(ids.shape[1])

    def _look(self) -> list[Any]:
        """The parts of the model that somebody might change."""
        modules = list(self._model.modules())
        hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)
        own = sum("forward" in vars(one) for one in modules) + ("generate" in vars(self._model))
        digest = hashlib.sha256()
        for tensor in self._model.state_dict().values():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return [hooks, own, digest.hexdigest(), self._model.training, repr(self._model.config)]
