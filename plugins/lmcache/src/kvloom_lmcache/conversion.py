"""LMCache's fields to kvloom's configuration, with a row for each that says what became of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom import ConfigError, EngineConfig, load_yaml
from kvloom_lmcache.blending import add_blending
from kvloom_lmcache.draft import Draft, Imported, literal, shown
from kvloom_lmcache.extra import add_extra
from kvloom_lmcache.fields import ALIASES, MAPPED, NOT_MAPPED, Row
from kvloom_lmcache.remote import add_pool, add_remote, gibibytes

_MOST_FIELDS = 5000
_LOCATIONS = {
    "localcpubackend": "memory", "localdiskbackend": "disk", "remotebackend": "redis", "s3backend": "fsspec",
}  # fmt: skip
_POLICIES = {"lru": "lru", "lfu": "tiny_lfu"}
_NO_FIELDS = {
    "LMCACHE_CONFIG_FILE",
    "LMCACHE_USE_EXPERIMENTAL",
    "LMCACHE_LOG_LEVEL",
    "LMCACHE_FORCE_SKIP_SAVE",
    "LMCACHE_TRACK_USAGE",
}
"""Variables that are read beside the configuration."""
_TEXTS = {
    "local_disk", "remote_url", "remote_serde", "blend_special_str", "store_location", "lookup_url",
    "lmcache_instance_id", "cache_policy",
}  # fmt: skip
"""Fields that are text, and taken as it stands: in YAML `' # # '` would be a comment."""
_SETTINGS = {
    ("memory", "capacity"): "max_local_cpu_size", ("disk", "capacity"): "max_local_disk_size",
    ("mooncake", "segment"): "max_local_cpu_size",
}  # fmt: skip
"""Settings of tiers, each with the field that it comes from; of others it is all fields that the tier comes from."""


_TIMEOUT = 5.0
"""The default `timeout` of the clients of servers."""


def import_config(
    source: Mapping[str, Any], *, connector: str = "vllm", separator: Sequence[int] | None = None
) -> Imported:
    """source: the fields of an LMCache file. connector: the engine's. separator: token ids of its blend_special_str.

    Raises ConfigError with every field whose value has another type than in LMCache, or cannot work in kvloom.
    Nothing that is raised or returned holds a password: those become environment variables.
    """
    extra = source.get("extra_config")
    for count in (len(source), len(extra) if isinstance(extra, Mapping) else 0):
        if count > _MOST_FIELDS:
            raise ConfigError("fields", f"{count} of them; LMCache has some 200")
    fields = {name: value for name, value in source.items() if isinstance(name, str)}
    found = [ConfigError(shown(name), "should be the name of a field") for name in source if name not in fields]
    made: Imported | None = None
    while made is None:  # without each field that is wrong, until all of them are known
        try:
            draft, written = _drafted(fields, connector, separator)
        except ConfigError as error:
            found.append(error)
            if not _without(fields, error.path):
                break
        else:
            made = draft.done
    if made is not None and (not found or made.config["tiers"]):  # else the tier that is lacking was in a wrong field
        _end(draft)
        _as_written(made, written)
        found += _wrong(made)
    if found or made is None:
        raise ConfigError.of_all((one.path, one.problem) for one in found)
    return made


def _without(fields: dict[str, Any], path: str) -> bool:
    """Remove a field, or a setting in `extra_config`; return whether there was one."""
    name = path.removeprefix("extra_config.")
    if path in fields:
        del fields[path]
    elif path != name and name in fields.get("extra_config", ()):
        fields["extra_config"] = {key: value for key, value in fields["extra_config"].items() if key != name}
    else:
        return False
    return True


def _drafted(
    source: Mapping[str, Any], connector: str, separator: Sequence[int] | None
) -> tuple[Draft, dict[str, str]]:
    given, written = _named(source)
    draft = Draft(given, connector, separator)
    for part in (_plain, _memory, _disk, add_remote, add_pool, add_extra, _everywhere, add_blending, _others):
        part(draft)
    return draft, written


def import_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields that LMCACHE_ variables set, with values as YAML has them.

    Raises ConfigError that names each variable whose value YAML cannot read.
    """
    import yaml

    prefix, fields = "LMCACHE_", {}
    wrong: list[tuple[str, str]] = []
    for name, text in environment.items():
        if not name.startswith(prefix) or name in _NO_FIELDS:
            continue
        field = name.removeprefix(prefix).lower()
        try:
            fields[field] = text if field in _TEXTS else load_yaml(text)[0]
        except (yaml.YAMLError, ValueError, RecursionError):
            wrong.append((name, "is not YAML"))
    if wrong:
        raise ConfigError.of_all(wrong)
    return fields


