"""Measures blending's effect on the answers of a model of this folder, with a plain forward pass and no part of kvloom.

    python evals/blend/measure.py [--model FOLDER] [--samples 100] [--seed 1]

It measures the models, not executors: the simplest code that blends, one prompt at a time. Each chunk
is prefilled alone, its K is rotated to where the chunk stands in the prompt, and a share of its tokens is computed
again, in every layer, as if only they and the question were new. The first chunk is prefilled behind the prefix, so
that it is exact, but counts like the others.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as nnf
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))
from blend import task

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, `[heads, tokens, head size]`, K rotated."""


@dataclass
class Prompt:
    tokens: torch.Tensor
    kv: KV
    """KV of all tokens; zeros for those to be computed."""
    cached: torch.Tensor
    """Mask of the tokens with their KV in `kv`, bool."""
    offset: torch.Tensor
    """Number of tokens of its chunk before each token."""
    asked: torch.Tensor
    """At which tokens an answer is to be predicted, bool."""

    def share(self, score: torch.Tensor, ratio: float) -> torch.Tensor:
        """The tokens to compute: what is not cached, and so large a share of the rest, those that score highest."""
        computed = ~self.cached
        count = round(ratio * int(self.cached.sum()))
        computed[score.masked_fill(computed, -torch.inf).topk(count).indices] = True
        return computed


Choice = Callable[["Reader", Prompt, float], torch.Tensor]


class Reader:
    """Runs a Llama layer by layer; some tokens are computed, the KV of others is given."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.size = model, int(model.config.head_dim)
        self.masses: list[torch.Tensor] | None = None
        """A list keeps the attention of each layer, `[heads, computed, tokens]`; None keeps nothing."""

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.model.model.rotary_emb(torch.zeros(1), positions[None])
        return cos[0], sin[0]

    def rotated(self, k: torch.Tensor, *, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """K of positions `before`, as it is at positions `after`."""
        frequencies = self.model.model.rotary_emb.inv_freq
        turn = after[:, None].float() * frequencies - before[:, None].float() * frequencies
        cos, sin = torch.cat((turn, turn), -1).cos(), torch.cat((turn, turn), -1).sin()
        return k * cos + rotate_half(k) * sin

    def prefill(self, tokens: list[int]) -> KV:
        empty = [(torch.zeros(0), torch.zeros(0))] * len(self.model.model.layers)
        return self.run(torch.tensor(tokens), torch.ones(len(tokens), dtype=torch.bool), empty)[1]

    @torch.no_grad()
    def run(
        self, tokens: torch.Tensor, computed: torch.Tensor, kv: KV, *, layers: int | None = None
    ) -> tuple[torch.Tensor, KV]:
        """States behind the last norm of the tokens that are `computed`, and KV of all; of the first `layers` only."""
        rows = computed.nonzero()[:, 0]
        cos, sin = self.angles(rows)
        mask = torch.arange(len(tokens))[None] <= rows[:, None]
        state, blended = self.model.model.embed_tokens(tokens[rows]), []
        for layer, (old_k, old_v) in zip(self.model.model.layers[:layers], kv, strict=False):
            inner, normed = layer.self_attn, layer.input_layernorm(state)
            q, k, v = (
                project(normed).unflatten(-1, (-1, self.size)).transpose(0, 1)
                for project in (inner.q_proj, inner.k_proj, inner.v_proj)
            )
            q, k = (each * cos + rotate_half(each) * sin for each in (q, k))
            if len(rows) < len(tokens):
                k, v = old_k.index_copy(1, rows, k), old_v.index_copy(1, rows, v)
            blended.append((k, v))
            k, v = (each.repeat_interleave(len(q) // len(each), 0) for each in (k, v))
            attention = (q @ k.mT * self.size**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
            if self.masses is not None:
                self.masses.append(attention)
            state = state + inner.o_proj((attention @ v).transpose(0, 1).flatten(1))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        return self.model.model.norm(state), blended

    def prompt(self, sample: task.Sample, *, bos: bool = False, rotate: bool = True) -> Prompt:
        """Chunks that were prefilled alone, or behind a BOS of their own, put together."""
        tokens, start = torch.tensor(sample.tokens), 0
        parts, offsets = [], []
        for number, chunk in enumerate(sample.chunks):
            lead = sample.prefix if number == 0 else [task.BOS] if bos else []
            skipped = 0 if number == 0 else len(lead)
            kept = len(lead) + len(chunk) - skipped
            before, after = torch.arange(skipped, skipped + kept), torch.arange(start, start + kept)
            part = [(k[:, skipped:], v[:, skipped:]) for k, v in self.prefill([*lead, *chunk])]
            if rotate:
                part = [(self.rotated(k, before=before, after=after), v) for k, v in part]
            parts.append(part)
            offsets.append(torch.arange(kept))
            start += kept
        rest = len(tokens) - start
        kv = [
            (nnf.pad(torch.cat([k for k, _ in layer], 1), (0, 0, 0, rest)),
             nnf.pad(torch.cat([v for _, v in layer], 1), (0, 0, 0, rest)))
            for layer in zip(*parts, strict=True)
        ]  # fmt: skip
        cached = torch.arange(len(tokens)) < start
        asked = nnf.pad(torch.tensor(sample.answers) != task.IGNORED, (start, 0))
        return Prompt(tokens, kv, cached, nnf.pad(torch.cat(offsets), (0, rest)), asked)


def at_random(reader: Reader, prompt: Prompt, ratio: float) -> torch.Tensor:
    return prompt.share(torch.rand(len(prompt.tokens)), ratio)


def epic(reader: Reader, prompt: Prompt, ratio: float) -> torch.Tensor:
    """The first tokens of every chunk."""
    return prompt.share(-prompt.offset.float() + 1e-3 * torch.rand(len(prompt.tokens)), ratio)


def deviation(reader: Reader, prompt: Prompt, ratio: float) -> torch.Tensor:
    """Tokens whose V of the second layer differs most from what it is in the prompt."""
    everything = torch.ones_like(prompt.cached)
    _, fresh = reader.run(prompt.tokens, everything, prompt.kv, layers=2)
    return prompt.share((fresh[1][1] - prompt.kv[1][1]).square().sum((0, 2)), ratio)


def facts(reader: Reader, prompt: Prompt, ratio: float) -> torch.Tensor:
    """Select the tokens that matter by the task's definition, then random others. No executor can know them."""
    matters = (prompt.tokens >= task.F) & (prompt.tokens < task.X)
    return prompt.share(matters + torch.rand(len(prompt.tokens)), ratio)


