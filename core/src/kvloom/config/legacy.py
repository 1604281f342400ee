"""LMCache's configuration names with their counterparts here, for `from_defaults` and `from_legacy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvloom.errors import ConfigError

DISK_PATH = "~/.cache/kvloom"
"""The directory of `from_legacy`'s disk tier: LMCache has no argument for it."""

BACKENDS = {
    "cpu": {"memory"},
    "local_disk": {"disk"},
    "local_cpu_disk": {"memory", "disk"},
    "remote": {"remote"},
    "local_cpu_remote": {"memory", "remote"},
    "local_disk_remote": {"disk", "remote"},
    "local_cpu_disk_remote": {"memory", "disk", "remote"},
}
"""The words that `from_legacy` takes for `backend`, and the tiers that each stands for."""

SERDES = {
    None: "raw",
    "naive": "raw",
    "fast": "raw",
    "cachegen": "cachegen",
    "torch": "torch",
    "safetensor": "safetensors",
}
STORES = {
    "lm": "redis",
    "redis": "redis",
    "rediss": "redis",
    "s3": "fsspec",
    "gs": "fsspec",
    "az": "fsspec",
    "file": "fsspec",
}

Fields = Mapping[str, Any]
"""Every seed field with its value or default."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of LMCache's config."""

    default: Any
    becomes: str
    """The setting's counterpart in kvloom, for messages."""
    apply: Callable[[Any, Fields, dict[str, Any]], None] | None = None
    """(value, all fields, kvloom config under construction); None where the row of another field takes it up."""


def translate(fields: Fields) -> dict[str, Any]:
    """Seed fields to kvloom settings; those left out keep the seed's defaults.

    No tiers come out unless a field speaks of one. Raises ConfigError, starting with the seed's name of the field.
    """
    values = {name: field.default for name, field in FIELDS.items()} | dict(fields)
    speaks_of_tiers = not _ABOUT_TIERS.isdisjoint(fields)
    config: dict[str, Any] = {"tiers": []} if speaks_of_tiers else {}
    for name, field in FIELDS.items():
        if field.apply and (name in fields or (speaks_of_tiers and name in _ABOUT_TIERS)):
            field.apply(values[name], values, config)
    return config


def local_fields(backend: str, fields: Fields) -> dict[str, Any]:
    """The arguments of `from_legacy` as the fields that the word `backend` stands for."""
    if backend not in BACKENDS:
        raise ConfigError("backend", f"no backend {backend!r}; known: {', '.join(BACKENDS)}")
    tiers = BACKENDS[backend]
    left_out = set()
    if "disk" not in tiers:
        left_out |= {"max_local_disk_size"}
    if "remote" not in tiers:
        left_out |= {"remote_url", "remote_serde"}
    chosen = {name: value for name, value in fields.items() if name not in left_out}
    if "remote" in tiers and not chosen["remote_url"]:
        raise ConfigError("remote_url", f"backend {backend!r} needs one, such as redis://localhost:6379")
    return chosen | {"local_cpu": "memory" in tiers, "local_disk": DISK_PATH if "disk" in tiers else None}


def _renamed(name: str) -> Callable[[Any, Fields, dict[str, Any]], None]:
    def apply(value: Any, fields: Fields, config: dict[str, Any]) -> None:
        config[name] = value

    return apply


def _add_tier(config: dict[str, Any], **block: Any) -> None:
    config["tiers"].append(block)


def _memory(value: Any, fields: Fields, config: dict[str, Any]) -> None:
    if value:
        _add_tier(config, type="memory", capacity=_gibibytes("max_local_cpu_size", fields))


def _disk(value: Any, fields: Fields, config: dict[str, Any]) -> None:
    if not value:
        return
    if not isinstance(value, str):
        raise ConfigError("local_disk", f"should be a directory, not {value!r}")
    size = _gibibytes("max_local_disk_size", fields)
    _add_tier(config, type="disk", path=value.removeprefix("file://"), **({"capacity": size} if size else {}))


