"""K of all layers of a model turned to other positions, beside a copy of as many bytes.

    python plugins/blend/bench/rotation.py [--quick]

4,096 tokens of a small model in float32 and of a Llama 8B in bfloat16. All take turns, on one core in processor time,
so that neighbours on the machine do not count. Medians, lowest and highest. Writes bench/results/rotation.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

from table import Rows

from kvloom_blend.rotation import Rotation, Turn, native

TOKENS = 4096
ROUNDS = 3 if "--quick" in sys.argv else 15
MODELS = {  # layers, heads, head size
    torch.float32: (16, 3, 64),
    torch.bfloat16: (32, 8, 128),
    torch.float16: (32, 8, 128),
}
K = list[torch.Tensor]


def main() -> None:
    torch.set_num_threads(1)
    rows = Rows("rotation")
    old = torch.arange(TOKENS)
    for dtype, (layers, heads, head_size) in MODELS.items():
        inv_freq = 1e4 ** (-torch.arange(head_size // 2) / (head_size // 2))
        ks, outs = ([torch.randn(TOKENS, heads * head_size).to(dtype) for _ in range(layers)] for _ in "12")
        amount = sum(k.nbytes for k in ks) / 1e9
        model = f"{str(dtype).removeprefix('torch.')}, {layers} layers, {heads} heads of {head_size}"
        for interleaved in (False, True):
            rotation = Rotation(inv_freq, head_size=head_size, interleaved=interleaved)
            turn = rotation.turn(old, old + 7000)
            taken = in_turn(ways(rotation, turn, ks, outs))
            for name in [name for name in taken if name != "copy"]:
                what = f"{model}, {'interleaved' if interleaved else 'halves'}: {name}, GB/s of a core"
                rows.spread(what, taken[name], amount, taken["copy"], "copying as much")
    taken = in_turn({"turn": lambda: rotation.turn(old, old + 7000)})["turn"]
    rows.seconds(f"cosines and sines of {TOKENS:,} tokens and {rotation.pairs} pairs", statistics.median(taken))
    rows.finish()


def ways(rotation: Rotation, turn: Turn, ks: K, outs: K) -> dict[str, Callable[[], object]]:
    def by_torch() -> None:
        for k in ks:
            rotation.by_torch(k, turn, out=k)

    def copy() -> None:
        for k, out in zip(ks, outs, strict=True):
            out.copy_(k)

    library: dict[str, Callable[[], object]] = {
        "library, where it is": lambda: rotation.apply_layers(ks, turn, outs=ks),
        "library, into other memory": lambda: rotation.apply_layers(ks, turn, outs=outs),
    }
    return {**(library if native.processor() else {}), "torch, where it is": by_torch, "copy": copy}


def in_turn(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if round_:
                taken[name].append(time.process_time() - began)
    return taken


if __name__ == "__main__":
    main()
