"""`kvloom config check | show`; packages add verbs: `schema` of kvloom-tools, `import` of kvloom-lmcache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import output
from kvloom.plugins.registry import Registry
from kvloom.redaction import MASK, masked, masked_template

if TYPE_CHECKING:
    from kvloom.config import Choice, EngineConfig, Resolved
    from kvloom.config.validation_errors import KeyPath

File = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add(commands: typer.Typer, registry: Registry) -> None:
    verbs = typer.Typer(help="Check, show or import a configuration.", no_args_is_help=True)
    commands.add_typer(verbs, name="config")

    @verbs.command("check")
    def check(file: File, as_json: AsJson = False) -> None:
        """Check a configuration against the installed plugins, without opening anything."""
        config, resolved = load(file)
        if as_json:
            found = [{"name": tier.name, "capacity": tier.capacity} for tier in resolved.tiers]
            words = {"connector": config.connector.type, "tokens": config.tokens.type}
            about = {"file": str(file), **words, "chunk_tokens": config.chunk_tokens, "tiers": found}
            print(json.dumps(about, indent=2))
            return
        tiers = " > ".join(f"{tier.name} ({output.size(tier.capacity)})" for tier in resolved.tiers)
        print(f"{file}: ok: {config.connector.type}, {config.tokens.type} of {config.chunk_tokens} tokens, {tiers}")
        print("paths and servers were not tried")

    @verbs.command("show")
    def show(file: File, as_json: AsJson = False) -> None:
        """Print the configuration in effect: defaults and KVLOOM_ variables included, values from ${env:...} not."""
        import yaml

        effective = _effective(*load(file))
        if as_json:
            print(json.dumps(effective, indent=2))
        else:
            print(yaml.safe_dump(effective, sort_keys=False, allow_unicode=True), end="")


def load(file: Path) -> tuple[EngineConfig, Resolved]:
    """The configuration and what its plugins make of it."""
    from kvloom.config import EngineConfig, check_config

    config = EngineConfig.from_file(file)
    return config, check_config(config, imported=False)


def _effective(config: EngineConfig, resolved: Resolved) -> dict[str, Any]:
    tree: Any = config.model_dump(mode="json")
    tree["tokens"] |= _settings(resolved.tokens)
    tree["connector"] |= _settings(resolved.connector)
    for block, tier in zip(tree["tiers"], resolved.tiers, strict=True):
        if tier.capacity is not None:
            block["capacity"] = output.exact_size(tier.capacity)
        if tier.quota is not None:
            block["quota"] = {salt: output.exact_size(size) for salt, size in tier.quota.items()}
        if tier.backend and tier.serializer:
            block |= _settings(tier.backend)
            block["serializer"] |= _settings(tier.serializer)
        for unset in [key for key in ("capacity", "ttl", "quota") if block[key] is None]:
            del block[unset]
    for block, observer in zip(tree["observers"], resolved.observers, strict=True):
        block |= _settings(observer)
    if resolved.blend:
        tree["blend"] |= _settings(resolved.blend.executor)
        tree["blend"]["retriever"] |= _settings(resolved.blend.retriever)
    shown: dict[str, Any] = config.origins.masked_tree(masked(tree))
    shown["salt"] = shown["salt"] and MASK
    for path, template in config.origins.templates.items():
        _restore(shown, path, masked_template(template, path[-1]))
    return shown


def _settings(choice: Choice) -> dict[str, Any]:
    return choice.config.model_dump(mode="json")


def _restore(node: Any, path: KeyPath, template: str) -> None:
    """Put the text with `${env:NAME}` back where it stood."""
    *parents, last = path
    for key in parents:
        node = node[key]
    if isinstance(node[last], dict):  # a bare word has become a block
        node = node[last]
        last = "type" if "type" in node else "executor"
    node[last] = template
