"""The models of the quality tables, and the text that they are measured on. All but SmolLM2 are in this repository."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvloom_eval.models import SMOLLM2, loaded
from kvloom_eval.text import CONTINUATION, spread, standard_library

HERE = Path(__file__).parent
PYLM = HERE.parent / "pylm" / "weights"
CALIBRATION_TOKENS = 32_768
"""The number of tokens that `kvloom calibrate` takes."""
OUTLIERS = ((2, 10.0), (4, 4.0))
"""For each KV head, the number of rotary pairs of K that grow, and their factor."""


@dataclass(frozen=True)
class Subject:
    """A model and what it is measured with."""

    name: str
    about: str
    model: PreTrainedModel
    windows: torch.Tensor
    """Held-out text, `[windows, context + CONTINUATION]`."""
    calibration: torch.Tensor
    """Windows of other files, `[windows, context]`."""
    context: int

    @property
    def head_size(self) -> int:
        return int(self.model.config.head_dim)


def tiny(windows: int) -> Subject:
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny", dtype=torch.float32)
    about = "4.2 M parameters, 6 layers, 2 KV heads of 64, bytes"
    return _subject("tiny", about, model, lambda text: list(text.encode()), 0, 512, windows)


def pylm(windows: int) -> Subject:
    model = AutoModelForCausalLM.from_pretrained(PYLM, dtype=torch.float32)
    about = "7 M parameters, 8 layers, 2 KV heads of 64, 4,096 tokens"
    return _subject("pylm", about, model, _tokens(AutoTokenizer.from_pretrained(PYLM)), 0, 1024, windows)


def smollm2(windows: int) -> Subject:
    model, tokenizer = loaded(SMOLLM2)
    about = "SmolLM2-135M-Instruct, 30 layers, 3 KV heads of 64, 49,152 tokens"
    return _subject("smollm2", about, model, _tokens(tokenizer), 0, 1024, windows)


SUBJECTS: dict[str, Callable[[int], Subject]] = {"tiny": tiny, "pylm": pylm, "smollm2": smollm2}
WINDOWS = {"tiny": 32, "pylm": 32, "smollm2": 8}
"""Number of windows that one core measures in an hour, for all models together."""
PLANTED = ("tiny", "pylm")
"""Are measured with outliers too; a trained large model has its own."""


@torch.no_grad()
def plant_outliers(model: PreTrainedModel) -> None:
    """Make some channels of K large, and those of Q small by as much: no prediction changes, but for rounding."""
    config, chance = model.config, torch.Generator().manual_seed(0)
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        for head in range(config.num_key_value_heads):
            pairs, factors = torch.randperm(size // 2, generator=chance).tolist(), torch.ones(size // 2)
            for count, factor in OUTLIERS:
                factors[pairs[:count]] = factor
                pairs = pairs[count:]
            factors = factors.repeat(2)[:, None]
            layer.self_attn.k_proj.weight[head * size : (head + 1) * size] *= factors
            queries = layer.self_attn.q_proj.weight[head * group * size : (head + 1) * group * size]
            queries /= factors.repeat(group, 1)


def _tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids


def _subject(
    name: str,
    about: str,
    model: PreTrainedModel,
    tokens: Callable[[str], list[int]],
    end: int,
    context: int,
    count: int,
) -> Subject:
    files = [(path.read_text(errors="replace"), kept) for path, kept in standard_library()]
    held = [token for text, kept in files if kept for token in (end, *tokens(text))]
    seen = [token for text, kept in files[::7] if not kept for token in (end, *tokens(text))]
    windows = spread(held, context + CONTINUATION, count)
    calibration = spread(seen, context, CALIBRATION_TOKENS // context)
    return Subject(name, about, model.eval(), windows, calibration, context)
