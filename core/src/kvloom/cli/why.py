"""`kvloom why`: for each chunk of a prompt, which tier holds it, or what about its key is different in what is held.

Or, without a prompt: what distinguishes a fingerprint from the others on the tiers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import output
from kvloom.cli.config import File, load
from kvloom.cli.model import Keys, read_json, read_spec
from kvloom.errors import ConfigError
from kvloom.plugins import Registry

if TYPE_CHECKING:
    import torch

    from kvloom.cli.store import Store
    from kvloom.types import Segment


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
        tokens: Annotated[
            Path | None, typer.Option(metavar="TOKENS.json", help="The prompt: a JSON list of token ids.")
        ] = None,
        spec: Annotated[
            Path | None, typer.Option(metavar="SPEC.json", help="The model: KVSpec.to_json(), or a tier's record.")
        ] = None,
        salt: Annotated[
            list[str] | None,
            typer.Option(help="Whose prompt (default: the configuration's). Repeat to look under others too."),
        ] = None,
        fingerprint: Annotated[
            str | None,
            typer.Option(help="Instead of a prompt: how this fingerprint differs from the others on the tiers."),
        ] = None,
    ) -> None:
        """Say where a prompt is stored, or why not; or what a fingerprint has of its own."""
        from kvloom.cli.store import stores

        config, resolved = load(file)
        if fingerprint is not None:
            with stores(resolved, None) as opened:
                _print_differences(opened, fingerprint)
            return
        if tokens is None or spec is None:
            raise ConfigError(
                "--tokens", "give a prompt and a spec (--tokens, --spec), or a fingerprint (--fingerprint)"
            )
        prompt, kv = _prompt(tokens), read_spec(spec)
        keys = Keys(config, resolved, kv)
        with stores(resolved, kv) as opened:
            verdicts = _verdicts(opened, keys, prompt, salts=salt or [config.salt])
        covered = verdicts[-1].end if verdicts else 0
        if covered < len(prompt):
            verdicts.append(Verdict(covered, len(prompt), "", f"too short for a chunk of {config.chunk_tokens} tokens"))
        _print(verdicts, keys.fingerprint)


def _prompt(path: Path) -> torch.Tensor:
    import torch

    value = read_json(path)
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ConfigError(str(path), "should be a JSON list of token ids")
    return torch.tensor(value, dtype=torch.int32)


def _verdicts(opened: Sequence[Store], keys: Keys, prompt: torch.Tensor, *, salts: Sequence[str]) -> list[Verdict]:
    salt, *other_salts = salts
    fingerprint = keys.fingerprint
    segments = keys.segments(prompt, salt)
    held = _held(opened, segments)
    # What else it might be stored under, most telling first: (key space, what to say of a chunk found there).
    elsewhere = [(fingerprint, other, f"stored under another salt, {other!r}") for other in other_salts]
    for found, record in {name: record for store in opened for name, record in store.records().items()}.items():
        if found != fingerprint:
            differences = "; ".join(_differences(record["identity"], keys.identity)) or "another version of kvloom"
            elsewhere.append((found, salt, f"stored under another fingerprint, {found[:8]}: {differences}"))
    reasons = [""] * len(segments)
    with output.progress("looking elsewhere", len(elsewhere)) as step:
        for other_fingerprint, other_salt, text in elsewhere:
            for index, tiers in enumerate(
                _held(opened, keys.segments(prompt, other_salt, fingerprint=other_fingerprint))
            ):
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
        backend = store.backend
        for index, there in enumerate(store.ask(lambda backend=backend: backend.contains_many(keys))):  # type: ignore[misc]
            if there:
                names[index].append(store.name)
    return [", ".join(tiers) for tiers in names]


def _print_differences(opened: Sequence[Store], asked: str) -> None:
    """The other fingerprints of which the tiers have records. ConfigError if there is none of `asked`."""
    records = {name: record for store in opened for name, record in store.records().items()}
    known = [name for name in records if name.startswith(asked)]
    if len(known) != 1:
        found = ", ".join(sorted(records)) or "none"
        raise ConfigError("--fingerprint", f"{len(known)} records begin with {asked!r}; the tiers have {found}")
    mine = records.pop(known[0])
    rows = [
        (name, record["spec"].get("model", ""), "; ".join(_differences(record["identity"], mine["identity"])))
        for name, record in sorted(records.items())
    ]
    output.print_table(f"fingerprint {known[0]}", ("other", "model", "differs in"), rows)


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
