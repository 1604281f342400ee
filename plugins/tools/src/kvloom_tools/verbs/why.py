"""`kvloom why`: what became of each chunk of a prompt. The looking is in `kvloom_tools.fates`.

Or, without a prompt: what distinguishes a fingerprint from the others on the tiers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import ConfigError, output
from kvloom_tools.configuration import File, load
from kvloom_tools.model import Keys, read_json, read_spec, recorded, records_of, tokenized
from kvloom_tools.stores import reachable, say_left_out

if TYPE_CHECKING:
    import torch

    from kvloom_tools.fates import Fate

_NO_PROMPT = "give a prompt (--tokens, or --text and --tokenizer), or a fingerprint (--fingerprint)"


def add(commands: typer.Typer) -> None:
    @commands.command("why", short_help="Show where each chunk of a prompt is, or why it is missing.")
    def why(
        file: File,
        tokens: Annotated[
            Path | None, typer.Option(metavar="TOKENS.json", help="The prompt: a JSON list of token ids.")
        ] = None,
        text: Annotated[Path | None, typer.Option(metavar="PROMPT.txt", help="The prompt: a text file.")] = None,
        tokenizer: Annotated[
            str | None, typer.Option(help="For --text: a model's directory, or its name in the hub's cache.")
        ] = None,
        spec: Annotated[
            Path | None,
            typer.Option(metavar="SPEC", help="The model's: KVSpec.to_json(), or a tier's record (default: the one)."),
        ] = None,
        salt: Annotated[
            list[str] | None,
            typer.Option(help="Salt of the prompt (default: the configuration's). Repeatable."),
        ] = None,
        salts: Annotated[
            Path | None,
            typer.Option(metavar="SALTS.json", help="A JSON list of salts: other users may see a command's words."),
        ] = None,
        verify: Annotated[bool, typer.Option("--verify", help="Read every blob and check it.")] = False,
        fingerprint: Annotated[
            str | None,
            typer.Option(help="Instead of a prompt: compare this fingerprint with the others on the tiers."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Say of each chunk of a prompt where it is stored, or why not: evicted, expired, corrupt, another's ..."""
        from kvloom_tools.fates import GONE, NEVER, Question, chunk_tokens_of, fates, left_of

        config, resolved = load(file)
        if fingerprint is not None:
            if any((tokens, text, tokenizer, spec, salt, salts, verify)):
                raise ConfigError("--fingerprint", "goes with --json alone; leave out what is said of a prompt")
            with ExitStack() as stack:
                opened, failed = reachable(resolved, None, stack, made=False)
                records = records_of(opened, failed)
            say_left_out(failed)
            name, others = _others(records, fingerprint)
            if as_json:
                left_out = {tier: str(error) for tier, error in failed.items()}
                print(json.dumps({"fingerprint": name, "others": others, "left_out": left_out}, indent=2))
            else:
                _print_others(name, others)
            return
        prompt = _prompt(tokens, text, tokenizer)
        given = None if spec is None else read_spec(spec)
        wanted = (*(salt or ()), *(() if salts is None else _salts(salts))) or (config.salt,)
        with ExitStack() as stack:
            opened, failed = reachable(resolved, given, stack, made=False)
            keys = Keys(config, resolved, given) if given is not None else recorded(opened, config, resolved, failed)[0]
            stack.callback(keys.close)
            question = Question(keys, prompt, wanted, exact=config.exact, verify=verify)
            found = fates(opened, question, failed)
            opened = [store for store in opened if store.name not in failed]
            pieces = left_of(opened, question, found, failed)
            nowhere = bool(found) and found[0].verdict in (NEVER, GONE) and resolved.tokens.type == "chunked"
            there = chunk_tokens_of(opened, keys, failed) if nowhere and not pieces else None
        left_out = {name: str(error) for name, error in failed.items()}
        say_left_out(failed)
        if as_json:
            made = _as_json(found, pieces, keys, len(prompt))
            print(json.dumps({**made, "stored_chunk_tokens": there, "left_out": left_out}, indent=2))
        else:
            _print(found, pieces, keys, len(prompt), in_memory=len(opened) + len(failed) < len(resolved.tiers))
            if there not in (None, config.chunk_tokens):
                sizes = f"chunks of {there} tokens or more, and this configuration makes them of {config.chunk_tokens}"
                output.say(f"what the tiers hold of this model are {sizes} (chunk_tokens)")


# -- what is asked -----------------------------------------------------------------------------------------------------


def _prompt(tokens: Path | None, text: Path | None, tokenizer: str | None) -> torch.Tensor:
    import torch

    if (tokens is None) == (text is None):
        raise ConfigError("--tokens", _NO_PROMPT)
    if text is not None:
        if tokenizer is None:
            raise ConfigError("--tokenizer", "by which tokenizer does --text become tokens? name the model's")
        return torch.tensor(tokenized(text, tokenizer), dtype=torch.int32)
    assert tokens is not None
    value = read_json(tokens)
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ConfigError(str(tokens), "should be a JSON list of token ids")
    return torch.tensor(value, dtype=torch.int32)


