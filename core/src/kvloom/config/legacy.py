"""LMCache's arguments as settings of kvloom, for `from_defaults` and `from_legacy`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvloom.errors import ConfigError

DISK_PATH = "~/.cache/kvloom"
"""Directory of the disk tier that `from_legacy` makes: LMCache has no argument for it."""

BACKENDS = {
    "cpu": {"memory"},
    "local_disk": {"disk"},
    "local_cpu_disk": {"memory", "disk"},
    "remote": {"remote"},
    "local_cpu_remote": {"memory", "remote"},
    "local_disk_remote": {"disk", "remote"},
    "local_cpu_disk_remote": {"memory", "disk", "remote"},
}
"""Values of `from_legacy`'s `backend`, and the tiers that each stands for."""

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
"""LMCache's arguments by name."""


class Field(NamedTuple):
    """One argument of LMCache's."""

    default: Any
    becomes: str
    """The setting of kvloom that takes its place, for messages."""


FIELDS: Mapping[str, Field] = {
    "chunk_size": Field(256, "'chunk_tokens'"),
    "local_cpu": Field(True, "the tier `memory`"),
    "max_local_cpu_size": Field(5.0, "the `capacity` of the tier `memory`"),
    "local_disk": Field(None, "a tier `{type: disk, path: ...}`"),
    "max_local_disk_size": Field(0, "the `capacity` of the tier `disk`, none if 0"),
    # LMCache's own default, lm://localhost:65432, counts only where from_legacy says remote.
    "remote_url": Field(None, "a tier such as `{type: redis, url: ...}`"),
    "remote_serde": Field("naive", "a tier's `serializer`"),
    "save_decode_cache": Field(False, "'save_decode_cache'"),
    "enable_blending": Field(False, "a `blend` block"),
    "blend_recompute_ratio": Field(0.15, "`blend.recompute_ratio`"),
    "blend_min_tokens": Field(256, "`blend.min_tokens`"),
    "enable_p2p": Field(False, "a tier `{type: mooncake, master: ..., segment: ...}`"),
    "lookup_url": Field(None, "the `master` of a tier `mooncake`"),
    "distributed_url": Field(None, "the `local_host` of a tier `mooncake`"),
    "error_handling": Field(False, "always on"),
}

_ABOUT_TIERS = frozenset(
    ["local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size", "remote_url", "remote_serde", "enable_p2p"]
)
_MASTER = re.compile(r"mooncake://([^@/\s]+:[0-9]+)/*", re.IGNORECASE)


def translate(given: Fields) -> dict[str, Any]:
    """Return the settings that `given` stands for; arguments left out have LMCache's defaults.

    There are no `tiers` among them unless an argument is about tiers. Raises ConfigError with LMCache's name of the
    argument.
    """
    fields = {name: field.default for name, field in FIELDS.items()} | dict(given)
    renamed = {"chunk_size": "chunk_tokens", "save_decode_cache": "save_decode_cache"}
    config = {new: given[name] for name, new in renamed.items() if name in given}
    if fields["enable_blending"]:
        config["blend"] = {
            "executor": "cacheblend",
            "retriever": "separator",
            "recompute_ratio": fields["blend_recompute_ratio"],
            "min_tokens": fields["blend_min_tokens"],
        }
    if not _ABOUT_TIERS.isdisjoint(given):
        config["tiers"] = list(_tiers(fields))
    return config


def local_fields(backend: str, fields: Fields) -> dict[str, Any]:
    """Return the arguments of `from_legacy` as those of `from_defaults`, without the tiers that `backend` lacks."""
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


def _tiers(fields: Fields) -> Iterator[dict[str, Any]]:
    """Yield the tiers, fast to slow."""
    if fields["local_cpu"]:
        yield {"type": "memory", "capacity": _gibibytes("max_local_cpu_size", fields)}
    if path := fields["local_disk"]:
        if not isinstance(path, str):
            raise ConfigError("local_disk", f"should be a directory, not {path!r}")
        size = _gibibytes("max_local_disk_size", fields)
        yield {"type": "disk", "path": path.removeprefix("file://"), **({"capacity": size} if size else {})}
    if url := fields["remote_url"]:
        scheme, serde = urlsplit(url).scheme, fields["remote_serde"]
        if scheme not in STORES:
            raise ConfigError("remote_url", f"no store for {scheme}://; known: {', '.join(STORES)}; or write a tier")
        if serde not in SERDES:
            known = ", ".join(filter(None, SERDES))
            raise ConfigError(
                "remote_serde", f"no serde {serde!r}; known: {known}; or write a tier with a `serializer`"
            )
        url = "redis" + url.removeprefix("lm") if scheme == "lm" else url
        yield {"type": STORES[scheme], "url": url, "serializer": SERDES[serde]}
    if fields["enable_p2p"]:
        yield _pool(fields)


def _pool(fields: Fields) -> dict[str, Any]:
    """Return the tier by which peers share memory: LMCache's serve each other, kvloom's share Mooncake Store."""
    master = _MASTER.fullmatch(str(fields["lookup_url"] or "").strip())
    if master is None:
        raise ConfigError(
            "lookup_url",
            "enable_p2p needs Mooncake's master, and LMCache's lookup server is none: start mooncake_master, and write "
            "mooncake://HOST:PORT",
        )
    pool = {"type": "mooncake", "master": master[1], "segment": _gibibytes("max_local_cpu_size", fields)}
    host, _, _ = str(fields["distributed_url"] or "").rpartition("://")[2].rpartition(":")
    return {**pool, **({"local_host": host} if host else {})}


def _gibibytes(name: str, fields: Fields) -> int:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(name, f"should be a number of GiB, not {value!r}")
    return int(value * (1 << 30))
