"""`kvloom init`: writes a configuration from a few answers or flags, and says what to do next."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

from kvloom import ConfigError, Registry, replace_file

_SIZE = re.compile(r"(?:(?P<place>.*):)?(?P<size>\d+(?:\.\d+)?[KMGTP]i?B)", re.IGNORECASE)
_EXAMPLE = "--engine vllm --tier memory:4GiB --tier disk:/var/lib/kvloom:100GiB"


class TierKind(NamedTuple):
    """One kind of tier that can be asked for."""

    type: str
    """The tier's `type` in YAML."""
    setting: str
    """The setting that says where it is; empty for memory."""
    place: str
    """The default place of the store, offered to the user."""
    size_setting: str
    size: str
    """The size that is offered; empty for none."""
    about: str
    """The comment above it."""


TIERS = {
    "memory": TierKind("memory", "", "", "capacity", "4GiB", "Memory of this host; empty after a restart."),
    "disk": TierKind("disk", "path", "~/.cache/kvloom", "capacity", "100GiB", "A directory; it outlives restarts."),
    "redis": TierKind(
        "redis", "url", "redis://localhost:6379", "capacity", "",
        "Redis or Valkey; machines share it. For a password add: password: ${env:REDIS_PASSWORD}",
    ),
    "s3": TierKind(
        "fsspec", "url", "s3://bucket/kvloom", "capacity", "",
        "An object store; machines share it. Credentials are read from its client's environment variables.",
    ),
    "mooncake": TierKind(
        "mooncake", "master", "localhost:50051", "segment", "4GiB",
        "Mooncake Store; `segment` is the memory that this process adds to the pool.",
    ),
}  # fmt: skip
_SCHEMES = {"redis": "redis", "rediss": "redis", "s3": "s3", "gs": "s3", "az": "s3"}
"""Schemes of URLs, each with the kind of tier that it is."""


class EngineSetup(NamedTuple):
    """One engine that can be asked for."""

    connector: str
    next_step: Callable[[str], str]
    """From the path of the configuration."""
    serializers: Mapping[str, tuple[str, Any]] = MappingProxyType({})
    """Connector and block for serializers that this engine takes in another form."""


def _vllm(config: str) -> str:
    transfer = {
        "kv_connector": "KVLoomConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": config},
    }  # fmt: skip
    return f"vllm serve MODEL --kv-transfer-config {shlex.quote(json.dumps(transfer))}"


def _sglang(config: str) -> str:
    extra = {
        "backend_name": "kvloom", "module_path": "kvloom_connector_sglang.hicache", "class_name": "KVLoomHiCache",
        "interface_v1": 1, "config": config, "revision": "REVISION",
    }  # fmt: skip
    return (
        "python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache "
        f"--hicache-storage-backend dynamic --hicache-storage-backend-extra-config {shlex.quote(json.dumps(extra))}"
    )


ENGINES = {
    "vllm": EngineSetup("vllm", _vllm, {"cachegen": ("vllm_blob", "cachegen")}),
    "transformers": EngineSetup(
        "transformers", lambda config: f"from kvloom_connector_transformers import cached; cached(model, {config!r})"
    ),
    "sglang": EngineSetup("sglang", _sglang, {"cachegen": ("sglang", {"type": "cachegen", "mode": "lossless"})}),
    "plain": EngineSetup("plain", lambda config: f"import kvloom; kvloom.Engine.open({config!r}, spec)"),
}


def add(commands: typer.Typer) -> None:
    @commands.command("init", short_help="Write a configuration: asks for engine and tiers.")
    def init(
        engine: Annotated[str, typer.Option(metavar="ENGINE", help=f"One of {', '.join(ENGINES)}.")] = "",
        tiers: Annotated[
            list[str] | None,
            typer.Option(
                "--tier",
                metavar="TIER",
                help="memory:4GiB, disk:/path:100GiB, redis://host:6379, s3://bucket/prefix or "
                "mooncake:host:port:4GiB; once for each tier, fast to slow.",
            ),
        ] = None,
        serializer: Annotated[
            str,
            typer.Option(metavar="TYPE", help="Encoding of KV below memory: raw, cachegen (5 times smaller) ..."),
        ] = "raw",
        to: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = Path(
            "kvloom.yaml"
        ),
        force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    ) -> None:
        """Write a configuration: asks for engine and tiers on a terminal, or takes them as flags."""
        import yaml

        if to.exists() and not force:
            raise ConfigError("--output", f"{to} exists already; choose another name, or overwrite it with --force")
        if not engine or not tiers:
            if not _is_terminal():
                raise ConfigError("--engine, --tier", f"there is no terminal to ask at; give both, such as {_EXAMPLE}")
            engine = engine or _ask(f"Engine ({', '.join(ENGINES)})", "vllm", ENGINES.__contains__)
            tiers = tiers or _ask_for_tiers()
        text = written(engine, [tier_block(one) for one in tiers], serializer)
        tree = yaml.safe_load(text)
        missing = _missing(tree, serializer, Registry.discover())
        _write(to, text)
        next_step = ENGINES[engine].next_step(str(to.resolve()))
        if as_json:
            made = {"output": str(to), "config": tree, "missing": missing, "next": next_step}
            print(json.dumps(made, indent=2))
            return
        typer.echo(f"wrote {to}; check it with: kvloom config check {shlex.quote(str(to))}")
        for line in missing:
            typer.echo(f"not usable yet: {line}", err=True)
        typer.echo(f"next: {next_step}")


