"""Warming: the KV of prompts that will be asked for comes into memory before anybody asks. For a server's start-up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvloom import ChunkKey, ConfigError, Engine, Segment, text_of

MOST_BYTES = 256 << 20
"""Largest size of a file of prompts, which is read whole."""

Tokenizer = Callable[[str], Sequence[int]]
"""Text to token ids."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a file of prompts: tokens, or the key of one chunk."""

    line: int
    tokens: torch.Tensor | None = None
    salt: str | None = None
    """None for the configuration's."""
    key: ChunkKey | None = None


@dataclass(frozen=True, slots=True)
class Warmed:
    """The result of one line."""

    line: int
    """The line's number in the file, from 1."""
    tokens: int
    """Tokens of the prompt, or of a key's chunk; 0 if no tier has it."""
    warm_tokens: int
    """Number of leading tokens that are in memory now."""
    pinned_tokens: int


def warm(
    engine: Engine, file: str | Path, *, pin: bool = False, tokenizer: str | Tokenizer | None = None
) -> list[Warmed]:
    """Bring the chunks of the prompts in `file` from the lower tiers into memory; what is there in the end, per line.

    A line is `{"tokens": [...]}` or `{"text": "..."}`, both with an optional `"salt"`, a list of token ids, or the key
    of one chunk. What no tier holds is passed over. Where memory is too small for all, the last lines are in it, with
    `pin` the first.

    pin: keep them there until `unpin`, `remove` or the end. tokenizer: for text, a function or what transformers'
    AutoTokenizer takes. Raises ConfigError for a file that is not like this, and for an engine without a memory tier.
    """
    memory = engine.memory
    if memory is None:
        raise ConfigError("tiers", "no memory tier, so that there is nothing to warm; add one in front")
    found = []
    for prompt in read_prompts(Path(file), tokenizer):
        segments = _brought(engine, memory, prompt)
        keys = [segment.key for segment in segments]
        pinned = [memory.pin([key], True) for key in keys] if pin else [0] * len(keys)
        found.append((prompt, segments, pinned))
    return [
        Warmed(
            prompt.line,
            prompt.tokens.numel() if prompt.tokens is not None else sum(s.end - s.start for s in segments),
            _leading(segments, memory.find([segment.key for segment in segments]))
            if prompt.tokens is None
            else engine.lookup(prompt.tokens, [memory.name], salt=prompt.salt).tokens,
            sum(segment.end - segment.start for segment, one in zip(segments, pinned, strict=True) if one),
        )
        for prompt, segments, pinned in found
    ]


def read_prompts(file: Path, tokenizer: str | Tokenizer | None = None) -> Iterator[Prompt]:
    """The lines of a file of prompts. Raises ConfigError with the line of what is none."""
    try:
        lines = _lines(text_of(file, MOST_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    encode = _loaded(tokenizer) if isinstance(tokenizer, str) else tokenizer
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _prompt(number, line.strip(), encode)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{file}:{number}", str(error)) from None
            except RecursionError:
                raise ConfigError(f"{file}:{number}", "JSON is nested too deeply") from None


def _lines(text: str) -> list[str]:
    """One prompt each. A file that is one JSON list, as `kvloom why` takes it, is one prompt however it is broken."""
    if text.lstrip().startswith("["):
        try:
            return [json.dumps(json.loads(text))]
        except (ValueError, RecursionError):
            pass  # a list in each line, or none
    return text.split("\n")  # JSON may have other ends of lines within a text


def _prompt(number: int, line: str, encode: Tokenizer | None) -> Prompt:
    if line.startswith("["):
        line = f'{{"tokens": {line}}}'
    if not line.startswith("{"):
        try:
            return Prompt(number, key=ChunkKey.parse(line))
        except ValueError:
            raise ValueError(f'not a chunk key: {line[:80]!r}; a prompt is JSON, such as {{"text": "..."}}') from None
    fields = json.loads(line)
    unknown = fields.keys() - {"tokens", "text", "salt"}
    if unknown or ("tokens" in fields) == ("text" in fields):
        raise ValueError('expected {"tokens": [...]} or {"text": "..."}, and perhaps "salt"')
    salt = fields.get("salt")
    if salt is not None and not isinstance(salt, str):
        raise TypeError(f"salt: expected text, got {salt!r}")
    tokens = fields.get("tokens")
    if "text" in fields:
        if encode is None:
            raise ValueError("text needs a tokenizer: name one, or give tokens")
        if not isinstance(fields["text"], str):
            raise TypeError(f"text: expected text, got {fields['text']!r}")
        tokens = list(encode(fields["text"]))
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise ValueError("tokens: expected a list of token ids")
    return Prompt(number, torch.tensor(tokens, dtype=torch.int32), salt)


def _loaded(name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises whatever its parts raise
        text = str(error).strip().splitlines()
        raise ConfigError("tokenizer", f"cannot load {name!r}: {text[0] if text else type(error).__name__}") from error

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer(text)["input_ids"]
        return ids

    return encode


def _brought(engine: Engine, memory: Any, prompt: Prompt) -> list[Segment]:
    """The segments of a line, once what the tiers hold of them has come into memory."""
    if prompt.tokens is not None:
        engine.prefetch(prompt.tokens, salt=prompt.salt).result()
        return engine.segments(prompt.tokens, salt=prompt.salt)
    key = prompt.key
    assert key is not None
    if key.namespace.partition("/")[0] != engine.fingerprint:
        return []  # another model's, of another shape
    for tier in engine.tiers.values():
        num_tokens = _num_tokens(memory, key)
        if num_tokens:
            return [Segment(0, num_tokens, key)]
        if tier is not memory and tier.contains(key):
            tier.get(key)
    num_tokens = _num_tokens(memory, key)
    return [Segment(0, num_tokens, key)] if num_tokens else []


def _num_tokens(memory: Any, key: ChunkKey) -> int:
    """The length of a chunk in memory, in tokens; 0 if it is not there."""
    (loaded,) = memory.lease([key])
    if loaded is None:
        return 0
    num_tokens: int = loaded.chunk.num_tokens
    loaded.release()
    return num_tokens


def _leading(segments: Iterable[Segment], held: Iterable[bool]) -> int:
    """Tokens from the first segment on that are held without a gap."""
    count = 0
    for segment, here in zip(segments, held, strict=True):
        if not here:
            break
        count += segment.end - segment.start
    return count
