"""`kvloom config import`: a configuration of LMCache as one of kvloom, and what became of each field."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import output
from kvloom.errors import ConfigError

if TYPE_CHECKING:
    from kvloom.migration import Imported

_ORDER = ("instance_id", "connector", "chunk_tokens", "save_decode_cache", "tiers", "blend", "observers")


def add(verbs: typer.Typer) -> None:
    @verbs.command("import")
    def import_(
        file: Annotated[
            Path | None, typer.Argument(metavar="[LMCACHE.yaml]", help="LMCache's file; none with --env.")
        ] = None,
        to: Annotated[
            Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it (default: print it).")
        ] = None,
        env: Annotated[bool, typer.Option("--env", help="Take LMCACHE_ variables too; they go over the file.")] = False,
        tokenizer: Annotated[
            str | None, typer.Option(metavar="MODEL", help="Whose tokens blend_special_str is (needs transformers).")
        ] = None,
        connector: Annotated[str, typer.Option(metavar="TYPE", help="The engine's connector.")] = "vllm",
        strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if a field has no counterpart.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print what became of the fields as JSON.")] = False,
    ) -> None:
        """Bring a configuration of LMCache over: YAML on stdout, and a row for each field on stderr."""
        from kvloom.migration import import_config, import_environment

        if file is None and not env:
            raise ConfigError("LMCACHE.yaml", "name the file, or take the environment with --env")
        fields = {} if file is None else _read(file)
        if env:
            fields |= import_environment(os.environ)
        if not fields:
            raise ConfigError(str(file or "--env"), "has no field of LMCache")
        separator = None if tokenizer is None else _tokens(tokenizer, str(fields.get("blend_special_str", " # # ")))
        done = import_config(fields, connector=connector, separator=separator)
        text = _yaml(done, file)
        _check(text)
        if to is not None:
            _write(to, text)
        if as_json:
            rows = [{"field": row.field, "outcome": row.outcome, "text": row.text} for row in done.rows]
            print(json.dumps({"config": done.config, "fields": rows, "complete": done.complete}, indent=2))
        elif to is None:
            print(text, end="")
        if not as_json:
            _print(done)
        if strict and not done.complete:
            raise typer.Exit(1)


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(file), "is no text in UTF-8") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise ConfigError(str(file), f"is no YAML{f', line {where.line + 1}' if where else ''}") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(str(file), "should be a mapping of LMCache's fields")
    return dict(tree)


def _write(to: Path, text: str) -> None:
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(to), f"cannot be written: {error.strerror}") from None


def _tokens(model: str, text: str) -> list[int]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("--tokenizer", "needs transformers: pip install transformers") from None
    try:
        tokens = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False).input_ids
    except (OSError, ValueError) as error:
        raise ConfigError("--tokenizer", f"{model}: {str(error).splitlines()[0]}") from None
    return [int(token) for token in tokens]


def _yaml(done: Imported, file: Path | None) -> str:
    """As one would write it by hand, with where each part comes from."""
    import yaml

    def line(value: Any) -> str:
        return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)).strip()

    def about(part: str, indent: str = "") -> list[str]:
        names = done.sources.get(part)
        return [f"{indent}# {', '.join(dict.fromkeys(names))}"] if names else []

    lines = [f"# From {file.name if file else 'LMCACHE_ variables'}."]
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


def _check(text: str) -> None:
    """What was made is a configuration, whatever plugins are here. Raises ConfigError if it is not."""
    import yaml

    from kvloom.config import EngineConfig

    EngineConfig.load(yaml.safe_load(text))


def _print(done: Imported) -> None:
    """What became of each field, and which plugins are still to be installed."""
    from kvloom.config import EngineConfig, resolve
    from kvloom.plugins import Registry

    for outcome in ("mapped", "not needed", "no counterpart", "unknown"):
        rows = [row for row in done.rows if row.outcome == outcome]
        if rows:
            output.say(f"{outcome} ({len(rows)})", stderr=True)
        for row in rows:
            output.say(f"  {output.plain(row.field)}: {output.plain(row.text)}", stderr=True)
    try:
        resolve(EngineConfig.load(done.config), Registry.discover())
    except ConfigError as error:
        output.say(f"not usable yet: {error}", stderr=True)
