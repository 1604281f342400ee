"""`extra_config`: what clients of LMCache's stores are told, as settings of the tier or environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvloom import ConfigError, is_secret
from kvloom_lmcache.addresses import address
from kvloom_lmcache.draft import Draft, literal, shown

_MOONCAKE = {
    "local_hostname": "local_host", "metadata_server": "metadata", "protocol": "protocol", "device_name": "device",
    "global_segment_size": "segment", "local_buffer_size": "buffer", "master_server_address": "master",
}  # fmt: skip
_REDIS = {f"{store}_{setting}": setting for store in ("redis", "valkey") for setting in ("username", "password")}
_AWS = {name: name.upper() for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")}
_NEEDLESS = {
    "save_chunk_meta": "every blob says what it is",
    "s3_num_io_threads": "the client chooses its threads; the tier's `threads` bound its requests",
    "s3_prefer_http2": "the client chooses",
    "s3_use_path_style": "what has an endpoint of its own is asked in that style",
}
_SECRET = "is a secret that no setting takes; see where the tier's plugin looks for it (docs/use/security.md)"
_UNKNOWN = "not known; see the settings of the tier's plugin"


def add_extra(draft: Draft) -> None:
    """Raises ConfigError for what is not a block, or holds something that is not a setting. No value is ever shown."""
    extra = draft.values["extra_config"]
    if extra is None:
        draft.say("extra_config", "not needed", "empty")
        return
    if not isinstance(extra, Mapping):
        raise ConfigError("extra_config", f"should be a block of settings, not {shown(extra)}")
    if not extra:
        draft.say("extra_config", "mapped", "empty")
    for name, value in extra.items():
        row = f"extra_config.{name}"
        if value is None or value == "":
            draft.row(row, "not needed", "empty")
        elif not any(add(draft, row, str(name), value) for add in (_mooncake, _redis, _objects)):
            _rest(draft, row, str(name))


def _plain(row: str, value: Any) -> Any:
    if not isinstance(value, str | int | float):
        raise ConfigError(row, f"should be text or a number, not {shown(value)}")
    return literal(value) if isinstance(value, str) else value


def _mooncake(draft: Draft, row: str, name: str, value: Any) -> bool:
    pool = draft.done.tier("mooncake")
    if pool is None or name not in _MOONCAKE:
        return False
    setting = _MOONCAKE[name]
    if isinstance(value, str) and "@" in value:
        found = address(value if "://" in value else f"{setting}://{value}", field=row)
        scheme = f"{found.scheme}://" if "://" in value else ""
        password = draft.secret(f"MOONCAKE_{setting.upper()}_PASSWORD", f"the password in {row}")
        pool[setting] = f"{literal(scheme + found.user)}:{password}@{literal(found.place + found.path)}"
    else:
        pool[setting] = _plain(row, value)
    draft.row(row, "mapped", f"`{setting}` of the tier `mooncake`", part="tiers/mooncake")
    return True


def _redis(draft: Draft, row: str, name: str, value: Any) -> bool:
    tier = draft.done.tier("redis")
    if tier is None or name not in _REDIS:
        return False
    setting = _REDIS[name]
    if setting in tier:
        draft.row(row, "not needed", f"remote_url has a {setting} already")
        return True
    plain = _plain(row, value)
    tier[setting] = plain if setting == "username" else draft.secret("REDIS_PASSWORD", f"the password in {row}")
    draft.row(row, "mapped", f"`{setting}` of the tier `redis`", part="tiers/redis")
    return True


def _objects(draft: Draft, row: str, name: str, value: Any) -> bool:
    """S3: its client takes keys from the environment, and everything else from `options`."""
    tier = draft.done.tier("fsspec")
    if tier is None or not tier["url"].startswith("s3://"):
        return False
    if name in _AWS:
        draft.secret(_AWS[name], f"what {row} is")
        draft.row(row, "mapped", f"the environment variable {_AWS[name]}, where the client looks for it")
    elif name == "s3_region":
        tier["options"] = {**tier.get("options", {}), "region": _plain(row, value)}
        draft.row(row, "mapped", "`options.region` of the tier `fsspec`", part="tiers/fsspec")
    elif name == "s3_file_prefix":
        tier["url"] = f"{tier['url'].rstrip('/')}/{str(_plain(row, value)).strip('/')}"
        draft.row(row, "mapped", "the end of the tier's `url`", part="tiers/fsspec")
    elif name == "disable_tls":
        _without_tls(draft, row, tier, value)
    else:
        return False
    return True


def _without_tls(draft: Draft, row: str, tier: dict[str, Any], value: Any) -> None:
    endpoint = tier.get("options", {}).get("endpoint")
    if value is False or endpoint is None:
        text = "off" if value is False else "goes with a server that is not Amazon's"
        draft.row(row, "not needed", text)
        return
    if value is not True:
        raise ConfigError(row, f"should be true or false, not {shown(value)}")
    tier["options"] = {**tier["options"], "endpoint": endpoint.replace("https://", "http://", 1)}
    tier["allow_http"] = True
    draft.row(row, "mapped", "`allow_http` of the tier `fsspec`", part="tiers/fsspec")


def _rest(draft: Draft, row: str, name: str) -> None:
    if name in _NEEDLESS:
        draft.row(row, "not needed", _NEEDLESS[name])
    else:
        draft.row(row, "no counterpart", _SECRET if is_secret(name) or name in _AWS else _UNKNOWN)
