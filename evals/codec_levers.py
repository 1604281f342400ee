"""Measures what single changes of the quantiser in the mode `step` do to bits and quality, before they are built.

    python evals/codec_levers.py [--model smollm2] [--windows 2] [--only sinks]

Each row is one change to the row before it, or to the one that it names. KV is quantised in float32; bits are those of
the codec's own tables, with all that tiles say beside their symbols. The study is in
docs/design/2026-11-27-sinks-and-steps.md.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from codec_models import subjects

from kvloom_serde_cachegen.calibration.rope import Rope, rope_of
from kvloom_serde_cachegen.measuring import CHUNK_TOKENS, Codec, measure

_TABLES = (Path(__file__).parents[1] / "plugins/serde_cachegen/csrc/tables.h").read_text().split("kCosts")[1]
COSTS = torch.tensor([int(each) for each in re.findall(r"\b\d+(?=,)", _TABLES.split("};")[0])]).view(64, 64) / 256
"""Bits of each symbol in each table."""
_SCALES = 7.2 / 31
"""From one scale of the tables to the next, in octaves."""
_ESCAPE = 62


@dataclass(frozen=True)
class Levers:
    """One quantiser. Steps are in standard deviations."""

    step: float = 0.5
    """Of V."""
    of_k: float = 1.0
    """Steps of K relative to those of V."""
    rule: str = "half"
    """Steps of K's channels: `half` way between each and all, `one` for all, `level`: coarser beyond twice the mean."""
    sinks: float = 0.0
    """Tokens whose V is smaller than this part of what is usual stay as they are."""
    before_rope: bool = False
    trellis: bool = False
    classes: bool = False
    """Tables that follow the energy of a token."""
    layers: bool = True
    """Steps follow each layer's deviations; else those of all layers."""


def channel_steps(deviation: torch.Tensor, rule: str) -> torch.Tensor:
    """Of `[layers, hidden]`, relative to a step of 1."""
    octaves = deviation.clamp(min=1e-6).log2()
    mean = octaves.mean(-1, keepdim=True)
    if rule == "half":
        return 2 ** ((octaves + mean) / 2)
    if rule == "level":
        return 2 ** torch.maximum(mean.expand_as(octaves), octaves - 1)
    return deviation.mean(-1, keepdim=True).expand_as(deviation)


