"""Text to calibrate on, and text that is kept from it to judge by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_HELD_OUT = 0.2
"""The last part of each file, which is used for judging only."""
_CHARACTERS_PER_TOKEN = 64
"""Maximum number of characters read of a file for each token that is wanted of it."""


def read(files: Sequence[Path], *, tokens: int) -> tuple[list[str], list[str]]:
    """Split each file into a part to calibrate on and a part to test on. Raises OSError, or ValueError for a file that
    is not text."""
    ours, theirs = [], []
    for file in files:
        try:
            with file.open(encoding="utf-8") as stream:
                text = stream.read(_CHARACTERS_PER_TOKEN * tokens)
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not a text in UTF-8") from None
        cut = round(len(text) * (1 - _HELD_OUT))
        ours.append(text[:cut])
        theirs.append(text[cut:])
    return ours, theirs


def windows(tokenizer: Any, texts: Sequence[str], *, length: int, count: int) -> torch.Tensor:
    """At most `count` windows of token ids `[windows, length]`, spread over the texts evenly.

    Each starts as a prompt does, with what the tokenizer puts before the first token.
    """
    start = tokenizer("").input_ids
    rows = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        step = length - len(start)
        rows += [start + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)]
    chosen = [rows[at * len(rows) // count] for at in range(count)] if len(rows) > count else rows
    return torch.tensor(chosen, dtype=torch.int64).view(-1, length)
