"""`kvloom config import`: a configuration of LMCache as one of kvloom, and what became of each field."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import ConfigError, replace_file, text_of

if TYPE_CHECKING:
    from kvloom_lmcache.draft import Imported

_ORDER = ("instance_id", "connector", "chunk_tokens", "save_decode_cache", "save_tails", "tiers", "blend", "observers")

_MOST_BYTES = 16 << 20
"""In a file of LMCache's."""

_MERGES = (
    "these tokens are found where prompts are joined as token ids; in a text that is tokenised as a whole they merge "
    "with what is beside them: choose a special token then"
)


def add(commands: typer.Typer) -> None:
    """Add `import` to the verbs of `kvloom config`."""
    verbs = typer.Typer()
    verbs.command("import")(import_)
    commands.add_typer(verbs, name="config")


def import_(
    file: Annotated[
        Path | None, typer.Argument(metavar="[LMCACHE.yaml]", help="LMCache's file; none with --env.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it (default: print it).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
    env: Annotated[bool, typer.Option("--env", help="Read LMCACHE_ variables, too; they override the file.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Tokenizer for blend_special_str (needs transformers).")
    ] = None,
    connector: Annotated[str, typer.Option(metavar="TYPE", help="The engine's connector.")] = "vllm",
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if a field has no counterpart.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for each field as JSON.")] = False,
) -> None:
    """Bring a configuration of LMCache over: YAML on stdout, and a row for each field on stderr."""
    from kvloom_lmcache.conversion import import_config, import_environment

    if file is None and not env:
        raise ConfigError("LMCACHE.yaml", "name the file, or take the environment with --env")
    if file is not None and to is not None and os.path.realpath(file) == os.path.realpath(to):
        raise ConfigError("--output", f"{to} is LMCache's file; name another")
    if to is not None and to.is_file() and not force:
        raise ConfigError("--output", f"{to} exists already; choose another name, or overwrite it with --force")
    fields = {} if file is None else _read(file)
    if env:
        fields |= import_environment(os.environ)
    if not fields:
        raise ConfigError(str(file or "--env"), "has no field of LMCache")
    separator, merges = None, False
    if tokenizer and fields.get("enable_blending") is True:
        separator, merges = _separator(tokenizer, fields)
    done = import_config(fields, connector=connector, separator=separator)
    if merges:
        done.note("blend_special_str", _MERGES)
    text = _yaml(done, file)
    _check(done, text)
    if to is not None:
        _write(to, text)
    if as_json:
        rows = [{"field": row.field, "outcome": row.outcome, "text": row.text} for row in done.rows]
        made = {"config": done.config, "fields": rows, "environment": done.environment, "complete": done.complete}
        print(json.dumps(made, indent=2))
    elif to is None:
        print(text, end="")
    if not as_json:
        _print(done)
    if strict and not done.complete:
        raise typer.Exit(1)


def _read(file: Path) -> dict[str, Any]:
    import yaml

    from kvloom import load_yaml

    try:
        tree, twice = load_yaml(text_of(file, _MOST_BYTES))
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(file), "is not UTF-8 text") from None
    except ConfigError as error:
        raise ConfigError(str(file), error.problem) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where, tag = getattr(error, "problem_mark", None), isinstance(error, yaml.constructor.ConstructorError)
        text = "has a tag that plain YAML has not" if tag else "is not YAML"  # and no word of what stands there
        raise ConfigError(str(file), f"{text}{f', line {where.line + 1}' if where else ''}") from None
    if twice:
        raise ConfigError(str(file), f"{'.'.join(map(str, twice[0][0]))} is {twice[0][1]}")
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(str(file), "should be a mapping of LMCache's fields")
    return dict(tree)


def _write(to: Path, text: str) -> None:
    try:
        replace_file(to, text)
    except OSError as error:
        raise ConfigError(str(to), f"cannot be written: {error.strerror}") from None


def _separator(model: str, fields: Mapping[str, Any]) -> tuple[list[int], bool]:
    """The token ids of `blend_special_str` without a BOS, and whether they become others within a text."""
    from kvloom_lmcache.fields import MAPPED

    text = fields.get("blend_special_str", MAPPED["blend_special_str"])
    if not isinstance(text, str) or not text:
        raise ConfigError("blend_special_str", "should be the text that stands between passages")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("--tokenizer", "needs transformers: pip install transformers") from None
    try:
        read = AutoTokenizer.from_pretrained(model)
        tokens, within = (read(one, add_special_tokens=False).input_ids for one in (text, f"one{text}Two"))
    except Exception as error:  # of transformers, tokenizers, the hub, or the code that a model brings
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError("--tokenizer", f"{model}: {first}") from None
    if not tokens:
        raise ConfigError("blend_special_str", f"is no token of {model}; write another text, in prompts too")
    found = any(within[at : at + len(tokens)] == tokens for at in range(len(within)))
    return [int(token) for token in tokens], not found


def _yaml(done: Imported, file: Path | None) -> str:
    """As one would write it by hand, with where each part comes from."""
    import yaml

    def line(value: Any) -> str:
        return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)).strip()

    def about(part: str, indent: str = "") -> list[str]:
        names = done.sources.get(part)
        return [f"{indent}# {', '.join(dict.fromkeys(names))}"] if names else []

    origin = " ".join(_plain(file.name).split()) if file else "LMCACHE_ variables"
    lines = [f"# From {origin}.", *(f"# Set {name}: {what}." for name, what in done.environment.items())]
    for name in _ORDER:
        if name not in done.config:
            continue
        value = done.config[name]
        lines += about(name)
        if name == "tiers":
            lines.append("tiers:")
            for block in value:
                lines += [*about(f"tiers/{block['type']}", "  "), f"  - {line(block)}"]
        elif isinstance(value, Mapping):
            lines += [f"{name}:", *(f"  {key}: {_scalar(line(item))}" for key, item in value.items())]
        else:
            lines.append(f"{name}: {_scalar(line(value))}")
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    return text.removesuffix("...").strip()


def _check(done: Imported, text: str) -> None:
    """Raise ConfigError if the text is not a configuration."""
    import yaml

    from kvloom import EngineConfig

    EngineConfig.load(done.tried(yaml.safe_load(text)))


def _print(done: Imported) -> None:
    """Print what became of each field, and the plugins that are still to be installed."""
    from kvloom import EngineConfig, check_config

    for outcome in ("mapped", "not needed", "no counterpart", "unknown"):
        rows = [row for row in done.rows if row.outcome == outcome]
        if rows:
            _say(f"{outcome} ({len(rows)})")
        for row in rows:
            _say(f"  {' '.join(row.field.split())}: {row.text}")
    if done.environment:
        _say("to be set where it is used")
    for name, what in done.environment.items():
        _say(f"  {name}: {what}")
    try:
        check_config(EngineConfig.load(done.tried()))
    except ConfigError as error:
        _say(f"not usable yet: {error}")


def _say(text: str) -> None:
    typer.echo(_plain(text), err=True)


def _plain(text: str) -> str:
    """Return `text` with characters escaped that a terminal would act on: others may have written the file."""
    return "".join(one if one == "\n" or one.isprintable() else ascii(one)[1:-1] for one in text)
