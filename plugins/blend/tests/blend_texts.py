"""Texts, and a tokenizer that needs no file."""

from __future__ import annotations

import torch


class Letters:
    """A tokenizer of letters, with a token that begins every prompt if it is asked for."""

    def __init__(self, *, begins: bool = True) -> None:
        self.begins = begins

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * (add_special_tokens and self.begins) + [10 + ord(letter) % 400 for letter in text]

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(chr(int(token) - 10) for token in tokens if token >= 10)


TEXTS = [f"{name} is told of in {number * 7919} words, and in {number} more." for number, name in enumerate("ABCD", 3)]
