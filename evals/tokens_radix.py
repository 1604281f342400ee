"""Tokens hit with `tokens: radix` and with `chunked`, on synthetic traffic that shares prefixes the way servers see it.

    python evals/tokens_radix.py [--out FOLDER]

Every request does what a server does with an engine on the dict backend: retrieve, then store its prompt. Tokens are
random numbers; lengths, turns and what is shared are drawn with a fixed seed, so that two runs count the same. Prints
the tables of tokens_radix.md, and draws tokens_radix.png.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvloom import Engine, KVSpec, Registry, TokenDatabase, chain

SPEC = KVSpec(model="eval", num_layers=1, num_kv_heads=1, head_size=16, dtype="float32")
BYTES_PER_TOKEN = 128
SETUPS: dict[str, dict[str, Any]] = {
    "radix": {"tokens": "radix", "chunk_tokens": 256},
    "chunked 256": {"tokens": "chunked", "chunk_tokens": 256},
    "chunked 256, no tails": {"tokens": "chunked", "chunk_tokens": 256, "save_tails": False},
    "chunked 64": {"tokens": "chunked", "chunk_tokens": 64},
    "chunked 16": {"tokens": "chunked", "chunk_tokens": 16},
}
Prompts = list[torch.Tensor]


class Traffic:
    """Makes prompts; `draw` gives tokens that nothing else has."""

    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng(seed)

    def between(self, least: int, most: int) -> int:
        return int(self.chance.integers(least, most + 1))

    def draw(self, least: int, most: int) -> list[int]:
        return [int(each) for each in self.chance.integers(0, 120_000, self.between(least, most))]

    def one_of(self, some: Sequence[list[int]]) -> list[int]:
        """The first is asked for most (Zipf)."""
        weights = 1 / np.arange(1, len(some) + 1)
        return some[int(self.chance.choice(len(some), p=weights / weights.sum()))]


def chats(traffic: Traffic) -> list[list[int]]:
    """8 assistants with system prompts of 300 to 1,800 tokens; 100 conversations of 5 turns on average, interleaved."""
    systems = [traffic.draw(300, 1800) for _ in range(8)]
    running: list[tuple[list[int], int]] = []
    found, left = [], 100
    while running or left:
        if left and (len(running) < 12):
            running.append((list(traffic.one_of(systems)), 1 + int(traffic.chance.geometric(0.25))))
            left -= 1
        talk, turns = running.pop(traffic.between(0, len(running) - 1))
        talk = talk + traffic.draw(15, 200)
        found.append(talk)
        if turns > 1:
            running.append((talk + traffic.draw(40, 400), turns - 1))
    return found


def few_shot(traffic: Traffic) -> list[list[int]]:
    """6 tasks with 700 to 2,500 tokens of instructions and examples, 360 questions of 30 to 150 tokens, mixed."""
    tasks = [traffic.draw(700, 2500) for _ in range(6)]
    return [traffic.one_of(tasks) + traffic.draw(30, 150) for _ in range(360)]


def thoughts(traffic: Traffic) -> list[list[int]]:
    """20 problems behind a header of 900 tokens; each thought (60 to 180 tokens) is continued in 3 ways, 3 times."""
    header, found = traffic.draw(900, 900), []
    for _ in range(20):
        level = [header + traffic.draw(150, 400)]
        for _ in range(3):
            found.extend(level)
            level = [thought + traffic.draw(60, 180) for thought in level for _ in range(3)]
        found.extend(level[:9])
    return found


def rag(traffic: Traffic) -> list[list[int]]:
    """A preamble of 420 tokens, 3 of 40 documents (300 to 900 tokens, the popular ones first), then a question."""
    preamble, documents = traffic.draw(420, 420), [traffic.draw(300, 900) for _ in range(40)]
    found = []
    for _ in range(300):
        chosen: list[list[int]] = []
        while len(chosen) < 3:
            one = traffic.one_of(documents)
            if one not in chosen:
                chosen.append(one)
        chosen.sort(key=documents.index)
        found.append(preamble + chosen[0] + chosen[1] + chosen[2] + traffic.draw(20, 80))
    return found


def strangers(traffic: Traffic) -> list[list[int]]:
    """300 prompts of 200 to 3,000 tokens that share nothing."""
    return [traffic.draw(200, 3000) for _ in range(300)]


WORKLOADS: dict[str, Callable[[Traffic], list[list[int]]]] = {
    "multi-turn chat": chats,
    "few-shot": few_shot,
    "tree of thought": thoughts,
    "RAG": rag,
    "nothing shared": strangers,
}


class Outcome(NamedTuple):
    """The result of one set-up on one workload."""

    hit: int
    blobs: int
    stored: int
    """Tokens in blobs."""
    twice: int
    """Number of those tokens that another blob has as well."""


def tensors(workload: str) -> Prompts:
    return [torch.tensor(each) for each in WORKLOADS[workload](Traffic(7))]


@lru_cache(maxsize=1000)
def places(tokens: torch.Tensor) -> list[bytes]:
    """A name for each token together with all before it."""
    return [each.key.digest for each in chain(tokens, chunk_tokens=1, fingerprint="eval")]


def possible(prompts: Prompts) -> tuple[int, int]:
    """All tokens, and those that an earlier prompt has too, behind the same tokens: no cache can hit more."""
    known: set[bytes] = set()
    shared = 0
    for prompt in prompts:
        names = places(prompt)
        shared += next((at for at, name in enumerate(names) if name not in known), len(names))
        known.update(names)
    return sum(map(len, prompts)), shared


def served(engine: Engine, prompt: torch.Tensor) -> int:
    kv = torch.zeros(SPEC.blob_shape(len(prompt)))
    hit = int(engine.retrieve(prompt, kv=kv).count_nonzero())
    engine.store(prompt, kv=kv)
    engine.flush()  # so that two runs count the same
    return hit


def config(setup: dict[str, Any]) -> dict[str, Any]:
    return {**setup, "connector": "plain", "tiers": [{"type": "dict"}]}


def measured(setup: dict[str, Any], prompts: Prompts) -> Outcome:
    hit, stored = 0, 0
    blobs: set[bytes] = set()
    covered: set[bytes] = set()
    with closing(Engine.open(config(setup), SPEC)) as engine:
        for prompt in prompts:
            names = places(prompt)
            for segment in engine.segments(prompt):
                if segment.key.digest not in blobs:
                    blobs.add(segment.key.digest)
                    stored += segment.end - segment.start
                    covered.update(names[segment.start : segment.end])
            hit += served(engine, prompt)
    return Outcome(hit, len(blobs), stored, stored - len(covered))


def crowded(setup: dict[str, Any], prompts: Prompts, num_tokens: int) -> int:
    """Tokens hit where the store has room for so many tokens: duplicates push something out."""
    hit, capacity = 0, num_tokens * BYTES_PER_TOKEN
    memory = {"type": "memory", "capacity": capacity}
    with closing(Engine.open({**config(setup), "tiers": [memory]}, SPEC)) as engine:
        for prompt in prompts:
            hit += served(engine, prompt)
    return hit


# -- where it loses ----------------------------------------------------------------------------------------------------


def restarted(setup: dict[str, Any], prompts: Prompts, *, keep: Path | None) -> int:
    """Tokens hit in the second half, over the same store, by a database that begins anew in the middle."""
    if keep is not None and setup["tokens"] == "radix":
        setup = {**setup, "tokens": {"type": "radix", "path": str(keep)}}
    half, hit = len(prompts) // 2, 0
    with closing(Engine.open(config(setup), SPEC)) as engine:
        for prompt in prompts[:half]:
            served(engine, prompt)
        engine._tokens.close()
        engine._tokens = fresh(engine, setup)
        for prompt in prompts[half:]:
            hit += served(engine, prompt)
    return hit


def replicas(setup: dict[str, Any], prompts: Prompts) -> int:
    """Tokens hit by two servers over one store, each of which learns from its own requests only."""
    hit = 0
    with closing(Engine.open(config(setup), SPEC)) as engine:
        databases = [engine._tokens, fresh(engine, setup)]
        for number, prompt in enumerate(prompts):
            engine._tokens = databases[number % 2]
            hit += served(engine, prompt)
    return hit


def fresh(engine: Engine, setup: dict[str, Any]) -> TokenDatabase:
    block = setup["tokens"] if isinstance(setup["tokens"], dict) else {"type": setup["tokens"]}
    cls: Any = Registry.discover().get("tokens", block["type"])
    settings = {key: value for key, value in block.items() if key != "type"}
    database: TokenDatabase = cls(cls.Config.model_validate(settings), SPEC)
    database.fingerprint, database.chunk_tokens = engine.fingerprint, engine.chunk_tokens
    database.save_tails = engine.config.save_tails
    return database


# -- time --------------------------------------------------------------------------------------------------------------


def median_ms(run: Callable[[], object], times: int = 15) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def times() -> list[tuple[str, float]]:
    """Milliseconds for 131,072 tokens."""
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 120_000, 131_072))
    rows = []
    with closing(Engine.open(config(SETUPS["chunked 256"]), SPEC)) as engine:
        for name, setup in SETUPS.items():
            engine._tokens = database = fresh(engine, setup)
            database.chunk_tokens = setup["chunk_tokens"]
            rows.append((f"`segments`, {name}", median_ms(lambda database=database: database.segments(tokens))))  # type: ignore[misc]
        one = fresh(engine, SETUPS["radix"])
        began = time.perf_counter()
        one.learn(tokens)
        rows.append(("`learn`, the first time", (time.perf_counter() - began) * 1e3))
        rows.append(("`learn`, known", median_ms(lambda: one.learn(tokens))))
        rows.append(("`segments`, radix, known", median_ms(lambda: one.segments(tokens))))
        branch = tokens.clone()
        branch[100_000:] += 1
        rows.append(("`segments`, radix, branching off at 100,000", median_ms(lambda: one.segments(branch))))
        talk = fresh(engine, SETUPS["radix"])
        for count in range(300, len(tokens), 300):
            talk.learn(tokens[:count])
        rows.append(("`segments`, radix, a chat of 436 turns", median_ms(lambda: talk.segments(tokens))))
        rows.append(("`learn`, a chat of 436 turns", median_ms(lambda: talk.learn(tokens))))
    return rows


# -- saying it ---------------------------------------------------------------------------------------------------------


def draw(found: dict[str, dict[str, Outcome]], limits: dict[str, tuple[int, int]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    names = list(found)
    for number, setup in enumerate(SETUPS):
        at = [index + 0.16 * (number - 2) for index in range(len(names))]
        left.bar(at, [found[name][setup].hit / limits[name][1] for name in names], 0.15, label=setup)
        right.bar(at, [found[name][setup].blobs for name in names], 0.15, label=setup)
    left.set_title("tokens hit, of those that earlier prompts had too", fontsize=10)
    left.set_ylim(0, 1.02)
    right.set_title("blobs in the store (log)", fontsize=10)
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xticks(range(len(names)), names, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(fontsize=8, frameon=False, ncols=2)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the chart goes")
    out: Path = parser.parse_args().out
    found: dict[str, dict[str, Outcome]] = {}
    limits: dict[str, tuple[int, int]] = {}
    print("| traffic | database | tokens hit | of the possible | blobs | stored twice |")
    print("|---|---|---:|---:|---:|---:|")
    for name in WORKLOADS:
        places.cache_clear()
        prompts = tensors(name)
        total, shared = limits[name] = possible(prompts)
        found[name] = {setup: measured(settings, prompts) for setup, settings in SETUPS.items()}
        for setup, one in found[name].items():
            share = f"{one.hit / shared:.3f}" if shared > len(prompts) else ""
            print(
                f"| {name} | {setup} | {one.hit:,} ({one.hit / total:.1%}) | {share} | {one.blobs:,} | "
                f"{one.twice:,} tokens ({one.twice / one.stored:.1%}) |",
                flush=True,
            )
    shown = [name for name in WORKLOADS if limits[name][1] > limits[name][0] // 100]
    draw({name: found[name] for name in shown}, limits, out / "tokens_radix.png")
    print("\n| traffic | database | unhindered | room for a third | anew in the middle | with `path` | two servers |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in shown:
        prompts = tensors(name)
        room = (limits[name][0] - limits[name][1]) // 3
        for setup in ("radix", "chunked 256", "chunked 256, no tails"):
            settings = SETUPS[setup]
            with tempfile.TemporaryDirectory() as keep:
                hits = [
                    found[name][setup].hit, crowded(settings, prompts, room), restarted(settings, prompts, keep=None),
                    restarted(settings, prompts, keep=Path(keep)), replicas(settings, prompts),
                ]  # fmt: skip
            print(f"| {name} | {setup} | " + " | ".join(f"{hit:,}" for hit in hits) + " |", flush=True)
    print("\n| 131,072 tokens | ms |\n|---|---:|")
    for what, milliseconds in times():
        print(f"| {what} | {milliseconds:.2f} |")


if __name__ == "__main__":
    main()
