"""`kvloom warm`: which tier holds how much of some prompts, and copying that into a faster tier.

A server's memory cannot be filled from another process: there, `kvloom_tools.warm(engine, FILE)` does that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import BackendError, ConfigError, output
from kvloom_tools.configuration import load
from kvloom_tools.model import Keys, read_spec, recorded, tokenized

if TYPE_CHECKING:
    from kvloom import ChunkKey, EngineConfig, KVLoomError, Segment
    from kvloom.inspection import Resolved, Store
    from kvloom_tools.copying import Copied
    from kvloom_tools.warming import Prompt

_ASKED = 1000
"""Keys in one question to a store."""
_SHOWN = 40
"""Lines on the screen."""


@dataclass(slots=True)
class Line:
    """One line of the file, for one rank of the model."""

    line: int
    rank: int
    tokens: int
    segments: Sequence[Segment] = field(repr=False)
    prompt: Prompt = field(repr=False)
    keys: Keys | None = field(default=None, repr=False)
    """None for a line that is a key."""
    pieces: Sequence[Segment] = field(default=(), repr=False)
    """Those that shorter prompts have left of the first segment that is nowhere."""
    hit: int = 0
    """Tokens from the first on that some tier holds."""
    held: dict[str, int] = field(default_factory=dict)
    """Tokens that each tier holds."""


def add(commands: typer.Typer) -> None:
    @commands.command("warm", short_help="Copy prompts into a faster tier.")
    def warm(
        file: Annotated[
            Path | None,
            typer.Argument(metavar="[FILE]", help="Prompts as JSON, or one prompt or key in a line; none with --text."),
        ] = None,
        *,
        config: Annotated[Path, typer.Option(metavar="CONFIG", help="The engine's YAML configuration.")],
        into: Annotated[str | None, typer.Option(metavar="TIER", help="Copy from slower tiers into this one.")] = None,
        spec: Annotated[
            Path | None, typer.Option(metavar="SPEC", help="KVSpec.to_json(), or a tier's record (default: the one).")
        ] = None,
        model: Annotated[str | None, typer.Option(metavar="MODEL", help="Model, if the tiers hold several.")] = None,
        text: Annotated[Path | None, typer.Option(metavar="PROMPT.txt", help="One prompt: a text file.")] = None,
        tokenizer: Annotated[str | None, typer.Option(help="For text: a name for transformers' AutoTokenizer.")] = None,
        threads: Annotated[int, typer.Option(min=1, max=64, help="Blobs to copy at a time.")] = 4,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Say which tiers hold prompts, and copy them into a faster one. Exit status 1 if something cannot be read."""
        from kvloom_tools.stores import reachable, say_left_out

        settings, resolved = load(config)
        prompts = _prompts(file, text, tokenizer)
        with ExitStack() as stack:
            opened, failed = reachable(resolved, None, stack, made=into is not None)
            target = None if into is None else _target(opened, resolved, into, failed)
            keyings = _keyings(prompts, opened, settings, resolved, failed, spec=spec, model=model)
            for keys in keyings:
                stack.callback(keys.close)
            lines = list(_lines(prompts, keyings))
            holders = _holders(opened, [segment.key for line in lines for segment in line.segments], failed)
            _measure(opened, [line for line in lines if line.keys is None], holders, failed)
            _lead_on(opened, [line for line in lines if line.keys is not None], holders, failed)
            if into in failed:
                raise failed[into]
            copied = [] if target is None else _copied(opened, target, lines, holders, threads=threads)
            for key in (one.key for one in copied if one.outcome == "copied"):
                holders[key].add(into or "")
            _count(opened, lines, holders)
        say_left_out(failed)
        if as_json:
            left_out = {name: str(error) for name, error in failed.items()}
            print(json.dumps({**_as_json(lines, copied), "left_out": left_out}, indent=2))
        else:
            _print(lines, opened, copied)
        raise typer.Exit(1 if failed or any(one.went_wrong for one in copied) else 0)


def _prompts(file: Path | None, text: Path | None, tokenizer: str | None) -> list[Prompt]:
    """Read the prompts or keys to look for. Raises ConfigError."""
    import torch

    from kvloom_tools.warming import Prompt, read_prompts

    if (file is None) == (text is None):
        raise ConfigError("FILE", "give a file of prompts, or one prompt as text (--text and --tokenizer)")
    if file is not None:
        return list(read_prompts(file, tokenizer))
    assert text is not None
    if tokenizer is None:
        raise ConfigError("--tokenizer", "by which tokenizer does --text become tokens? name the model's")
    return [Prompt(1, torch.tensor(tokenized(text, tokenizer), dtype=torch.int32))]


