"""Real text that every Python has: its language reference, and the source of its library."""

from __future__ import annotations

import ast
import os
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from kvloom import KVLoomError

LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "msilib"}
CONTINUATION = 257
"""Tokens after the context of a window: 256 are predicted."""
_PARAGRAPH_CHARACTERS = (120, 700)
_FUNCTION_CHARACTERS = (120, 900)
_SUMMARY_CHARACTERS = (20, 100)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the standard library whose name says nothing."""

    source: str
    """Without its docstring, and with `NAME` in place of its name."""
    summary: str
    """The first line of its docstring."""


NAME = "function_name"


@cache
def standard_library() -> tuple[tuple[Path, bool], ...]:
    """Each file of source, and whether models of this repository were kept from seeing it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT
        for file in files:
            if file.endswith(".py") and file not in LEFT_OUT and not file.startswith("_sysconfigdata"):
                found.append(Path(folder, file))
    return tuple((path, zlib.crc32(str(path.relative_to(root)).encode()) % 20 == 0) for path in sorted(found))


def _source(path: Path) -> str:
    return path.read_text(errors="replace")


@cache
def paragraphs() -> tuple[str, ...]:
    """Prose of Python's language reference, a paragraph on a line. Raises KVLoomError if this Python has none."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise KVLoomError("this Python lacks pydoc_data, the text of its documentation; use another build") from None
    found = []
    for _, topic in sorted(topics.items()):
        for block in topic.split("\n\n"):
            line = " ".join(block.split())
            least, most = _PARAGRAPH_CHARACTERS
            if not block.startswith(" ") and least <= len(line) <= most and line[0].isalpha() and line.endswith("."):
                found.append(line)
    return tuple(dict.fromkeys(found))


@cache
def functions() -> tuple[Function, ...]:
    """Functions with a summary that does not name them, without duplicates."""
    found = {}
    for path, _ in standard_library()[::3]:
        for node in ast.walk(ast.parse(_source(path))):
            if isinstance(node, ast.FunctionDef) and (made := _function(node)):
                found[made.summary] = made
    return tuple(found.values())


def _function(node: ast.FunctionDef) -> Function | None:
    summary = (ast.get_docstring(node) or "").split("\n")[0]
    least, most = _SUMMARY_CHARACTERS
    if not (least <= len(summary) <= most and summary.endswith(".") and summary[0].isupper()):
        return None
    if len(node.name) < 4 or node.name.lower() in summary.lower().replace(" ", "_"):
        return None
    bare = ast.FunctionDef(**{**vars(node), "body": node.body[1:], "decorator_list": []})
    source = re.sub(rf"\b{re.escape(node.name)}\b", NAME, ast.unparse(bare))
    least, most = _FUNCTION_CHARACTERS
    return Function(source, summary) if node.body[1:] and least <= len(source) <= most else None


def windows(tokenizer: PreTrainedTokenizerBase, *, context: int, most: int) -> torch.Tensor:
    """Windows of held-out source at even distances, `[windows, context + CONTINUATION]`, `most` at most."""
    return spread(_tokens(tokenizer, held_out=True), context + CONTINUATION, most)


def calibration_windows(tokenizer: PreTrainedTokenizerBase, *, length: int, most: int) -> torch.Tensor:
    """Windows of other files, `[windows, length]`, `most` at most."""
    return spread(_tokens(tokenizer, held_out=False), length, most)


def _files(*, held_out: bool) -> list[Path]:
    paths = [path for path, held in standard_library() if held is held_out]
    return paths if held_out else paths[::7]


def _tokens(tokenizer: PreTrainedTokenizerBase, *, held_out: bool) -> list[int]:
    return [
        token
        for path in _files(held_out=held_out)
        for token in tokenizer(_source(path), add_special_tokens=False, verbose=False).input_ids
    ]


def spread(stream: list[int], length: int, most: int) -> torch.Tensor:
    """Windows at even distances that do not overlap, `[windows, length]`, `most` at most."""
    count = min(most, len(stream) // length)
    distance = len(stream) // max(1, count)
    return torch.tensor([stream[at * distance : at * distance + length] for at in range(count)]).view(count, length)


def some_paragraphs(chance: random.Random) -> Iterator[str]:
    """All paragraphs in order, from one drawn at random on."""
    every = paragraphs()
    start = chance.randrange(len(every))
    yield from every[start:]
    yield from every[:start]
