"""A model for the verbs: the spec of its KV, from a file or a store's records, and the keys of its prompts."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom import ConfigError, output, text_of

MOST_BYTES = 64 << 20
"""Largest size of a file with a prompt or a spec."""

if TYPE_CHECKING:
    import torch

    from kvloom import EngineConfig, KVLoomError, KVSpec, Segment
    from kvloom.inspection import Resolved, Store


class Keys:
    """The keys that a configuration gives to the KV of a model."""

    def __init__(self, config: EngineConfig, resolved: Resolved, spec: KVSpec) -> None:
        import kvloom
        from kvloom import inspection

        connector = resolved.connector.make(spec)
        about = (spec, connector.format, connector.representation)
        self.spec = spec
        self.identity: dict[str, Any] = inspection.identity(*about)
        self.fingerprint = kvloom.fingerprint(*about)
        self.chunk_tokens = config.chunk_tokens
        self._salt = config.salt
        self._save_tails = config.save_tails
        self._make = resolved.tokens.make
        self._database = self._opened(self.fingerprint)

    def _opened(self, fingerprint: str) -> Any:
        database = self._make(self.spec)
        database.chunk_tokens, database.save_tails = self.chunk_tokens, self._save_tails
        database.fingerprint = fingerprint
        return database

    def close(self) -> None:
        """Let go what the token database holds, such as files."""
        self._database.close()

    def segments(
        self, tokens: torch.Tensor, salt: str | None = None, *, fingerprint: str | None = None
    ) -> list[Segment]:
        """The segments of a prompt, under this fingerprint and the configuration's salt unless others are given."""
        database = self._database if fingerprint is None else self._opened(fingerprint)
        try:
            found: list[Segment] = database.segments(tokens, salt=self._salt if salt is None else salt)
        finally:
            if database is not self._database:
                database.close()
        return found

    def spans(self) -> list[tuple[int, int]]:
        """Starts and ends, within a chunk, of the segments that are kept of it: of its pieces, and its own."""
        import torch

        tokens = torch.zeros(self.chunk_tokens, dtype=torch.int32)
        found = (*self._database.pieces(tokens, 0), *self._database.segments(tokens))
        return [(segment.start, segment.end) for segment in found]

    def pieces(self, tokens: torch.Tensor, start: int, salt: str | None = None) -> list[Segment]:
        """The pieces that shorter prompts may have left of the segment that begins at `start`."""
        found: list[Segment] = self._database.pieces(tokens, start, salt=self._salt if salt is None else salt)
        return found


def read_json(path: Path) -> Any:
    """Raises ConfigError with the path."""
    try:
        return json.loads(text_of(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(str(path), f"not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(str(path), "JSON is nested too deeply") from None


def tokenized(text: Path, tokenizer: str) -> list[int]:
    """As the model's own tokenizer has it, with what it puts in front. Nothing is downloaded."""
    try:
        content = text_of(text, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(str(text), f"cannot be read: {reason}") from None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer", "transformers is not installed; pip install transformers, or give token ids"
        ) from None
    try:
        ids: list[int] = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)(content)["input_ids"]
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError("--tokenizer", f"{tokenizer!r} cannot be loaded from here: {reason}") from None
    return ids


def read_spec(path: Path) -> KVSpec:
    """The spec in a file: what `KVSpec.to_json()` gives, or a tier's record. Raises ConfigError with the path."""
    value = read_json(path)
    try:
        return spec_from(value.get("spec", value) if isinstance(value, dict) else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(path), f"should be what KVSpec.to_json() gives: {error}") from None


def spec_from(value: Any) -> KVSpec:
    """From its fields. Raises ValueError or TypeError that names the one that is wrong."""
    from kvloom import KVSpec

    if not isinstance(value, dict):
        raise TypeError(f"it is a {type(value).__name__}, not an object with a field for each property")
    known = {one.name: one for one in fields(KVSpec)}
    if strangers := [name for name in value if name not in known]:
        raise ValueError(f"unknown field {strangers[0]!r}")
    needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    if lacking := [name for name in needed if name not in value]:
        raise ValueError(f"no field {lacking[0]!r}")
    return KVSpec(**value)


def recorded(
    opened: list[Store], config: EngineConfig, resolved: Resolved, failed: dict[str, KVLoomError], *,
    model: str | None = None,
) -> list[Keys]:  # fmt: skip
    """The model of which the tiers have records that this configuration could have made: every rank of it.

    failed: see `answers`. model: its name, where there are several. Raises ConfigError if there is none, or more than
    one; the error of a tier that failed if none is left.
    """
    found: dict[str, Keys] = {}
    for fingerprint, record in records_of(opened, failed).items():
        keys = _made_of(config, resolved, record["spec"])
        if keys is not None and keys.fingerprint == fingerprint and model in (None, keys.spec.model):
            found[fingerprint] = keys
    if not opened and failed:
        raise next(reversed(failed.values()))
    if not found:
        about = f"of {model!r} " if model else ""
        raise ConfigError("--spec", f"no tier has a record {about}that this configuration could have made; give a spec")
    if len({replace(keys.spec, rank=0).to_json() for keys in found.values()}) > 1:
        names = sorted({f"{keys.spec.model} {keys.spec.revision}".strip() for keys in found.values()})
        raise ConfigError("--spec", f"the tiers hold KV of several: {', '.join(names)}; give the spec of one")
    return sorted(found.values(), key=lambda keys: keys.spec.rank)


def records_of(opened: list[Store], failed: dict[str, KVLoomError]) -> dict[str, dict[str, Any]]:
    """The records of all tiers, by fingerprint; says which tiers have some that are not read. failed: see `answers`."""
    from kvloom_tools.stores import answers

    found: dict[str, dict[str, Any]] = {}
    for store, records in answers(opened, failed, lambda store: store.records()):
        say_not_read(store.name, records.left_out)
        found.update(records)
    return found


def say_not_read(tier: str, records: int) -> None:
    """Say how many records of a tier are not read, if any."""
    if records:
        text = f"{records} records of models are not read: they are too long, or there are too many before them"
        output.say(f"kvloom: tier {tier}: {text}", stderr=True)


def _made_of(config: EngineConfig, resolved: Resolved, spec: dict[str, Any]) -> Keys | None:
    from kvloom import KVSpec

    try:
        return Keys(config, resolved, KVSpec(**spec))
    except (TypeError, ValueError):
        return None  # of a later version, or of another connector