def _target(opened: Sequence[Store], resolved: Resolved, name: str, failed: Mapping[str, KVLoomError]) -> Store:
    """The tier to copy into. ConfigError if that makes no sense. failed: errors of tiers that do not answer, which are
    raised where such a tier is needed."""
    if name in failed:
        raise failed[name]
    if any(choice.name == name and choice.backend is None for choice in resolved.tiers):
        text = "is in the memory of the process that serves; call kvloom_tools.warm(engine, FILE) there when it starts"
        raise ConfigError("--into", f"tier {name!r} {text}")
    found = {store.name: store for store in opened}
    if name not in found:
        raise ConfigError("--into", f"no stored tier is called {name!r}; there are: {', '.join(found)}")
    target = found[name]
    if not target.backend.shared:
        raise ConfigError("--into", f"no other process sees what is in tier {name!r}")
    if target.choice.write == "never":
        raise ConfigError("--into", f"{target.choice.path} has `write: never`")
    if target is opened[-1] and failed:
        raise next(iter(failed.values()))
    if target is opened[-1]:
        raise ConfigError("--into", f"no tier is slower than {name!r}; there is nothing to copy from")
    return target


def _keyings(
    prompts: Sequence[Prompt], opened: list[Store], config: EngineConfig, resolved: Resolved,
    failed: dict[str, KVLoomError], *, spec: Path | None, model: str | None,
) -> list[Keys]:  # fmt: skip
    """The keys of the prompts, for every rank of the model."""
    if all(prompt.key is not None for prompt in prompts):
        return []
    if spec is None:
        return recorded(opened, config, resolved, failed, model=model)
    kv = read_spec(spec)
    return [Keys(config, resolved, one) for one in sorted((kv, *kv.other_ranks()), key=lambda one: one.rank)]


def _lines(prompts: Iterable[Prompt], keyings: Sequence[Keys]) -> Iterator[Line]:
    """Only its blob says how long the chunk of a key is: see `_measure`."""
    from kvloom import Segment

    for prompt in prompts:
        if prompt.key is not None:
            yield Line(prompt.line, 0, 0, [Segment(0, 0, prompt.key)], prompt)
            continue
        assert prompt.tokens is not None
        for keys in keyings:
            segments = keys.segments(prompt.tokens, prompt.salt)
            yield Line(prompt.line, keys.spec.rank, prompt.tokens.numel(), segments, prompt, keys)


def _measure(
    opened: list[Store], lines: Sequence[Line], holders: Mapping[ChunkKey, set[str]], failed: dict[str, KVLoomError]
) -> None:  # fmt: skip
    """The number of tokens under each key, of a chunk or a piece; 0 if no tier has a readable header of it."""
    from kvloom.inspection import at_once
    from kvloom_tools.stores import answers

    by_key = {line.segments[0].key: line for line in lines}

    def measure(store: Store) -> None:
        calls = [
            (key, partial(store.header, str(key)))
            for key, line in by_key.items()
            if store.name in holders[key] and not line.tokens
        ]
        for key, header in at_once(calls, seconds=store.choice.deadline, threads=store.backend.threads):
            if header is not None and not isinstance(header, Exception):
                by_key[key].tokens = header.description.num_tokens

    answers(opened, failed, measure)
    for line in lines:
        (segment,) = line.segments
        line.tokens = by_key[segment.key].tokens
        line.segments = [segment._replace(end=line.tokens)]


def _lead_on(
    opened: list[Store], lines: Sequence[Line], holders: dict[ChunkKey, set[str]], failed: dict[str, KVLoomError]
) -> None:  # fmt: skip
    """Look for the pieces that an engine would take in the place of the first segment that is nowhere."""
    from kvloom import leading

    named: list[tuple[Line, int, list[Segment]]] = []
    for line in lines:
        lost = next((segment for segment in line.segments if not holders[segment.key]), None)
        if lost is not None and line.keys is not None and line.prompt.tokens is not None:
            named.append((line, lost.start, line.keys.pieces(line.prompt.tokens, lost.start, line.prompt.salt)))
    there = _holders(opened, [piece.key for _, _, pieces in named for piece in pieces], failed)
    for line, start, pieces in named:
        line.pieces = leading([piece for piece in pieces if there[piece.key]], start)
        holders.update({piece.key: there[piece.key] for piece in line.pieces})


