"""The reference of the configuration: a table for each block of the YAML, as users write it, and an example of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from kvloom import EngineConfig, Registry
from kvloom.config import resolve
from kvloom_tools.schema import json_schema

NEEDED: Mapping[str, Mapping[str, Any]] = {
    "disk": {"path": "/var/cache/kv", "capacity": "200GiB"},
    "fsspec": {"url": "s3://bucket/kv", "capacity": "2TiB"},
    "redis": {"url": "redis://localhost:6379/0"},
    "mooncake": {"master": "localhost:50051"},
    "trace": {"path": "requests.jsonl"},
    "separator": {"separator": [2]},
    "blend": {"retriever": {"type": "separator", "separator": [2]}},
    "zmq_events": {"endpoint": "tcp://*:5557"},
}
"""Settings that an example of a type needs beside its defaults."""
EVERY_TIER = "tiers: every tier but memory"
INTRO = """# Configuration

All keys of the YAML file, generated from the models that check it. A type is a word (`connector: plain`) or a block
(`{type: plain, ...}`); the types depend on the installed plugins, which `kvloom plugins` lists. `kvloom config schema`
prints the same for editors, and `kvloom config check FILE` checks a file. Environment variables can set keys too
([configure](../docs/use/configure.md)).
"""


def made() -> dict[str, str]:
    registry = Registry.discover()
    schema = json_schema(registry)
    pages = [INTRO, *_section("The file", "", schema["properties"], schema.get("required", ()), schema)]
    memory = schema["$defs"]["MemoryBlock"]
    pages += _section("tiers: memory", "", memory["properties"], (), schema)
    pages += _example(registry, "tiers", {"type": "memory", "capacity": "64GiB"})
    pages += _kind(registry, schema, "backend", "tiers", EVERY_TIER.partition(": ")[2], "StoredBlock")
    pages += _section("tiers[].protect", "", schema["$defs"]["ProtectBlock"]["properties"], ("keys",), schema)
    pages += _kind(registry, schema, "serializer", "tiers[].serializer", "every serializer", "SerializerBlock")
    pages += _kind(registry, schema, "tokens", "tokens")
    pages += _kind(registry, schema, "connector", "connector")
    pages += _kind(registry, schema, "blend executor", "blend", "every executor", "BlendBlock", word="executor")
    pages += _kind(registry, schema, "blend retriever", "blend.retriever")
    pages += _kind(registry, schema, "observer", "observers")
    pages += _section("plugins", "", schema["$defs"]["PluginsBlock"]["properties"], (), schema)
    return {"reference/configuration.md": "\n".join(pages)}


def _kind(
    registry: Registry, schema: Mapping[str, Any], kind: str, path: str, common: str = "", block: str = "",
    *, word: str = "type",
) -> Iterator[str]:  # fmt: skip
    """The sections of all types of one kind of component. common: the keys that each of them has."""
    from kvloom.config import blocks

    shared = set(getattr(blocks, block).model_fields) - {word} if block else set()
    provided = {type_: one.dist for one in registry.statuses() for what, type_ in one.provides if what == kind}
    models = {type_: schema["$defs"][type_] for type_ in registry.types(kind)}
    if common:
        first = next(iter(models.values()))["properties"]
        yield from _section(f"{path}: {common}", "", {key: first[key] for key in first if key in shared}, (), schema)
    for type_, model in models.items():
        own = {key: about for key, about in model["properties"].items() if key not in shared | {word}}
        about = " ".join((registry.types(kind)[type_].__doc__ or "").split("\n\n")[0].split())
        text = f"From `{provided.get(type_) or 'kvloom'}`. {about}"
        yield from _section(f"{path}: {type_}", text, own, model.get("required", ()), schema)
        example = {word: type_, **NEEDED.get(type_, NEEDED.get(path, {}))}
        yield from _example(registry, path, example if len(example) > 1 else type_)


def _example(registry: Registry, path: str, value: Any) -> Iterator[str]:
    """Checked: a configuration with it must load, and go with what is installed."""
    *outer, key = path.split(".")
    tree: dict[str, Any] = {key.removesuffix("[]"): [value] if key in ("tiers", "observers") else value}
    if outer == ["tiers[]"]:
        tree = {"tiers": [{"type": "disk", "path": "/var/cache/kv", **tree}]}
    elif outer:
        tree = {outer[0]: tree}
    resolve(EngineConfig.load(tree), registry)
    yield f"```yaml\n{yaml.safe_dump(tree, sort_keys=False, default_flow_style=None).rstrip()}\n```\n"


def _section(name: str, text: str, keys: Mapping[str, Any], required: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name}\n"
    if text:
        yield f"{_cell(text)}\n"
    if not keys:
        yield "No settings.\n"
        return
    yield "| key | takes | default | means |\n|---|---|---|---|"
    for key, about in keys.items():
        default = "needed" if key in required else f"`{json.dumps(about.get('default'), ensure_ascii=False)}`"
        if key == "name" and name == EVERY_TIER:
            default = "the type"
        means = " ".join(str(about.get("description", "")).split())
        yield f"| `{key}` | {_cell(_takes(about, schema))} | {_cell(default)} | {_cell(means)} |"
    yield ""


def _takes(about: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """In words."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return "a block" if "properties" in schema["$defs"][name] else _takes(schema["$defs"][name], schema)
    if "const" in about:
        return f"`{about['const']}`"
    if "enum" in about:
        return ", ".join(f"`{one}`" for one in about["enum"])
    if "anyOf" in about:
        kinds = [one for one in about["anyOf"] if one.get("type") != "null"]
        names = {one.get("type") for one in kinds}
        if names == {"number", "string"}:
            return "seconds, or `30s`, `5min`"
        if any("\\w+" in str(one.get("pattern")) for one in kinds):
            return "bytes, or `64GiB`"
        return " or ".join(dict.fromkeys(_takes(one, schema) for one in kinds))
    if "discriminator" in about or "oneOf" in about:
        return "a block"
    if about.get("type") == "array":
        return f"a list of {_takes(about.get('items', {}), schema)}"
    words = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "`true`, `false`"}
    bounds = [f"{sign} {about[key]}" for key, sign in _BOUNDS.items() if key in about]
    return " ".join([words.get(str(about.get("type")), "a mapping"), *bounds])


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