def _salts(file: Path) -> list[str]:
    value = read_json(file)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(str(file), "should be a JSON list of salts")
    return value


# -- fingerprints ------------------------------------------------------------------------------------------------------


def _others(records: dict[str, dict[str, Any]], asked: str) -> tuple[str, list[dict[str, Any]]]:
    """The whole of a fingerprint that begins with `asked`, and the others of which the tiers have records.

    Raises ConfigError if there is not one record of it.
    """
    from kvloom_tools.fates import differences

    known = [name for name in records if name.startswith(asked)]
    if len(known) != 1:
        found = ", ".join(sorted(records)) or "none"
        raise ConfigError("--fingerprint", f"{len(known)} records begin with {asked!r}; the tiers have {found}")
    mine = records.pop(known[0])
    return known[0], [
        {
            "fingerprint": name,
            "model": record["spec"].get("model", ""),
            "differs_in": differences(record["identity"], mine["identity"]),
        }
        for name, record in sorted(records.items())
    ]


def _print_others(fingerprint: str, others: Sequence[dict[str, Any]]) -> None:
    if not others:
        output.say(f"fingerprint {fingerprint}: the tiers have records of no other")
        return
    rows = [(one["fingerprint"], one["model"], "; ".join(one["differs_in"])) for one in others]
    output.print_table(f"fingerprint {fingerprint}", ("other", "model", "differs in"), rows)


# -- what is answered --------------------------------------------------------------------------------------------------


def _leading(found: Sequence[Fate]) -> list[Fate]:
    """Those that a retrieve would give: up to the first chunk that is nowhere."""
    return list(takewhile(lambda fate: fate.verdict == "hit", found))


def _as_json(found: Sequence[Fate], pieces: Sequence[Fate], keys: Keys, num_tokens: int) -> dict[str, Any]:
    given = [*_leading(found), *pieces]
    return {
        "fingerprint": keys.fingerprint,
        "tokens": num_tokens,
        "leading_tokens": given[-1].end if given else 0,
        "chunks": [_fate_as_json(fate) for fate in found],
        "pieces": [_fate_as_json(fate) for fate in pieces],
        "too_short_tokens": num_tokens - (found[-1].end if found else 0),
    }


def _fate_as_json(fate: Fate) -> dict[str, Any]:
    return {
        "start": fate.start,
        "end": fate.end,
        "verdict": fate.verdict,
        "tiers": list(fate.tiers),
        "why": fate.why,
        "elsewhere": dict(fate.problems),
    }


def _print(found: Sequence[Fate], pieces: Sequence[Fate], keys: Keys, num_tokens: int, *, in_memory: bool) -> None:
    """pieces: those that are given in the place of the first chunk that is nowhere."""
    given = _leading(found)
    left = [replace(piece, why="a piece of the next chunk, kept of a shorter prompt") for piece in pieces]
    rows = [*_rows(given), *_rows(left), *_rows(found[len(given) :])]
    covered = found[-1].end if found else 0
    if covered < num_tokens:
        rows.append((f"{covered}-{num_tokens}", "1", "-", "-", _too_short(keys)))
    fingerprint = keys.fingerprint
    columns = ("tokens", "chunks", "verdict", "in", "why")
    output.print_table(f"fingerprint {fingerprint}", columns, rows, right=("chunks",))
    more = sum(fate.verdict == "hit" for fate in found) - len(given)
    behind = f"; {more} more are behind a chunk that is not there, and of no use as a prefix" if more else ""
    given += pieces
    parts = " or pieces of one" if any(fate.end - fate.start < keys.chunk_tokens for fate in given) else ""
    there = given[-1].end if given else 0
    output.say(f"{there} of {num_tokens} tokens are there from the start, in {len(given)} chunks{parts}{behind}")
    if in_memory:
        output.say("what an engine has in its own memory is not seen from here")


def _rows(found: Sequence[Fate]) -> list[tuple[str, str, str, str, str]]:
    """Neighbours with the same fate share a row."""
    rows = []
    for _, same in groupby(found, key=lambda fate: (fate.verdict, fate.tiers, fate.said)):
        run = list(same)
        first = run[0]
        rows.append(
            (f"{first.start}-{run[-1].end}", str(len(run)), first.verdict, ", ".join(first.tiers) or "-", first.said)
        )
    return rows


def _too_short(keys: Keys) -> str:
    """The reason for which the last tokens are no segment."""
    least = min(end - start for start, end in keys.spans())
    kind = "chunk" if least == keys.chunk_tokens else "piece"
    return f"too short for a {kind} of {least} tokens"
