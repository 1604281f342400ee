"""Texts that come with Python: what modules of its library say of themselves."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MODULES = ("statistics", "configparser", "csv", "itertools", "json", "shelve")
_MOST_CHARACTERS = 1 << 24
"""Longest file of documents; each document is computed whole."""
QUESTIONS = (
    "The statistics module provides functions for",
    "To write rows to a file, use csv.",
    "A shelf is a persistent",
    "An iterator that never ends comes from itertools.",
)


def module_texts() -> list[str]:
    """Raises ValueError where this Python has no documentation in it (`python -OO`)."""
    texts = [inspect.getdoc(importlib.import_module(name)) or "" for name in MODULES]
    if not all(texts):
        raise ValueError("this Python carries no documentation (-OO, or PYTHONOPTIMIZE=2); give a file")
    return texts


def read_texts(path: Path) -> list[str]:
    """Documents of a file, between blank lines. Raises ValueError unless it is text, and short enough for a demo."""
    try:
        with path.open(encoding="utf-8") as file:
            content = file.read(_MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None
    if len(content) > _MOST_CHARACTERS:
        raise ValueError(f"{path} has more than {_MOST_CHARACTERS:,} characters; give a part of it")
    paragraphs = content.replace("\r\n", "\n").split("\n\n")
    return [text for part in paragraphs if (text := part.strip())]


def tokenized(tokenizer: Any, texts: Sequence[str], *, most_tokens: int) -> list[torch.Tensor]:
    """Token ids of each text, truncated, 1-D; texts without tokens are left out."""
    ids = [tokenizer.encode(text, add_special_tokens=False)[:most_tokens] for text in texts]
    return [torch.tensor(one) for one in ids if one]


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before every prompt: mostly one, or none."""
    with_special, without = (tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
    return list(with_special[: len(with_special) - len(without)]) if with_special[-len(without) :] == without else []