@dataclass(frozen=True)
class Row:
    name: str
    choice: Choice | None
    ratio: float = 0.0
    bos: bool = False
    rotate: bool = True


ROWS = (
    Row("full prefill", None),
    Row("reuse, not rotated", at_random, rotate=False),
    Row("reuse", at_random),
    Row("reuse, BOS before each chunk", at_random, bos=True),
    *(Row(f"random {ratio:.0%}", at_random, ratio) for ratio in (0.05, 0.15, 0.3, 0.5)),
    *(Row(f"EPIC {ratio:.0%}", epic, ratio) for ratio in (0.05, 0.15, 0.3)),
    *(Row(f"deviation of V, second layer, {ratio:.0%}", deviation, ratio) for ratio in (0.05, 0.1, 0.15, 0.3)),
    Row("the same, BOS before each chunk, 15%", deviation, 0.15, bos=True),
    Row("the same, not rotated, 15%", deviation, 0.15, rotate=False),
    Row("fact tokens first, 5%", facts, 0.05),
    Row("fact tokens first, 15%", facts, 0.15),
    Row("everything", at_random, 1.0),
)


def answers(reader: Reader, prompt: Prompt, *, row: Row) -> torch.Tensor:
    """Log-probabilities where an answer is asked, `[questions, vocabulary]`."""
    computed = torch.ones_like(prompt.cached) if row.choice is None else row.choice(reader, prompt, row.ratio)
    states, _ = reader.run(prompt.tokens, computed, prompt.kv)
    with torch.no_grad():
        return reader.model.lm_head(states[prompt.asked[computed]]).log_softmax(-1)


def table(reader: Reader, samples: list[task.Sample]) -> Iterator[str]:
    found: dict[str, list[torch.Tensor]] = {row.name: [] for row in ROWS}
    for sample in samples:
        ways = {(row.bos, row.rotate) for row in ROWS}
        prompts = {(bos, rotate): reader.prompt(sample, bos=bos, rotate=rotate) for bos, rotate in ways}
        for row in ROWS:
            found[row.name].append(answers(reader, prompts[row.bos, row.rotate], row=row))
    right = torch.tensor([answer for sample in samples for answer in sample.answers if answer != task.IGNORED])
    kinds = [kind for sample in samples for kind in sample.kinds]
    full = torch.cat(found[ROWS[0].name])
    yield f"| what is computed | name or value | {' | '.join(task.KINDS)} | KL | same answer |"
    yield "|---|---:|" + "---:|" * (len(task.KINDS) + 2)
    for name, parts in found.items():
        its = torch.cat(parts)
        good = (its.argmax(-1) == right).float()
        of = [good[torch.tensor([kind in some for kind in kinds])].mean().item()
              for some in (("name", "value"), *((kind,) for kind in task.KINDS))]  # fmt: skip
        kl = (full.exp() * (full - its)).sum(-1).mean().item()
        same = (its.argmax(-1) == full.argmax(-1)).float().mean().item()
        yield f"| {name} | {' | '.join(f'{100 * each:.1f}' for each in of)} | {kl:.4f} | {100 * same:.1f} |"


def sinks(reader: Reader, samples: list[task.Sample]) -> Iterator[str]:
    """The share of attention that first tokens get of all later ones, for each layer."""

    def first(tokens: list[int]) -> torch.Tensor:
        reader.masses = []
        reader.prefill(tokens)
        return torch.stack([mass[:, 1:, 0].mean() for mass in reader.masses])

    prompts = torch.stack([first(sample.tokens) for sample in samples]).mean(0)
    alone = torch.stack([first(chunk) for sample in samples for chunk in sample.chunks[1:]]).mean(0)
    even = torch.stack([sum(1 / torch.arange(2.0, len(c) + 1)) / (len(c) - 1) for s in samples for c in s.chunks[1:]])
    reader.masses = None
    yield f"| | {' | '.join(f'layer {number}' for number in range(1, len(prompts) + 1))} |"
    yield "|---|" + "---:|" * len(prompts)
    yield f"| BOS, whole prompts | {' | '.join(f'{100 * each:.0f}' for each in prompts)} |"
    yield f"| the first token of a chunk alone (evenly spread: {100 * even.mean():.0f}) | " + (
        " | ".join(f"{100 * each:.0f}" for each in alone) + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "facts_0")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    disable_progress_bar()
    reader = Reader(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval())
    samples = [task.sample(rng) for _ in range(args.samples)]
    for line in (*table(reader, samples), "", *sinks(reader, samples)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
