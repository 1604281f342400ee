"""LMCache's fields to kvloom's configuration, with a row for each that says what became of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvloom.errors import ConfigError
from kvloom.legacy import SERDES, STORES
from kvloom.migration.fields import ALIASES, MAPPED, NOT_MAPPED, Outcome, Row

_LOCATIONS = {
    "localcpubackend": "memory", "localdiskbackend": "disk", "remotebackend": "redis", "s3backend": "fsspec",
}  # fmt: skip
_SCHEMES = {word: word for word in STORES} | {"lm": "redis", "valkey": "redis", "redis-sentinel": "redis+sentinel"}
"""Schemes of LMCache's URLs, each with kvloom's."""
_POLICIES = {"lru": "lru", "lfu": "tiny_lfu"}
_MOONCAKE = {
    "local_hostname": "local_host", "metadata_server": "metadata", "protocol": "protocol", "device_name": "device",
    "global_segment_size": "segment", "local_buffer_size": "buffer", "master_server_address": "master",
}  # fmt: skip
"""What `extra_config` has of Mooncake, and what it is in a tier."""
_NO_FIELDS = {"LMCACHE_CONFIG_FILE", "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_LOG_LEVEL", "LMCACHE_FORCE_SKIP_SAVE"}
"""Variables that are read beside the configuration."""
_SEPARATOR = "blend.retriever.separator: the token ids of blend_special_str: give --tokenizer, or write them"


@dataclass(slots=True)
class Imported:
    """A configuration in the making."""

    config: dict[str, Any] = field(default_factory=dict)
    """As YAML has it."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Which fields each part comes from: `chunk_tokens`, or `tiers/disk`."""
    rows: list[Row] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Nothing was left behind that meant something."""
        return not any(row.outcome in ("no counterpart", "unknown") for row in self.rows)

    def tier(self, kind: str) -> dict[str, Any] | None:
        return next((block for block in self.config.get("tiers", ()) if block["type"] == kind), None)


class _Import:
    """One run over the fields."""

    def __init__(self, given: Mapping[str, Any], connector: str, separator: Sequence[int] | None) -> None:
        self.given = given
        self.values = {**MAPPED, **given}
        self.separator = separator
        self.done = Imported({"connector": connector, "tiers": []})

    def say(self, name: str, outcome: Outcome, text: str, *, part: str = "") -> None:
        """A row for a field that was given. part: of the new configuration, that comes from it."""
        if name in self.given:
            self.done.rows.append(Row(name, self.given[name], outcome, text))
            if part:
                self.done.sources.setdefault(part, []).append(name)

    def number(self, name: str) -> float:
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(name, f"should be a number, not {value!r}")
        return value

    def run(self) -> Imported:
        self._plain()
        self._memory()
        self._disk()
        self._remote()
        self._pool()
        self._extra()
        self._everywhere()
        self._blend()
        self._others()
        order = {name: place for place, name in enumerate(self.given)}
        self.done.rows.sort(key=lambda row: order.get(row.field, order.get(row.field.partition(".")[0], len(order))))
        if self.done.config["connector"] == "vllm" and any(
            block.get("serializer") == "cachegen" for block in self.done.config["tiers"]
        ):
            self.done.config["connector"] = "vllm_blob"  # vLLM's pages as they are can only be packed without loss
            self.done.sources["connector"] = ["remote_serde"]
        if not self.done.config["tiers"]:
            raise ConfigError("local_cpu", "no tier is left: kvloom keeps KV in memory, on a disk or in a store")
        return self.done

    def _plain(self) -> None:
        for name, new, check in (
            ("lmcache_instance_id", "instance_id", str), ("chunk_size", "chunk_tokens", int),
            ("save_decode_cache", "save_decode_cache", bool),
        ):  # fmt: skip
            value = self.given.get(name)
            if value is None or value == MAPPED[name]:
                self.say(name, "not needed" if value is None else "mapped", f"`{new}`: its default is the same")
                continue
            if type(value) is not check:
                raise ConfigError(name, f"should be {check.__name__}, not {value!r}")
            self.done.config[new] = value
            self.say(name, "mapped", f"`{new}`", part=new)
        for name, observer in (("enable_kv_events", "events_zmq"), ("internal_api_server_enabled", "prometheus")):
            if self.values[name]:
                self.done.config.setdefault("observers", []).append(observer)
                self.say(name, "mapped", f"`observers: [{observer}]`", part="observers")
            else:
                self.say(name, "not needed", f"off, as without the observer `{observer}`")

    def _tier(self, part: str, names: Sequence[str], **block: Any) -> None:
        self.done.config["tiers"].append(block)
        for name in names:
            self.say(name, "mapped", f"the tier `{block['type']}`", part=f"tiers/{part}")

    def _memory(self) -> None:
        if not isinstance(self.values["local_cpu"], bool):
            raise ConfigError("local_cpu", f"should be true or false, not {self.values['local_cpu']!r}")
        if self.values["local_cpu"]:
            size = _gibibytes(self.number("max_local_cpu_size"))
            self._tier("memory", ("local_cpu", "max_local_cpu_size"), type="memory", capacity=size)
        else:
            self.say("local_cpu", "mapped", "no tier `memory`")
            self.say("max_local_cpu_size", "not needed", "goes with local_cpu")

    def _disk(self) -> None:
        path = self.values["local_disk"]
        size = self.number("max_local_disk_size")
        if not path:
            self.say("local_disk", "not needed", "no disk")
            self.say("max_local_disk_size", "not needed", "goes with local_disk")
            return
        if not isinstance(path, str):
            raise ConfigError("local_disk", f"should be a directory, not {path!r}")
        first, *more = [one.strip().removeprefix("file://") for one in path.split(",")]
        bound = {"capacity": _gibibytes(size)} if size else {}
        self._tier("disk", ("local_disk", "max_local_disk_size"), type="disk", path=first, **bound)
        if more:
            self.done.rows.append(Row("local_disk.others", more, "no counterpart", "a disk tier has one directory"))

    def _remote(self) -> None:
        url = self.values["remote_url"]
        if not url:
            for name in ("remote_url", "remote_serde"):
                self.say(name, "not needed", "no remote store")
            return
        if not isinstance(url, str):
            raise ConfigError("remote_url", f"should be a URL, not {url!r}")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError("remote_url", f"is no URL: {error}") from None
        scheme = parts.scheme
        if scheme == "mooncakestore":
            master = parts.netloc
            self._tier("mooncake", ("remote_url",), type="mooncake", master=master, serializer=self._serde())
        elif scheme == "fs":
            self._tier("fsspec", ("remote_url",), type="fsspec", url=_file_url(url), serializer=self._serde())
        elif scheme in _SCHEMES:
            new = _SCHEMES[scheme] + url.removeprefix(scheme)
            kind = STORES.get(scheme, "redis")
            self._tier(kind, ("remote_url",), type=kind, url=new, serializer=self._serde())
            if scheme == "lm":
                self.say("remote_url", "mapped", "LMCache's own server has no counterpart: run a Redis at this address")
        else:
            known = ", ".join(f"{word}://" for word in (*_SCHEMES, "fs", "mooncakestore"))
            self.say("remote_url", "no counterpart", f"there is no plugin for {scheme}://; there is for {known}")
            self.say("remote_serde", "no counterpart", "goes with remote_url")
            return
        kind = self.done.config["tiers"][-1]["type"]
        self.say("remote_serde", "mapped", f"the `serializer` of the tier `{kind}`", part=f"tiers/{kind}")

    def _serde(self) -> str:
        word = self.values["remote_serde"]
        if not isinstance(word, str | None):
            raise ConfigError("remote_serde", f"should be a word, not {word!r}")
        if word not in SERDES:
            known = ", ".join(filter(None, SERDES))
            self.done.rows.append(Row("remote_serde", word, "no counterpart", f"stored as it is; there are {known}"))
            return "raw"
        return SERDES[word]

    def _pool(self) -> None:
        if not self.values["enable_p2p"]:
            self.say("enable_p2p", "not needed", "off")
            self.say("lookup_url", "not needed", "goes with enable_p2p")
            return
        # Whatever else it names is LMCache's own, such as a Redis: nobody there speaks Mooncake.
        scheme, _, rest = str(self.values["lookup_url"] or "").partition("://")
        master = rest.partition("/")[0]
        if scheme != "mooncake" or ":" not in master:
            why = (
                "peers share a pool, {type: mooncake, master: HOST:PORT}: name Mooncake's master (docs/use/mooncake.md)"
            )
            self.say("enable_p2p", "no counterpart", why)
            self.say("lookup_url", "no counterpart", "goes with enable_p2p")
            return
        size = _gibibytes(self.number("max_local_cpu_size"))
        pool = self.done.tier("mooncake")
        if pool is None:
            self._tier("mooncake", ("enable_p2p", "lookup_url"), type="mooncake", master=master, segment=size)
            return
        if pool["master"] != master:
            for name in ("enable_p2p", "lookup_url"):
                self.say(name, "no counterpart", f"one pool, not two: remote_url names another, {pool['master']}")
            return
        pool["segment"] = size
        for name in ("enable_p2p", "lookup_url"):
            self.say(name, "mapped", "the tier `mooncake` of remote_url", part="tiers/mooncake")

    def _extra(self) -> None:
        extra = self.values["extra_config"]
        if extra is None:
            self.say("extra_config", "not needed", "empty")
            return
        if not isinstance(extra, Mapping):
            raise ConfigError("extra_config", f"should be a mapping, not {extra!r}")
        pool = self.done.tier("mooncake")
        for name, value in extra.items():
            row = f"extra_config.{name}"
            if pool is not None and name in _MOONCAKE:
                pool[_MOONCAKE[name]] = value
                self.done.sources.setdefault("tiers/mooncake", []).append(row)
                text = f"`{_MOONCAKE[name]}` of the tier `mooncake`"
                self.done.rows.append(Row(row, value, "mapped", text))
            elif str(name).startswith("aws_") or "secret" in str(name) or "password" in str(name):
                text = "secrets come from the environment, or as ${env:NAME} (docs/use/security.md)"
                self.done.rows.append(Row(row, "...", "no counterpart", text))
            else:
                self.done.rows.append(
                    Row(row, value, "no counterpart", "not known; see the settings of the tier's plugin")
                )

    def _everywhere(self) -> None:
        """What every stored tier has."""
        stored = [block for block in self.done.config["tiers"] if block["type"] != "memory"]
        seconds = self.number("blocking_timeout_secs")
        if seconds != MAPPED["blocking_timeout_secs"]:
            for block in stored:
                block["deadline"] = f"{seconds:g}s"
        self.say("blocking_timeout_secs", "mapped" if stored else "not needed", "the `deadline` of each stored tier")
        policy = str(self.values["cache_policy"]).lower()
        if policy not in _POLICIES:
            self.say(
                "cache_policy", "no counterpart", "what was used last stays longest (`policy: lru`), or most often"
            )
        else:
            bounded = [block for block in stored if "capacity" in block]
            for block in bounded if policy != "lru" else ():
                block["policy"] = _POLICIES[policy]
            text = f"`policy: {_POLICIES[policy]}` of stored tiers with a `capacity`; in memory the last used stays"
            self.say("cache_policy", "mapped", text)
        place = self.values["store_location"]
        if place is None:
            self.say("store_location", "not needed", "every tier is written")
        elif _LOCATIONS.get(str(place).lower()) not in {block["type"] for block in self.done.config["tiers"]}:
            self.say(
                "store_location",
                "no counterpart",
                "no tier has that name; `write: never` keeps a tier from being written",
            )
        else:
            for block in stored:
                if block["type"] != _LOCATIONS[str(place).lower()]:
                    block["write"] = "never"
            self.say("store_location", "mapped", "`write: never` for the other stored tiers")

    def _blend(self) -> None:
        names = [name for name in MAPPED if "blend" in name]
        if not self.values["enable_blending"]:
            for name in names:
                self.say(name, "not needed", "blending is off")
            return
        ratios = self.values["blend_recompute_ratios"]
        ratio = ratios[0] if isinstance(ratios, list) and ratios else self.values["blend_recompute_ratio"]
        block: dict[str, Any] = {"executor": "cacheblend"}
        if ratio is not None:
            block["recompute_ratio"] = ratio
        if self.values["blend_check_layers"]:
            block["check_layers"] = self.values["blend_check_layers"]
        if self.values["blend_min_tokens"] != MAPPED["blend_min_tokens"]:
            block["min_tokens"] = self.values["blend_min_tokens"]
        if self.separator is None:
            for name in names:
                self.say(
                    name, "no counterpart", _SEPARATOR if name == "enable_blending" else "goes with enable_blending"
                )
            return
        self.done.config["blend"] = {**block, "retriever": {"type": "separator", "separator": list(self.separator)}}
        for name in names:
            self.say(name, "mapped", "the block `blend`", part="blend")

    def _others(self) -> None:
        for name, value in self.given.items():
            known = NOT_MAPPED.get(name)
            if known is not None:
                outcome = "not needed" if value == known.default else known.outcome
                self.say(
                    name,
                    outcome,
                    known.why if value != known.default or known.default is None else f"its default; {known.why}",
                )
            elif name not in MAPPED:
                near = difflib.get_close_matches(name, [*MAPPED, *NOT_MAPPED], 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                self.say(name, "unknown", f"no field of LMCache 0.5{hint}")


def import_config(
    source: Mapping[str, Any], *, connector: str = "vllm", separator: Sequence[int] | None = None
) -> Imported:
    """source: the fields of an LMCache file. connector: the engine's. separator: token ids of its blend_special_str.

    Raises ConfigError, naming the field, for a value of another type than it has there.
    """
    given: dict[str, Any] = {}
    for name, value in source.items():
        if not isinstance(name, str):
            raise ConfigError(str(name), "should be the name of a field")
        new = ALIASES.get(name, name)
        if new != name and new in source:
            raise ConfigError(name, f"is the older name of {new!r}, which is given too; leave one of them out")
        given[new] = value
    return _Import(given, connector, separator).run()


def import_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields that LMCACHE_ variables set, with values as YAML has them.

    Raises ConfigError, naming the variable, for a value that YAML cannot read.
    """
    import yaml

    prefix, fields = "LMCACHE_", {}
    for name, text in environment.items():
        if not name.startswith(prefix) or name in _NO_FIELDS:
            continue
        try:
            fields[name.removeprefix(prefix).lower()] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(name, "is no YAML") from None
    return fields


def _gibibytes(value: float) -> str:
    """A size as YAML has it."""
    if value == int(value):
        return f"{int(value)}GiB"
    return f"{round(value * 1024)}MiB"


def _file_url(url: str) -> str:
    parts = urlsplit(url)
    return f"file://{parts.path or '/' + parts.netloc}"
