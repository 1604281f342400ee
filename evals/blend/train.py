"""Trains a small Llama for task.py, on one thread of a processor.

    python evals/blend/train.py --out FOLDER [--minutes 30] [--seed 0]

Prompts grow in stages; the next one starts when most questions of one are answered. Writes Hugging Face files, in
bfloat16, and beside them state.pt, from which the same command goes on after it was stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as nnf
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))
from blend import task
from blend.task import IGNORED, PAD, Shape

STAGES = (
    Shape(dictionaries=1, chunks=2, length=(10, 16), keys=4, facts=6, questions=6),
    Shape(dictionaries=2, chunks=4, length=(14, 24), keys=6, facts=10, questions=10),
    Shape(dictionaries=2, chunks=6, length=(24, 40), keys=8, facts=16, questions=16),
    task.FULL,
)
KINDS = ("name", "name", "name", "value", "code")
"""Questions of which kinds are drawn: names are learned last."""
PASSED = 0.85
"""The share of questions answered at which the next stage starts."""
TOKENS = 1024
"""About as many in a step."""
RATE = 3e-3
COOLING = 0.25
"""The share of the time, at its end, over which the rate falls to nothing."""
RESOLVED = 3
"""A fact token's state behind so many layers is asked for its true value and its name: later layers build on it."""
SINK_LAYERS, SINK_MASS, SINK_EVERY = slice(2, None), 0.5, 4
"""Large models rest their attention on the first token where they look for nothing. So small a model hardly does, so
filler is made to: on the mean of heads it gives at least this mass, asked for in every fourth step."""


@dataclass
class Progress:
    seconds: float = 0.0
    """This process's CPU time."""
    steps: int = 0
    tokens: int = 0
    stage: int = 0
    answered: float = 0.0
    """A running mean of questions of this stage."""
    began: list[tuple[int, float]] = field(default_factory=list)
    """For each stage but the first, the step and the seconds at which it began."""


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=task.VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=False,
        bos_token_id=task.BOS,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    embed(model.model.embed_tokens.weight)
    return model


@torch.no_grad()
def embed(weight: torch.Tensor) -> None:
    """Tokens that stand for two things start as their sum. Only the start: everything is trained."""

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, weight.shape[1]) * 0.3

    def sums(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first[:, None] + second[None]).flatten(0, 1)

    keys, meanings, codes, values, groups = (
        rows(n) for n in (task.KEYS, task.VALUES, task.VALUES, task.VALUES, task.GROUPS)
    )
    weight.normal_(0, 0.3)
    weight[task.N : task.V] += groups.repeat_interleave(task.VALUES, 0)
    weight[task.V : task.C], weight[task.C : task.R] = values, codes
    weight[task.R : task.D] = sums(groups, values)
    weight[task.D : task.F] = sums(keys, meanings)
    weight[task.F : task.X] = sums(keys, codes)


