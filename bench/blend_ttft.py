"""Time to the first token with blended KV, beside a whole prefill: wall time, one thread, KV in memory and on disk.

    python bench/blend_ttft.py [--rounds 3] [--tokens 4096]

A Llama of 115 million random weights (16 layers, hidden 768, 12 heads over 3 of K and V). The prompt is eight documents
that were computed alone and a question of 64 tokens that was not. Each round takes every way once, so that all see the
same noise; told are medians with their range, the speed-up over the whole prefill of the same round, and how much of
the bound by rows that is: a way that computes a fifth of the rows can be five times as fast.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from table import Rows
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom import BlendExecutor, KVSpec
from kvloom_blend import BlendedModel, Prefilled, blended
from kvloom_blend.executors import EXECUTORS

SEPARATOR = 5
DOCUMENTS, QUESTION = 8, 64


def model_of(tokens: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2112, num_hidden_layers=16, num_attention_heads=12,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=2 * tokens, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def opened(model: Any, executor: dict[str, Any], tier: dict[str, Any]) -> BlendedModel:
    retriever = {"type": "separator", "separator": SEPARATOR, "prefix": False}
    return blended(
        model,
        {"connector": "transformers", "tiers": [tier], "blend": {**executor, "retriever": retriever, "min_tokens": 0}},
    )


def executor_of(settings: dict[str, Any], spec: KVSpec) -> BlendExecutor:
    given = dict(settings)
    cls = next(one for one in EXECUTORS if one.type == given["executor"])
    return cls(cls.Config(**{name: value for name, value in given.items() if name != "executor"}), spec)


def prefilled(one: BlendedModel, prompt: torch.Tensor, executor: BlendExecutor) -> Prefilled:
    one.executor = executor
    return one.prefill(prompt, store=False)


def bound(share: float, layers: int, check_layers: int) -> float:
    """The share of a whole prefill that CacheBlend's rows are: all of them up to the check layer, then `share`."""
    return (check_layers + share * (layers - check_layers)) / layers


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens, model = arguments.tokens, model_of(arguments.tokens)
    length = (tokens - QUESTION) // DOCUMENTS - 1
    chance = torch.Generator().manual_seed(0)
    documents = [torch.randint(10, 8000, (length,), generator=chance) for _ in range(DOCUMENTS)]
    separator = torch.tensor([SEPARATOR])
    question = torch.randint(10, 8000, (tokens - DOCUMENTS * (length + 1),), generator=chance)
    prompt = torch.cat([part for one in documents for part in (one, separator)] + [question])
    memory = {"type": "memory", "capacity": "1GiB"}
    ways: dict[str, tuple[dict[str, Any], float | None]] = {"none": ({"executor": "none"}, 0.0)}
    for ratio in (0.05, 0.15, 0.30):
        ways[f"cacheblend {ratio:.0%}"] = ({"executor": "cacheblend", "recompute_ratio": ratio}, ratio)
    ways["cacheblend 15%, gradual over 3 layers"] = ({"executor": "cacheblend", "check_layers": [1, 2, 3]}, None)
    ways["epic 15%"] = ({"executor": "epic"}, None)
    ways["hybrid 15%"] = ({"executor": "hybrid"}, None)
    ways["question_attention 15%"] = ({"executor": "question_attention"}, None)
    with ExitStack() as stack, torch.inference_mode():
        disk = {"type": "disk", "path": stack.enter_context(tempfile.TemporaryDirectory(dir=".")), "capacity": "2GiB"}
        in_memory, on_disk = (stack.enter_context(opened(model, {"executor": "none"}, tier)) for tier in (memory, disk))
        for one in (in_memory, on_disk):
            for document in tqdm(documents, desc="remembering"):
                one.remember(document)
            one.engine.flush()
        runs: dict[str, Callable[[], Prefilled]] = {}
        for name, (settings, _) in ways.items():
            runs[name] = partial(prefilled, in_memory, prompt, executor_of(settings, in_memory.engine.spec))
        runs["none, from disk"] = partial(prefilled, on_disk, prompt, on_disk.executor)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        whole: list[float] = []
        shares = {name: run().computed_share for name, run in runs.items()}
        for _ in tqdm(range(arguments.rounds), desc="rounds"):
            whole.append(seconds(lambda: model(prompt[None], use_cache=True, logits_to_keep=1)))
            for name, run in runs.items():
                taken[name].append(seconds(run))
        turned = turning(in_memory.runner.rotations, tokens, in_memory.engine.spec.hidden_dim)
    rows = Rows("blend_ttft")
    rows.add("a whole prefill", f"{statistics.median(whole):.2f} s ({min(whole):.2f} to {max(whole):.2f})")
    for name, some in taken.items():
        ratios = [full / mine for full, mine in zip(whole, some, strict=True)]
        middle = statistics.median(ratios)
        # Rows as CacheBlend counts them, and as this runner computes them: the last layer's are fewer.
        share = shares[name]
        ratio = ways[name][1] if name in ways else None
        limit = "" if not ratio else f"{1 / bound(ratio + QUESTION / tokens, 16, 1):.2f}x by CacheBlend's rows"
        rows.add(
            name, f"{statistics.median(some):.2f} s, {middle:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})", limit,
            None if not ratio else middle * bound(ratio + QUESTION / tokens, 16, 1), seconds=some, speedups=ratios,
            computed_share=share,
        )  # fmt: skip
    rows.add("turning K, alone", f"{1e3 * turned:.0f} ms", "of a whole prefill", turned / statistics.median(whole))
    rows.finish()


def turning(rotations: Any, tokens: int, hidden: int) -> float:
    """Seconds to turn K of all layers."""
    k = torch.randn(tokens, hidden)
    old, new = torch.arange(tokens), torch.arange(tokens) + 1000

    def all_layers() -> None:
        turns = rotations.turns(old, new)
        for rotation, turn in zip(rotations, turns, strict=True):
            rotation.apply(k, turn, out=k)

    return statistics.median(seconds(all_layers) for _ in range(5))


if __name__ == "__main__":
    main()
