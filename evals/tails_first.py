"""Tokens hit by `chunked` with tails, if pieces age like chunks, and if they are evicted before chunks.

    python evals/tails_first.py

The traffic is that of tokens_radix.py. The store is a list in the order of use with room for some tokens: a retrieve
touches what it finds, a store adds what is missing, and the coldest goes first. Two runs count the same. Prints the
table of docs/design/2026-11-26-tails-of-answers.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing

import torch
from tokens_radix import SETUPS, SPEC, WORKLOADS, Prompts, config, places, possible, tensors

from kvloom import ChunkKey, Engine, Segment, leading

CHUNK = 256
WAYS = ("no tails", "aging", "superseded", "cold")
ROOMS = (1 / 12, 1 / 6, 1 / 3, 2 / 3)
"""Room of the store, in distinct tokens of the traffic."""


class Store:
    """Chunks and pieces in the order of their use, the coldest first."""

    def __init__(self, room: int, way: str) -> None:
        self.room, self.way, self.used = room, way, 0
        self.sizes: OrderedDict[ChunkKey, int] = OrderedDict()

    def serve(self, engine: Engine, prompt: torch.Tensor) -> int:
        """Retrieve a prompt, then store it. Returns the tokens hit."""
        whole = engine.segments(prompt)
        found = list(leading([one for one in whole if one.key in self.sizes], 0))
        if len(found) < len(whole) and self.way != "no tails":
            start = whole[len(found)].start
            pieces = engine._tokens.pieces(prompt, start)
            found += leading([piece for piece in pieces if piece.key in self.sizes], start)
        for segment in reversed(found):
            self.sizes.move_to_end(segment.key)
        self.store(engine, prompt, whole)
        return found[-1].end if found else 0

    def store(self, engine: Engine, prompt: torch.Tensor, whole: Sequence[Segment]) -> None:
        keys = {segment.key for segment in whole}
        new = [segment for segment in whole if segment.key not in self.sizes]
        for segment in new:
            size = segment.end - segment.start
            if self.way == "superseded" and size == CHUNK:
                for piece in engine._tokens.pieces(prompt, segment.start):
                    if piece.key in self.sizes and piece.key != segment.key:
                        self.sizes.move_to_end(piece.key, last=False)
            while self.used + size > self.room and (victim := next((k for k in self.sizes if k not in keys), None)):
                self.used -= self.sizes.pop(victim)
            if self.used + size > self.room:
                break
            self.sizes[segment.key] = size
            self.used += size
        for segment in reversed(whole):
            if segment.key in self.sizes:
                cold = self.way == "cold" and segment in new and segment.end - segment.start < CHUNK
                self.sizes.move_to_end(segment.key, last=not cold)


def hit(prompts: Prompts, room: int, way: str) -> int:
    setup = SETUPS["chunked 256, no tails" if way == "no tails" else "chunked 256"]
    with closing(Engine.open(config(setup), SPEC)) as engine:
        store = Store(room, way)
        return sum(store.serve(engine, prompt) for prompt in prompts)


def main() -> None:
    print("| traffic | room, tokens | " + " | ".join(WAYS) + " |")
    print("|---|---:|" + "---:|" * len(WAYS))
    for name in WORKLOADS:
        places.cache_clear()
        prompts = tensors(name)
        total, shared = possible(prompts)
        for part in ROOMS if shared > total // 100 else ():
            room = int((total - shared) * part)
            row = [f"{hit(prompts, room, way) / total:.1%}" for way in WAYS]
            print(f"| {name} | {room:,} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