def batch(rng: random.Random, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, `[samples, tokens]`, padded at their ends. One in four is of an earlier stage's size.

    Half of them start without BOS: the first token has to do as a sink of attention, as it does in a chunk alone."""
    shape = STAGES[stage if rng.random() < 0.75 else rng.randint(0, stage)]
    drawn: list[task.Sample] = []
    while sum(len(each.tokens) for each in drawn) < TOKENS:
        size = shape if rng.random() < 0.5 else task.smaller(rng, shape)
        bos, defined = rng.random() < 0.5, rng.random() < 0.9
        drawn.append(task.sample(rng, shape=size, bos=bos, defined=defined, kinds=KINDS))
    longest = max(len(each.tokens) for each in drawn)
    tokens = torch.full((len(drawn), longest), PAD)
    labels = torch.full((len(drawn), longest), IGNORED)
    for row, each in enumerate(drawn):
        tokens[row, : len(each.tokens)] = torch.tensor(each.tokens)
        labels[row, : len(each.labels)] = torch.tensor(each.labels)
    return tokens, labels


def losses(
    model: LlamaForCausalLM, named: torch.nn.Linear, tokens: torch.Tensor, labels: torch.Tensor, *, sinks: bool = False
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss, and the shares of facts resolved and questions answered. `named` reads names off states."""
    wanted, before = labels != IGNORED, tokens.roll(1, 1)
    is_filler, is_fact = tokens >= task.X, (tokens >= task.F) & (tokens < task.X)
    values, names = labels[is_fact], before[is_fact] - task.N
    model.set_attn_implementation("eager" if sinks else "sdpa")
    states = model.model(tokens, output_hidden_states=True, output_attentions=sinks)

    weight = torch.where(is_filler, 0.05, 1.0)[wanted]
    logits = model.lm_head(states.last_hidden_state[wanted])
    loss = (nnf.cross_entropy(logits, labels[wanted], reduction="none") * weight).sum() / weight.sum()
    resolved = model.model.norm(states.hidden_states[RESOLVED][is_fact])
    early, early_names = model.lm_head(resolved), named(resolved)
    loss = loss + 0.5 * nnf.cross_entropy(early, values) + 0.5 * nnf.cross_entropy(early_names, names)

    right = logits.argmax(-1) == labels[wanted]
    parts = {"early": early.argmax(-1) == values, "names": early_names.argmax(-1) == names}
    parts["asked"] = right[~is_filler[wanted] & ~is_fact[wanted]]
    for kind in task.KINDS:
        parts[kind] = right[before[wanted] == getattr(task, f"ASK_{kind.upper()}")]
    if sinks:
        resting = is_filler & (torch.arange(tokens.shape[1]) > 3)
        parts["sinks"] = torch.stack([each[..., 0].mean(1)[resting] for each in states.attentions[SINK_LAYERS]])
        loss = loss + SINK_EVERY * 0.1 * (SINK_MASS - parts["sinks"]).relu().mean()
    return loss, {name: part.float().mean().item() for name, part in parts.items() if len(part)}


def optimizers(model: LlamaForCausalLM, named: torch.nn.Linear) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers: it learns to look things up in a fraction of the steps that AdamW takes."""
    inner = [each for each in model.model.layers.parameters() if each.ndim == 2]
    other = [each for each in (*model.parameters(), *named.parameters()) if not any(each is one for one in inner)]
    return [
        torch.optim.Muon(inner, lr=RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


class Training:
    """A model with all that is needed to go on with it."""

    def __init__(self, out: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.out, self.rng = out, random.Random(seed)
        self.model = new_model()
        self.named = torch.nn.Linear(self.model.config.hidden_size, task.NAMES, bias=False)
        self.optimizers = optimizers(self.model, self.named)
        self.now = Progress()
        if (out / "state.pt").exists():
            self.load()

    def load(self) -> None:
        kept = torch.load(self.out / "state.pt", weights_only=False)
        for each, its in zip((self.model, self.named, *self.optimizers), kept["parts"], strict=True):
            each.load_state_dict(its)
        self.rng.setstate(kept["rng"])
        self.now = Progress(**kept["now"])

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        parts = [each.state_dict() for each in (self.model, self.named, *self.optimizers)]
        torch.save({"parts": parts, "rng": self.rng.getstate(), "now": asdict(self.now)}, self.out / "state.tmp")
        (self.out / "state.tmp").replace(self.out / "state.pt")
        shipped = new_model()
        shipped.load_state_dict(self.model.state_dict())
        shipped.to(torch.bfloat16).save_pretrained(self.out)
        (self.out / "training.json").write_text(json.dumps(asdict(self.now), indent=1) + "\n")

    def step(self, rate: float) -> dict[str, float]:
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = rate
        tokens, labels = batch(self.rng, self.now.stage)
        loss, shares = losses(self.model, self.named, tokens, labels, sinks=self.now.steps % SINK_EVERY == 0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for each in self.optimizers:
            each.step()
            each.zero_grad(set_to_none=True)
        self.now.steps, self.now.tokens = self.now.steps + 1, self.now.tokens + tokens.numel()
        return {"loss": loss.item(), **shares}

    def advance(self, answered: float) -> None:
        now = self.now
        now.answered += 0.02 * (answered - now.answered)
        if now.answered > PASSED and now.stage < len(STAGES) - 1:
            now.stage, now.answered = now.stage + 1, 0.0
            now.began.append((now.steps, now.seconds))


def train(out: Path, *, minutes: float, seed: int) -> None:
    torch.set_num_threads(1)
    training = Training(out, seed)
    now, means = training.now, dict[str, float]()
    began = time.process_time() - now.seconds
    while (share := now.seconds / 60 / minutes) < 1:
        found = training.step(RATE * min(1, (now.steps + 1) / 50, (1 - share) / COOLING))
        now.seconds = time.process_time() - began
        training.advance(found["asked"])
        for name, value in found.items():
            means[name] = means.get(name, value) + 0.05 * (value - means.get(name, value))
        if now.steps % 25 == 0:
            said = " ".join(f"{name} {value:.3f}" for name, value in means.items())
            print(f"stage {now.stage} step {now.steps} {now.tokens / 1e6:.2f} M {now.seconds:.0f} s {said}", flush=True)
        if now.steps % 200 == 0:
            training.save()
    training.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    disable_progress_bar()
    train(args.out, minutes=args.minutes, seed=args.seed)


AUTOCAST = False

if __name__ == "__main__":
    main()