def _named(source: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields under their names of today, and the older names that stand in the source, by these."""
    given: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in source.items():
        new = ALIASES.get(name, name)
        if new in given or (new != name and new in source):
            raise ConfigError(name, f"is another name of {new!r}, which is given too; leave one of them out")
        given[new] = value
        if new != name:
            written[new] = name
    return given, written


def _as_written(done: Imported, written: Mapping[str, str]) -> None:
    """Rows and sources name fields as the source does."""
    done.rows = [Row(written.get(row.field, row.field), row.outcome, row.text) for row in done.rows]
    for part, names in done.sources.items():
        done.sources[part] = [written.get(name, name) for name in names]


def _plain(draft: Draft) -> None:
    """Take up the fields that have another name here, and those that become observers."""
    for name, new, check, word in (
        ("lmcache_instance_id", "instance_id", str, "text"), ("chunk_size", "chunk_tokens", int, "a whole number"),
        ("save_decode_cache", "save_decode_cache", bool, "true or false"),
    ):  # fmt: skip
        value = draft.given.get(name)
        if value is None or (value == MAPPED[name] and type(value) is check):
            draft.say(name, "not needed" if value is None else "mapped", f"`{new}`: its default is the same")
            continue
        if type(value) is not check:
            raise ConfigError(name, f"should be {word}, not {shown(value)}")
        draft.done.config[new] = literal(value) if isinstance(value, str) else value
        draft.say(name, "mapped", f"`{new}`", part=new)
    tails = draft.flag("save_unfull_chunk")
    if "save_unfull_chunk" in draft.given and not tails:
        draft.done.config["save_tails"] = False
    part = "" if tails else "save_tails"
    draft.say("save_unfull_chunk", "mapped", "`save_tails`: in pieces of a chunk", part=part)
    for name, observer in (("enable_kv_events", "events_zmq"), ("internal_api_server_enabled", "prometheus")):
        if draft.flag(name):
            draft.done.config.setdefault("observers", []).append(observer)
            draft.say(name, "mapped", f"`observers: [{observer}]`", part="observers")
        else:
            draft.say(name, "not needed", f"off, as without the observer `{observer}`")


def _memory(draft: Draft) -> None:
    if draft.flag("local_cpu"):
        size = gibibytes(draft.number("max_local_cpu_size"))
        draft.tier(("local_cpu", "max_local_cpu_size"), type="memory", capacity=size)
    else:
        draft.say("local_cpu", "mapped", "no tier `memory`")
        draft.say("max_local_cpu_size", "not needed", "goes with local_cpu")


def _disk(draft: Draft) -> None:
    path, size = draft.text("local_disk"), draft.number("max_local_disk_size")
    if not path:
        draft.say("local_disk", "not needed", "no disk")
        draft.say("max_local_disk_size", "not needed", "goes with local_disk")
        return
    first, *more = [one.strip().removeprefix("file://") for one in path.split(",")]
    if not first:
        raise ConfigError("local_disk", "names no directory")
    bound = {"capacity": gibibytes(size)} if size else {}
    draft.tier(("local_disk", "max_local_disk_size"), type="disk", path=literal(first), **bound)
    if not first.startswith(("/", "~")):
        draft.done.note("local_disk", "this path begins where the new file is, LMCache's in the working directory")
    if more:
        draft.row("local_disk.others", "no counterpart", "a disk tier has one directory")


def _everywhere(draft: Draft) -> None:
    """Take up the fields that every stored tier has."""
    stored = [block for block in draft.done.config["tiers"] if block["type"] != "memory"]
    seconds = draft.number("blocking_timeout_secs")
    if seconds != MAPPED["blocking_timeout_secs"]:
        for block in stored:
            block["deadline"] = f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"
            if block["type"] != "disk" and 0 < seconds < _TIMEOUT:  # a start would warn of it
                block["timeout"] = block["deadline"]
    draft.say("blocking_timeout_secs", "mapped" if stored else "not needed", "the `deadline` of each stored tier")
    _policy(draft, [block for block in stored if "capacity" in block])
    place = draft.text("store_location").lower()
    if not place:
        draft.say("store_location", "not needed", "every tier is written")
    elif _LOCATIONS.get(place) not in {block["type"] for block in draft.done.config["tiers"]}:
        text = "no tier has that name; `write: never` keeps a tier from being written"
        draft.say("store_location", "no counterpart", text)
    else:
        for block in stored:
            if block["type"] != _LOCATIONS[place]:
                block["write"] = "never"
        draft.say("store_location", "mapped", "`write: never` for the other stored tiers")


def _policy(draft: Draft, bounded: Sequence[dict[str, Any]]) -> None:
    word = draft.text("cache_policy").lower() or "lru"
    if word not in _POLICIES:
        text = "what was used last stays longest (`policy: lru`), or most often"
        draft.say("cache_policy", "no counterpart", text)
        return
    for block in bounded if word != "lru" else ():
        block["policy"] = _POLICIES[word]
    text = f"`policy: {_POLICIES[word]}` of stored tiers with a `capacity`; in memory the last used stays"
    draft.say("cache_policy", "mapped", text)


def _others(draft: Draft) -> None:
    for name, value in draft.given.items():
        known = NOT_MAPPED.get(name)
        if known is None and name not in MAPPED:
            near = difflib.get_close_matches(name, [*MAPPED, *NOT_MAPPED], 1)
            draft.say(name, "unknown", f"no field of LMCache 0.5{f'; did you mean {near[0]!r}?' if near else ''}")
        elif known is not None and name not in draft.taken:
            default = value == known.default
            text = known.why if not default or known.default is None else f"its default; {known.why}"
            draft.say(name, "not needed" if default else known.outcome, text)


def _end(draft: Draft) -> None:
    """The order of the rows, and what only all fields together say."""
    done, order = draft.done, {name: place for place, name in enumerate(draft.given)}
    done.rows.sort(key=lambda row: order.get(row.field, order.get(row.field.partition(".")[0], len(order))))
    if done.config["connector"] == "vllm" and any(
        block.get("serializer") == "cachegen" for block in done.config["tiers"]
    ):
        done.config["connector"] = "vllm_blob"  # vLLM's pages as they are can only be packed without loss
        done.sources["connector"] = ["remote_serde"]
    if not done.config["tiers"]:
        raise ConfigError("local_cpu", "no tier is left: kvloom keeps KV in memory, on a disk or in a store")


def _wrong(done: Imported) -> list[ConfigError]:
    """The reasons why it is no configuration, whatever plugins are installed, each with the names of its fields."""
    try:
        EngineConfig.load(done.tried())
    except ConfigError as error:
        first, *rest = error.problem.splitlines()
        problems = [(error.path, first), *(line.split(": ", 1) for line in rest if ": " in line)]
        return [ConfigError(_origin(done, path.split(".")), f"as `{path}`: {text}") for path, text in problems]
    return []


def _origin(done: Imported, path: Sequence[str]) -> str:
    """Return the fields that a place in the configuration comes from."""
    part = path[0]
    if part == "tiers" and len(path) > 1 and path[1].isdecimal():
        kind = done.config["tiers"][int(path[1])]["type"]
        if path[2:] in (["deadline"], ["timeout"]):
            return "blocking_timeout_secs"
        if (kind, ".".join(path[2:])) in _SETTINGS:
            return _SETTINGS[kind, path[2]]
        part = f"tiers/{kind}"
    return ", ".join(done.sources.get(part, ())) or part