def tier_block(text: str) -> tuple[TierKind, dict[str, Any]]:
    """Return the kind and the YAML block of a tier written as `TYPE[:PLACE][:SIZE]` or `URL[:SIZE]`.

    Raises ConfigError.
    """
    word, _, rest = text.partition(":")
    name, place = (_SCHEMES.get(word, word), text) if rest.startswith("//") else (word, rest)
    if name not in TIERS:
        raise ConfigError("--tier", f"no tier {word!r}; known: {', '.join(TIERS)}; others can be written into the file")
    kind, sized = TIERS[name], _SIZE.fullmatch(place)
    place, size = (sized["place"] or "", sized["size"]) if sized else (place, kind.size)
    if place and not kind.setting:
        raise ConfigError("--tier", f"{place!r} is no size; write {name}:4GiB")
    if kind.setting == "url":
        place = place or kind.place
        place = place if "://" in place else f"{name}://{place}"
        if "@" in place:
            raise ConfigError("--tier", f"a {name} URL has a login in it; leave it out, the file says where it goes")
    block = {"type": kind.type}
    if kind.setting:
        block[kind.setting] = place or kind.place
    return kind, {**block, **({kind.size_setting: size} if size else {})}


def written(engine: str, tiers: Sequence[tuple[TierKind, dict[str, Any]]], serializer: str) -> str:
    """Return the YAML of a configuration. Raises ConfigError for an engine that is not known."""
    if engine not in ENGINES:
        raise ConfigError("--engine", f"no engine {engine!r}; known: {', '.join(ENGINES)}")
    connector, encoded = ENGINES[engine].serializers.get(serializer, (ENGINES[engine].connector, serializer))
    if serializer != "raw" and not any(kind.setting for kind, _ in tiers):
        raise ConfigError("--serializer", "memory keeps KV as it is; add a tier, such as --tier disk:/path:100GiB")
    lines = [
        "# Written by `kvloom init`.",
        "# Whose KV is read and written.",
        f"connector: {connector}",
        "# Fast to slow. KV found in a slow tier is copied to the memory tier.",
        "tiers:",
    ]
    for index, (kind, block) in enumerate(tiers):
        again = sum(other.type == kind.type for other, _ in tiers[:index])
        name = {"name": f"{kind.type}-{again + 1}"} if again and kind.setting else {}
        whole = {**block, **name, **({"serializer": encoded} if kind.setting and serializer != "raw" else {})}
        lines += [f"  # {kind.about}", f"  - {_flow(whole)}"]
    return "\n".join(lines) + "\n"


def _flow(block: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(block, default_flow_style=True, sort_keys=False, width=1000, allow_unicode=True)).strip()


def _missing(tree: dict[str, Any], serializer: str, registry: Registry) -> list[str]:
    """Return a line for each package that the configuration needs and that is not installed. Raises ConfigError."""
    from kvloom import EngineConfig, PluginError, check_config

    config = EngineConfig.load(tree)
    wanted = [("connector", config.connector.type), ("serializer", serializer)]
    wanted += [("backend", tier.type) for tier in config.tiers if tier.type != "memory"]
    missing = []
    for kind, type_ in dict.fromkeys(wanted):
        try:
            registry.settings(kind, type_)
            missing.append(registry.lacks(kind, type_))
        except PluginError as error:
            missing.append(str(error))
    if not any(missing):
        check_config(config, imported=False)
    return [line for line in missing if line]


def _write(to: Path, text: str) -> None:
    try:
        replace_file(to, text)
    except OSError as error:
        raise ConfigError("--output", f"{to} cannot be written: {error.strerror}") from None


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _ask(what: str, default: str, is_valid: Callable[[str], bool]) -> str:
    """Ask until the answer is valid."""
    while True:
        answer = str(typer.prompt(what, default=default, err=True)).strip()
        if is_valid(answer):
            return answer
        typer.echo(f"no {answer!r}", err=True)


def _ask_for_tiers() -> list[str]:
    """Ask for tiers, fast to slow, until no more are wanted."""
    tiers: list[str] = []
    names, default = [*TIERS], "memory"
    while (name := _ask(f"Next tier, fast to slow ({', '.join(names)})", default, names.__contains__)) != "none":
        kind = TIERS[name]
        place = _ask(f"  {kind.setting}", kind.place, bool) if kind.setting else ""
        size = _ask(f"  {kind.size_setting}", kind.size or "no limit", _is_size)
        tiers.append(":".join(part for part in (name, place, "" if size == "no limit" else size) if part))
        names, default = [*TIERS, "none"], "disk" if kind.type == "memory" else "none"
    return tiers


def _is_size(text: str) -> bool:
    return text == "no limit" or _SIZE.fullmatch(text) is not None
