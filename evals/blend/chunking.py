"""Compares cuts of pieces on real text: `fixed` at every offset, and pieces that end where their content says.

python evals/blend/chunking.py [--repository FOLDER]

Text and its edits are real: the Python standard library, and the versions of the most edited files of a git repository
(this one by default). Prompts are drawn with a fixed seed. Every prompt is looked up, then stored whole; prints the
tables of chunking.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvloom import Engine, KVSpec
from kvloom_blend.retrievers import ContentRetriever, FixedRetriever
from kvloom_blend.retrievers.pieces import PieceRetriever
from kvloom_blend.retrievers.rolling import RollingHash

ROOT = Path(__file__).resolve().parents[2]
SPEC = KVSpec(model="eval", num_layers=1, num_kv_heads=1, head_size=2, dtype="float16")
SEED = 7
MOST_TOKENS = 6000
Prompts = list[torch.Tensor]


SETUPS: dict[str, tuple[type[PieceRetriever], dict[str, Any]]] = {
    f"{cls.type} {pieces}": (cls, {"piece_tokens": pieces})
    for pieces in (32, 64, 128)
    for cls in (FixedRetriever, ContentRetriever)
}


# -- traffic -----------------------------------------------------------------------------------------------------------


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "evals/pylm/weights")


def tokens_of(text: str) -> list[int]:
    return list(_tokenizer()(text, verbose=False)["input_ids"])[:MOST_TOKENS]


class Traffic:
    def __init__(self, repository: Path) -> None:
        self.chance = np.random.default_rng(SEED)
        self.repository = repository
        folder = Path(sysconfig.get_paths()["stdlib"])
        self.documents = [tokens_of(path.read_text()) for path in sorted(folder.glob("[a-m]*.py"))[:60]]

    def some(self, count: int) -> list[list[int]]:
        """So many different documents; the first are asked for most (Zipf)."""
        weights = 1 / np.arange(1, len(self.documents) + 1)
        chosen = self.chance.choice(len(self.documents), count, replace=False, p=weights / weights.sum())
        return [self.documents[each] for each in chosen]

    def question(self) -> list[int]:
        """Tokens that nothing else has."""
        return self.chance.integers(5000, 2**31 - 1, int(self.chance.integers(15, 80))).tolist()

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(self.repository), *arguments], check=True, capture_output=True, text=True
        ).stdout


def whole(traffic: Traffic) -> Iterator[list[int]]:
    """3 of 60 modules of the standard library, up to 1,500 tokens of each, in the order in which they are drawn."""
    for _ in range(200):
        yield [token for one in traffic.some(3) for token in one[:1500]] + traffic.question()


def excerpts(traffic: Traffic) -> Iterator[list[int]]:
    """5 excerpts of 200 to 800 tokens from anywhere in the same modules: what a search over text gives."""
    for _ in range(200):
        found: list[int] = []
        for one in traffic.some(5):
            length = int(traffic.chance.integers(200, 800))
            start = int(traffic.chance.integers(0, max(1, len(one) - length)))
            found += one[start : start + length]
        yield found + traffic.question()


def edited(traffic: Traffic) -> Iterator[list[int]]:
    """The 12 files of the repository that were edited most, after each edit, in the order of the edits."""
    log = traffic.git("log", "--no-merges", "--format=commit %H", "--name-only", "--", "*.md", "*.py").splitlines()
    edits, commit = [], ""
    for line in log:
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line:
            edits.append((commit, line))
    most = {name for name, _ in Counter(name for _, name in edits).most_common(12)}
    for commit, name in reversed(edits):
        if name in most:
            try:
                text = traffic.git("show", f"{commit}:{name}")
            except subprocess.CalledProcessError:
                continue  # the edit removed it
            yield tokens_of(text) + traffic.question()


def agent(traffic: Traffic) -> Iterator[list[int]]:
    """40 tasks of 6 turns: a module, then excerpts of it and of two others behind what was said before."""
    for _ in range(40):
        mine = traffic.some(3)
        talk = traffic.question() + mine[0][:3000]
        for _ in range(6):
            yield talk
            one = mine[int(traffic.chance.integers(3))]
            start = int(traffic.chance.integers(0, max(1, len(one) - 400)))
            talk = (talk + traffic.question() + one[start : start + 400])[-8000:]


WORKLOADS: dict[str, Callable[[Traffic], Iterator[list[int]]]] = {
    "documents": whole,
    "excerpts": excerpts,
    "edited files": edited,
    "agent": agent,
}


# -- what it comes to --------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    reused: int
    """Tokens found, of all."""
    runs: int
    """In so many runs: what stands beside each other was computed beside each other."""
    stored: int
    """Tokens in the store."""
    asked: int
    """Keys asked of the store."""
    seconds: float
    """To find out what there is."""


def measured(setup: str, prompts: Prompts, *, servers: int = 1) -> Outcome:
    cls, settings = SETUPS[setup]
    config = {"connector": "plain", "chunk_tokens": 1024, "tiers": [{"type": "dict"}]}
    reused = runs = asked = stored = 0
    seconds, kept = 0.0, set()
    with closing(Engine.open(config, SPEC)) as engine:
        find = engine.find

        def counted(segments: Any) -> Any:
            nonlocal asked
            asked += len(segments)
            return find(segments)

        engine.find = counted  # type: ignore[method-assign]
        retrievers = [cls(cls.Config(prefix=False, **settings)) for _ in range(servers)]
        for number, tokens in enumerate(prompts):
            retriever = retrievers[number % servers]
            retriever.engine = engine
            began = time.perf_counter()
            _, found = retriever.stored(tokens)
            seconds += time.perf_counter() - began
            reused += sum(one.end - one.start for one in found)
            runs += len({one.start for one in found} - {one.end for one in found})
            new = {one.key.digest: one for one in retriever.in_context(tokens) if one.key.digest not in kept}
            stored += sum(one.end - one.start for one in new.values())
            kept |= new.keys()
            if new:
                kv = torch.zeros(SPEC.blob_shape(len(tokens)), dtype=SPEC.torch_dtype)
                engine.save(sorted(new.values(), key=lambda one: one.start), kv=kv).result()
                engine.flush()
            retriever.learn(tokens)
    return Outcome(reused, runs, stored, asked, seconds)


def possible(prompts: Prompts, width: int = 32) -> int:
    """Tokens in runs of `width` that an earlier prompt has too."""
    rolling, known, count = RollingHash(width), set(), 0
    for tokens in prompts:
        windows = rolling.windows(tokens.to(torch.int32).numpy()).tolist()
        covered = np.zeros(len(tokens), dtype=bool)
        for at, one in enumerate(windows):
            if one in known:
                covered[at : at + width] = True
        count += int(covered.sum())
        known.update(windows)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", type=Path, default=ROOT)
    traffic = Traffic(parser.parse_args().repository)
    columns = ("tokens reused", "of the possible", "by two servers", "tokens a run", "stored", "keys asked", "ms")
    print("| traffic | pieces | " + " | ".join(columns) + " |")
    print("|---|---|" + "---:|" * len(columns))
    for name, make in WORKLOADS.items():
        traffic.chance = np.random.default_rng(SEED)
        prompts = [torch.tensor(each) for each in make(traffic)]
        total, limit = sum(map(len, prompts)), possible(prompts)
        for setup in SETUPS:
            one, two = measured(setup, prompts), measured(setup, prompts, servers=2)
            print(
                f"| {name} | {setup} | {one.reused:,} ({one.reused / total:.1%}) | {one.reused / limit:.3f} | "
                f"{two.reused:,} | {one.reused / max(one.runs, 1):.0f} | {one.stored:,} | "
                f"{one.asked / len(prompts):.0f} | {1e3 * one.seconds / len(prompts):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