def _remote(value: Any, fields: Fields, config: dict[str, Any]) -> None:
    if not value:
        return
    scheme = urlsplit(value).scheme
    if scheme not in STORES:
        raise ConfigError("remote_url", f"no store for {scheme}://; known: {', '.join(STORES)}; or write a tier")
    url = "redis" + value.removeprefix("lm") if scheme == "lm" else value
    _add_tier(config, type=STORES[scheme], url=url, serializer=_serde(fields))


def _serde(fields: Fields) -> str:
    word = fields["remote_serde"]
    if word not in SERDES:
        known = ", ".join(filter(None, SERDES))
        raise ConfigError("remote_serde", f"no serde {word!r}; known: {known}; or write a tier with a `serializer`")
    return SERDES[word]


def _gibibytes(name: str, fields: Fields) -> int:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(name, f"should be a number of GiB, not {value!r}")
    return int(value * (1 << 30))


def _blend(value: Any, fields: Fields, config: dict[str, Any]) -> None:
    if value:
        config["blend"] = {
            "executor": "cacheblend",
            "retriever": "separator",
            "recompute_ratio": fields["blend_recompute_ratio"],
            "min_tokens": fields["blend_min_tokens"],
        }


def mooncake_master(lookup_url: Any) -> str | None:
    """`HOST:PORT` of `mooncake://HOST:PORT`; None for anything else.

    Without the scheme it is LMCache's lookup server, such as a Redis, which is not a Mooncake master.
    """
    scheme, _, rest = str(lookup_url or "").strip().partition("://")
    master = rest.rstrip("/")
    host, _, port = master.rpartition(":")
    plain = host and port.isdecimal() and not set("@/ ") & set(master)
    return master if scheme.lower() == "mooncake" and plain else None


def _pooled(value: Any, fields: Fields, config: dict[str, Any]) -> None:
    """LMCache's peers serve each other from their memory; here they do by Mooncake Store."""
    if not value:
        return
    master = mooncake_master(fields["lookup_url"])
    if master is None:
        raise ConfigError(
            "lookup_url",
            "enable_p2p needs Mooncake's master, not LMCache's lookup server: start mooncake_master, and write "
            "mooncake://HOST:PORT",
        )
    host, _, _ = str(fields["distributed_url"] or "").rpartition("://")[2].rpartition(":")
    block = {"master": master, "segment": _gibibytes("max_local_cpu_size", fields)}
    _add_tier(config, type="mooncake", **block, **({"local_host": host} if host else {}))


FIELDS: Mapping[str, Field] = {
    "chunk_size": Field(256, "'chunk_tokens'", _renamed("chunk_tokens")),
    "local_cpu": Field(True, "the tier `memory`", _memory),
    "max_local_cpu_size": Field(5.0, "the `capacity` of the tier `memory`"),
    "local_disk": Field(None, "a tier `{type: disk, path: ...}`", _disk),
    "max_local_disk_size": Field(0, "the `capacity` of the tier `disk`, none if 0"),
    # LMCache's own default, lm://localhost:65432, counts only where from_legacy says remote.
    "remote_url": Field(None, "a tier such as `{type: redis, url: ...}`", _remote),
    "remote_serde": Field("naive", "a tier's `serializer`"),
    "save_decode_cache": Field(False, "'save_decode_cache'", _renamed("save_decode_cache")),
    "enable_blending": Field(False, "a `blend` block", _blend),
    "blend_recompute_ratio": Field(0.15, "`blend.recompute_ratio`"),
    "blend_min_tokens": Field(256, "`blend.min_tokens`"),
    "enable_p2p": Field(False, "a tier `{type: mooncake, master: ..., segment: ...}`", _pooled),
    "lookup_url": Field(None, "the `master` of a tier `mooncake`"),
    "distributed_url": Field(None, "the `local_host` of a tier `mooncake`"),
    "error_handling": Field(False, "always on"),
}
"""LMCache's fields in the order of its config; tiers come out in this order too, fast to slow."""

_ABOUT_TIERS = frozenset(
    ["local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size", "remote_url", "remote_serde", "enable_p2p"]
)
