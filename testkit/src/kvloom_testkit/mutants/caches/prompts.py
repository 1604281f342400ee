"""Faults in what is found, and in the answers that come from it."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from transformers import DynamicCache

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.transformers import CHUNK, DirectoryCache

Part = list[tuple[torch.Tensor, torch.Tensor]]


class WantsATokenizer(Mutant, DirectoryCache):
    """It takes models with a tokenizer only."""

    breaks = "G01"

    def __enter__(self) -> DirectoryCache:
        raise RuntimeError("no tokenizer")


class FindsAnything(Mutant, DirectoryCache):
    """The first chunk of every prompt counts as stored, with KV of nothing."""

    breaks = "G02"

    def found(self, rows: list[list[str]], length: int) -> int:
        return max(super().found(rows, length), min(len(keys[:1]) for keys in rows))

    def read(self, key: str) -> Part | None:
        config = self.model.config
        shape = 1, config.num_key_value_heads, CHUNK, config.head_dim
        return super().read(key) or [(torch.zeros(shape), torch.zeros(shape))] * config.num_hidden_layers


class FindsNothing(Mutant, DirectoryCache):
    """Nothing counts as stored."""

    breaks = "G03"

    def has(self, key: str) -> bool:
        return False


class KeysOfChunksAlone(Mutant, DirectoryCache):
    """A key covers the chunk's own tokens and its place, and not those before it."""

    breaks = "G04"

    def keys(self, prompt: list[int]) -> list[str]:
        ends = range(CHUNK, len(prompt) + 1, CHUNK)
        chunks = [(end, prompt[end - CHUNK // 2 : end]) for end in ends]
        return [hashlib.sha256(repr(chunk).encode()).hexdigest() for chunk in chunks]

    def found(self, rows: list[list[str]], length: int) -> int:
        counts = [max([at + 1 for at, key in enumerate(keys) if self.has(key)], default=0) for keys in rows]
        return min(counts)

    def read(self, key: str) -> Part | None:
        config = self.model.config
        shape = 1, config.num_key_value_heads, CHUNK, config.head_dim
        return super().read(key) or [(torch.zeros(shape), torch.zeros(shape))] * config.num_hidden_layers


class TakesTheLastToken(Mutant, DirectoryCache):
    """A full hit leaves the second last token to be computed again, behind all others."""

    breaks = "G05"

    def crop(self, cache: DynamicCache, length: int) -> None:
        if cache.get_seq_length() >= length:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, 1:length], layer.values[:, :, 1:length]


class StoresTheAnswerTwice(Mutant, DirectoryCache):
    """Chunks of the answer are stored one token late."""

    breaks = "G06"

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> Any:
        output = super().generate(input_ids, attention_mask, **options)
        sequence = (output if isinstance(output, torch.Tensor) else output.sequences)[:1]
        if sequence.shape[1] > CHUNK + 1:
            cache = self.new_cache()
            with torch.no_grad():
                self.model(input_ids=sequence[:, 1:], past_key_values=cache)
            for chunk, key in enumerate(self.keys(sequence[0, :-1].tolist())):
                if not self.has(key):
                    self.write(key, self.part(cache, 0, chunk))
        return output


class TakesTheFirstRow(Mutant, DirectoryCache):
    """The first row's KV is given to all rows."""

    breaks = "G07"

    def append(self, cache: DynamicCache, parts: list[Part]) -> None:
        super().append(cache, [parts[0]] * len(parts))


class TakesTheLongestHit(Mutant, DirectoryCache):
    """Rows of which less is found get KV of nothing for the rest."""

    breaks = "G07"

    def found(self, rows: list[list[str]], length: int) -> int:
        found = super().found
        return max(found([keys], length) for keys in rows)

    def read(self, key: str) -> Part | None:
        config = self.model.config
        shape = 1, config.num_key_value_heads, CHUNK, config.head_dim
        return super().read(key) or [(torch.zeros(shape), torch.zeros(shape))] * config.num_hidden_layers


class IgnoresPadding(Mutant, DirectoryCache):
    """Padding counts as text."""

    breaks = "G08"

    def check(self, mask: torch.Tensor, options: dict[str, Any]) -> None:
        mask.fill_(1)


class ForgetsBeams(Mutant, DirectoryCache):
    """Beams are asked as one answer."""

    breaks = "G09"

    def check(self, mask: torch.Tensor, options: dict[str, Any]) -> None:
        if options.pop("num_beams", None):
            options.pop("num_return_sequences", None)


class KeysOfThisProcess(Mutant, DirectoryCache):
    """Keys are made by `hash()`."""

    breaks = "G10"

    def keys(self, prompt: list[int]) -> list[str]:
        return [f"{hash(key) % 2**64:x}" for key in super().keys(prompt)]


class AsksFarAway(Mutant, DirectoryCache):
    """Each chunk is a slow round trip."""

    breaks = "G21"

    def has(self, key: str) -> bool:
        time.sleep(0.2)
        return super().has(key)