def _holders(
    opened: list[Store], keys: Iterable[ChunkKey], failed: dict[str, KVLoomError]
) -> dict[ChunkKey, set[str]]:  # fmt: skip
    """For each key, the tiers that say that they hold it."""
    from kvloom_tools.stores import answers

    holders: dict[ChunkKey, set[str]] = {key: set() for key in keys}
    for store, there in answers(opened, failed, lambda store: _held(store, list(holders))):
        for key in there:
            holders[key].add(store.name)
    return holders


def _held(store: Store, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    held: list[ChunkKey] = []
    for start in range(0, len(keys), _ASKED):
        some = keys[start : start + _ASKED]
        held += [key for key, there in zip(some, _contains(store, some), strict=True) if there]
    return held


def _contains(store: Store, keys: Sequence[ChunkKey]) -> list[bool]:
    return store.ask(lambda: store.backend.contains_many([str(key) for key in keys]))


def _count(opened: Sequence[Store], lines: Sequence[Line], holders: dict[ChunkKey, set[str]]) -> None:
    for line in lines:
        whole = True
        line.held = {store.name: 0 for store in opened}
        for start, end, key in line.segments:
            for name in holders[key]:
                line.held[name] += end - start
            whole = whole and bool(holders[key])
            line.hit += end - start if whole else 0
        own = {segment.key for segment in line.segments}
        for start, end, key in line.pieces:
            line.hit += end - start
            for name in holders[key] if key not in own else ():
                line.held[name] += end - start


# -- copying -----------------------------------------------------------------------------------------------------------


def _copied(
    opened: Sequence[Store], target: Store, lines: Sequence[Line], holders: dict[ChunkKey, set[str]], *, threads: int
) -> list[Copied]:
    from kvloom.inspection import at_once
    from kvloom_tools.copying import Copied, Copier
    from kvloom_tools.stores import said

    slower = opened[list(opened).index(target) + 1 :]
    todo = {
        key: sources
        for key, names in holders.items()
        if target.name not in names and (sources := [store for store in slower if store.name in names])
    }
    copier = Copier(target)
    seconds = target.choice.deadline + sum(2 * store.choice.deadline for store in slower)
    calls = [(key, partial(copier.copy, key, sources)) for key, sources in todo.items()]
    found = []
    with output.progress(f"copying into {target.name}", len(calls)) as step:
        for key, one in at_once(calls, seconds=seconds, threads=threads):
            found.append(Copied(key, "failed", reason=said(one)) if isinstance(one, Exception) else one)
            step()
    # As if they had been used, heads last, so that a full tier lets go of tails first.
    came = {one.key for one in found if one.outcome == "copied"}
    with suppress(BackendError):  # they were copied all the same
        for line in lines:
            keys = [str(segment.key) for segment in reversed((*line.segments, *line.pieces)) if segment.key in came]
            for start in range(0, len(keys), _ASKED):
                some = keys[start : start + _ASKED]
                target.ask(lambda some=some: target.backend.touch_many(some))  # type: ignore[misc]
    return found


# -- saying it ---------------------------------------------------------------------------------------------------------


def _as_json(lines: Sequence[Line], copied: Sequence[Copied]) -> dict[str, Any]:
    def plain(line: Line) -> dict[str, Any]:
        return {"line": line.line, "rank": line.rank, "tokens": line.tokens, "hit": line.hit, "held": line.held}

    outcomes = Counter(one.outcome for one in copied)
    problems = [asdict(one) | {"key": str(one.key)} for one in copied if one.outcome != "copied"]
    return {
        "lines": [plain(line) for line in lines],
        "copied": {**outcomes, "bytes": sum(one.bytes for one in copied)},
        "problems": problems,
    }


def _print(lines: Sequence[Line], opened: Sequence[Store], copied: Sequence[Copied]) -> None:
    names = [store.name for store in opened]
    rows = [
        (str(line.line), str(line.rank), str(line.tokens), str(line.hit), *(str(line.held[name]) for name in names))
        for line in lines[:_SHOWN]
    ]
    columns = ("line", "rank", "tokens", "hit", *names)
    output.print_table("tokens of each prompt, and in each tier", columns, rows, right=columns)
    tokens, hit = sum(line.tokens for line in lines), sum(line.hit for line in lines)
    output.say(f"{len(lines)} lines, {tokens} tokens, {hit} of them hits")
    for outcome, count in Counter(one.outcome for one in copied).items():
        nbytes = sum(one.bytes for one in copied if one.outcome == outcome)
        output.say(f"{outcome}: {count} blobs, {output.size(nbytes)}")
    for reason in list(dict.fromkeys(one.reason for one in copied if one.reason))[:5]:
        output.say(f"  {reason}")