def table_bits(symbols: torch.Tensor, classes: torch.Tensor | None, band: int = 128) -> float:
    """Bits of `[layers, tokens, hidden]` and of what tiles say beside them; classes: `[layers, tokens]`."""
    layers, tokens, hidden = symbols.shape
    symbols = torch.where((symbols < -31) | (symbols > 30), _ESCAPE - 31, symbols).long() + 31
    cost = torch.zeros(layers * hidden, 64)
    shifts = torch.zeros(layers, tokens) if classes is None else classes
    for shift in shifts.unique().tolist():
        counts = torch.zeros(layers, hidden, 64)
        ones = (shifts == shift).float()[:, None].expand(-1, hidden, -1).contiguous()
        counts.scatter_add_(2, symbols.transpose(1, 2), ones)
        tables = (torch.arange(64) // 2 + int(shift)).clamp(0, 31) * 2 + torch.arange(64) % 2
        cost += counts.flatten(0, 1) @ COSTS[tables].T
    more = 0.0
    if classes is not None:
        share = classes.unique(return_counts=True)[1] / classes.numel()
        more = -(share * share.log2()).sum().item() * classes.numel()
    return cost.amin(1).sum().item() + more + layers * (24 * hidden + 1056 * -(-hidden // band))


def trellis_coded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in steps, `[..., tokens, hidden]`, to what they become and to their symbols: the best way through four
    states of two quantisers that are half a step apart."""
    after = [[0, 2], [2, 0], [1, 3], [3, 1]]
    best = torch.full((4, *values[..., 0, :].shape), 1e9)
    best[0] = 0
    ways = []
    for token in values.unbind(-2):
        reached, way = torch.full_like(best, 1e18), torch.zeros_like(best)
        for state in range(4):
            for odd in (0, 1):
                off = token - state // 2 / 2
                error = best[state] + (off - 2 * ((off - odd) / 2).round() - odd).square()
                nearer = error < reached[after[state][odd]]
                reached[after[state][odd]] = torch.where(nearer, error, reached[after[state][odd]])
                way[after[state][odd]] = torch.where(nearer, state * 2.0 + odd, way[after[state][odd]])
        best, _ = reached, ways.append(way)
    state, symbols, back = best.argmin(0, keepdim=True), torch.empty_like(values), torch.empty_like(values)
    for token in reversed(range(values.shape[-2])):
        way = ways[token].gather(0, state)[0]
        state, odd = (way // 2).long()[None], way % 2
        half = state[0] // 2 / 2
        symbols[..., token, :] = 2 * ((values[..., token, :] - half - odd) / 2).round() + odd
        back[..., token, :] = symbols[..., token, :] + half
    return back, symbols


def rotated(keys: torch.Tensor, rope: Rope, start: int, *, back: bool) -> torch.Tensor:
    """K `[layers, tokens, hidden]` without its position, or with it again."""
    angles = (start + torch.arange(keys.shape[1]))[:, None, None] * rope.frequencies
    cos, sin = angles.cos().float(), angles.sin().float() * (-1 if back else 1)
    heads = keys.unflatten(2, (-1, rope.size)).clone()
    first, second = rope.pairs
    x, y = heads[..., first], heads[..., second]
    heads[..., first], heads[..., second] = x * cos + y * sin, y * cos - x * sin
    return heads.flatten(2)


def codec_of(levers: Levers, rope: Rope) -> Codec:
    def codec(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        whole, first = kv.float(), int(start == 0)
        out, bits = whole.clone(), 16.0 * whole[:, :, :first].numel()
        squares = whole[1, :, first:].square().sum(-1)
        sinks = squares < levers.sinks**2 * squares.mean(1, keepdim=True)
        for plane, exact in enumerate(whole[:, :, first:]):
            turned = levers.before_rope and plane == 0
            rows = rotated(exact, rope, start + first, back=False) if turned else exact
            mean, deviation = rows.mean(1, keepdim=True), rows.std(1, keepdim=True)
            steps = channel_steps(deviation if levers.layers else deviation.mean(0, keepdim=True).expand_as(deviation),
                                  "one" if plane else levers.rule)  # fmt: skip
            steps = torch.maximum(steps * levers.step * (1 if plane else levers.of_k), mean.abs() / 120)
            centre = (mean / steps).round()
            if levers.trellis:
                back, symbols = trellis_coded(rows / steps - centre)
            else:
                symbols = (rows / steps).round() - centre
                back = symbols
            back = (back + centre) * steps
            back = rotated(back, rope, start + first, back=True) if turned else back
            symbols[sinks] = _ESCAPE
            escaped = (symbols < -31) | (symbols > 30)
            out[plane, :, first:] = torch.where(escaped, exact, back)
            energy = ((rows - mean) / deviation.clamp(min=1e-6)).square().mean(-1).sqrt().clamp(min=1e-6).log2()
            bits += table_bits(symbols, (energy / _SCALES).round().clamp(-7, 7) if levers.classes else None)
        return out.to(kv.dtype), int(bits / 8)

    return codec


SINKS = Levers(sinks=0.3)
BUILT = Levers(0.7, 0.5, "level", 0.3)
ROWS: dict[str, Levers] = {
    "as it was: half way, step 0.5": Levers(),
    "sinks as they are": SINKS,
    "and K's steps half of V's: built, half way": replace(BUILT, rule="half"),
    "and one step for K": replace(BUILT, rule="one"),
    "and one step but for outliers: built": BUILT,
    "built, one scale for all layers": replace(BUILT, layers=False),
    "built, K before RoPE": replace(BUILT, before_rope=True),
    "built, trellis of 4 states": replace(BUILT, trellis=True),
    "built, tables by a token's energy": replace(BUILT, classes=True),
    "built, step 0.5": replace(BUILT, step=0.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(subjects.SUBJECTS), default="smollm2")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--only", default="", help="rows with this in their names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    subject = subjects.SUBJECTS[args.model](args.windows)
    rope = rope_of(subject.model)
    codecs = {name: codec_of(levers, rope) for name, levers in ROWS.items() if args.only in name}
    print(f"{subject.about}; {args.windows} windows of {subject.context} + 256 tokens, chunks of {CHUNK_TOKENS}")
    for name, quality in measure(subject.model, subject.windows, codecs, context=subject.context).items():
        mean, error = quality.mean, quality.error
        print(f"{name:44} {mean.bits_per_value:6.3f} bits  KL {1e4 * mean.kl:6.1f} ± {1e4 * error.kl:4.1f} e-4  "
              f"top-1 {100 * mean.top1:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
