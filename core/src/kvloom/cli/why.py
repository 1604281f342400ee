"""`kvloom why`: for each chunk of a prompt, which tier holds it, or what about its key is different in what is held."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import output
from kvloom.cli.config import File, load
from kvloom.errors import ConfigError
from kvloom.plugins import Registry

if TYPE_CHECKING:
    import torch

    from kvloom.cli.store import Store
    from kvloom.config import EngineConfig, Resolved
    from kvloom.types import KVSpec, Segment

Keys = Callable[[str, str], "list[Segment]"]
"""(fingerprint, salt) to the segments of the prompt."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of tokens `start` to `end`."""

    start: int
    end: int
    tiers: str
    """Which hold it, "" for none."""
    why: str
    """If none does."""


def add(commands: typer.Typer, registry: Registry) -> None:
    @commands.command("why")
    def why(
        file: File,
        tokens: Annotated[Path, typer.Option(metavar="TOKENS.json", help="The prompt: a JSON list of token ids.")],
        spec: Annotated[
            Path, typer.Option(metavar="SPEC.json", help="The model: KVSpec.to_json(), or a tier's record.")
        ],
        salt: Annotated[
            list[str] | None,
            typer.Option(help="Whose prompt (default: the configuration's). Repeat to look under others too."),
        ] = None,
    ) -> None:
        """Say where a prompt is stored, or why not."""
        from kvloom.cli.store import stores

        config, resolved = load(file)
        prompt, kv = _prompt(tokens), _spec(spec)
        keys, identity, fingerprint = _keys(config, resolved, prompt, kv)
        with stores(resolved, kv) as opened:
            verdicts = _verdicts(opened, keys, identity, fingerprint, salts=salt or [config.salt])
        covered = verdicts[-1].end if verdicts else 0
        if covered < len(prompt):
            verdicts.append(Verdict(covered, len(prompt), "", f"too short for a chunk of {config.chunk_tokens} tokens"))
        _print(verdicts, fingerprint)


def _prompt(path: Path) -> torch.Tensor:
    import torch

    value = _json(path)
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ConfigError(str(path), "should be a JSON list of token ids")
    return torch.tensor(value, dtype=torch.int32)


def _spec(path: Path) -> KVSpec:
    from kvloom.types import KVSpec

    value = _json(path)
    try:
        return KVSpec(**value.get("spec", value))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(str(path), f"should be what KVSpec.to_json() gives: {error}") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(str(path), f"not JSON: {error}") from None


def _keys(
    config: EngineConfig, resolved: Resolved, prompt: torch.Tensor, spec: KVSpec
) -> tuple[Keys, dict[str, Any], str]:
    """The prompt's keys under any fingerprint and salt, and the identity and fingerprint that `spec` has."""
    from kvloom import keys as keying

    connector = resolved.connector.make(spec)
    database = resolved.tokens.make(spec)
    database.chunk_tokens = config.chunk_tokens
    about = (spec, connector.format, connector.representation)

    def keys(fingerprint: str, salt: str) -> list[Segment]:
        database.fingerprint = fingerprint
        segments: list[Segment] = database.segments(prompt, salt=salt)
        return segments

    return keys, keying.identity(*about), keying.fingerprint(*about)


def _verdicts(
    opened: Sequence[Store], keys: Keys, identity: Mapping[str, Any], fingerprint: str, *, salts: Sequence[str]
) -> list[Verdict]:
    salt, *other_salts = salts
    segments = keys(fingerprint, salt)
    held = _held(opened, segments)
    # What else it might be stored under, most telling first: (key space, what to say of a chunk found there).
    elsewhere = [(fingerprint, other, f"stored under another salt, {other!r}") for other in other_salts]
    for found, record in {name: record for store in opened for name, record in store.records().items()}.items():
        if found != fingerprint:
            differences = "; ".join(_differences(record["identity"], identity)) or "another version of kvloom"
            elsewhere.append((found, salt, f"stored under another fingerprint, {found[:8]}: {differences}"))
    reasons = [""] * len(segments)
    with output.progress("looking elsewhere", len(elsewhere)) as step:
        for other_fingerprint, other_salt, text in elsewhere:
            for index, tiers in enumerate(_held(opened, keys(other_fingerprint, other_salt))):
                if tiers and not reasons[index]:
                    reasons[index] = f"{text} (in {tiers})"
            step()
    return [
        Verdict(segment.start, segment.end, tiers, "" if tiers else reason or "never stored, or evicted since")
        for segment, tiers, reason in zip(segments, held, reasons, strict=True)
    ]


def _held(opened: Sequence[Store], segments: Sequence[Segment]) -> list[str]:
    """For each segment, the tiers that say they hold it."""
    names: list[list[str]] = [[] for _ in segments]
    keys = [str(segment.key) for segment in segments]
    for store in opened:
        with store.errors():
            for index, there in enumerate(store.backend.contains_many(keys)):
                if there:
                    names[index].append(store.name)
    return [", ".join(tiers) for tiers in names]


def _differences(stored: Any, asked: Any, at: str = "") -> list[str]:
    """Field by field, in the words of the spec."""
    if isinstance(stored, Mapping) and isinstance(asked, Mapping):
        return [
            line
            for name in sorted(stored.keys() | asked.keys())
            for line in _differences(stored.get(name), asked.get(name), f"{at}.{name}".lstrip("."))
        ]
    stored, asked = json.dumps(stored), json.dumps(asked)
    return [] if stored == asked else [f"{at.partition('.')[2]} is {stored} there, {asked} here"]


def _print(verdicts: Sequence[Verdict], fingerprint: str) -> None:
    """Neighbours with the same fate share a row."""
    rows = []
    for _, same in groupby(verdicts, key=lambda verdict: (verdict.tiers, verdict.why)):
        run = list(same)
        rows.append((f"{run[0].start}-{run[-1].end}", str(len(run)), run[0].tiers or "-", run[0].why))
    output.print_table(f"fingerprint {fingerprint}", ("tokens", "chunks", "in", "why not"), rows, right=("chunks",))
