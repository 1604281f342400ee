"""LMCache's remote store as a tier: `remote_url` with its serde, the pool of peers, and what `extra_config` adds."""

from __future__ import annotations

import re
from typing import Any

from kvloom_lmcache.addresses import Address, address, bucket
from kvloom_lmcache.draft import Draft, literal

_STORES = {"redis": "redis", "rediss": "redis", "s3": "fsspec", "gs": "fsspec", "az": "fsspec", "file": "fsspec"}
_SERDES = {
    None: "raw",
    "naive": "raw",
    "fast": "raw",
    "cachegen": "cachegen",
    "torch": "torch",
    "safetensor": "safetensors",
}
_SCHEMES = {word: word for word in _STORES} | {"lm": "redis", "valkey": "redis", "redis-sentinel": "redis+sentinel"}
"""Schemes of LMCache's URLs, each with kvloom's."""
_MASTER = re.compile(r"mooncake://([^@/\s]+:[0-9]+)/*", re.IGNORECASE)
"""An address without the scheme is what it is in LMCache, such as a Redis: nothing there speaks Mooncake."""
_KEYS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
"""Environment variables in which the clients of object stores look for user and password."""
_PLAIN_DISK = "no remote store, and LMCache encodes nothing that it writes to its disk"
_LOST_QUERY = "what stands behind its '?' is not taken over; see the settings of the tier's plugin"


def gibibytes(value: float) -> str:
    """A size as YAML has it."""
    return f"{int(value)}GiB" if value == int(value) else f"{round(value * 1024)}MiB"


def add_remote(draft: Draft) -> None:
    """`remote_url` and `remote_serde`. Raises ConfigError, which never quotes the URL."""
    url = draft.text("remote_url")
    if not url:
        for name in ("remote_url", "remote_serde"):
            draft.say(name, "not needed", "no remote store")
        serde = _SERDES.get(draft.text("remote_serde") or None, "raw")
        if serde != "raw" and draft.text("local_disk"):
            draft.say("remote_serde", "not needed", f"{_PLAIN_DISK}; `serializer: {serde}` in the tier `disk` would")
        return
    found = address(url, field="remote_url")
    if found.scheme == "mooncakestore":
        block = {"type": "mooncake", "master": literal(found.place)}
    elif found.scheme == "fs":
        block = {"type": "fsspec", "url": literal(f"file://{found.path or '/' + found.place}")}
    elif found.scheme in _SCHEMES:
        block = _redis(draft, found) if _STORES.get(found.scheme, "redis") == "redis" else _objects(draft, found)
    else:
        known = ", ".join(f"{word}://" for word in (*_SCHEMES, "fs", "mooncakestore") if word != "lm")
        draft.say("remote_url", "no counterpart", f"there is no plugin for {found.scheme}://; there is for {known}")
        draft.say("remote_serde", "no counterpart", "goes with remote_url")
        return
    kind = block["type"]
    tier = draft.tier(("remote_url",), **block)
    draft.say("remote_serde", "mapped", f"the `serializer` of the tier `{kind}`", part=f"tiers/{kind}")
    tier["serializer"] = _serde(draft)
    if found.scheme == "lm":
        text = "LMCache's own server is none that kvloom speaks to: run a Redis at this address, for the tier `redis`"
        draft.row("remote_url.server", "no counterpart", text)
    if found.query:
        draft.row("remote_url.query", "no counterpart", _LOST_QUERY)
    if found.password and found.scheme in ("mooncakestore", "fs", "file"):
        draft.row("remote_url.login", "no counterpart", f"{found.scheme}:// takes none")


def _redis(draft: Draft, found: Address) -> dict[str, Any]:
    block = {"type": "redis", "url": literal(f"{_SCHEMES[found.scheme]}://{found.place}{found.path}")}
    if found.user:
        block["username"] = literal(found.user)
    if found.password:
        what = "the password in remote_url" + (", with what its %-escapes stand for" if found.escaped else "")
        block["password"] = draft.secret("REDIS_PASSWORD", what)
    return block


def _objects(draft: Draft, found: Address) -> dict[str, Any]:
    """Object stores take no login from a configuration: their clients look into the environment."""
    for name, what in zip(_KEYS.get(found.scheme, ("", "")), ("user", "password"), strict=True):
        if name and found.password:
            draft.secret(name, f"the {what} in remote_url")
    if found.scheme == "gs" and found.password:
        draft.secret("GOOGLE_APPLICATION_CREDENTIALS", "the path of a file with what logs in, instead of remote_url's")
    if found.scheme != "s3":
        return {"type": "fsspec", "url": literal(f"{found.scheme}://{found.place}{found.path}")}
    place = bucket(found)
    block: dict[str, Any] = {"type": "fsspec", "url": literal(place.url)}
    options = {"region": place.region, "endpoint": place.endpoint and f"https://{place.endpoint}"}
    if any(options.values()):
        block["options"] = {name: literal(value) for name, value in options.items() if value}
    return block


def _serde(draft: Draft) -> str:
    word = draft.text("remote_serde") or None
    if word not in _SERDES:
        known = ", ".join(filter(None, _SERDES))
        draft.row("remote_serde", "no counterpart", f"KV is stored as it is: there is no such serde; known: {known}")
        return "raw"
    return _SERDES[word]


def add_pool(draft: Draft) -> None:
    """Peers: `enable_p2p`, `lookup_url`, and `p2p_host`, which older configurations call `distributed_url`."""
    names = ("enable_p2p", "lookup_url")
    if not draft.flag("enable_p2p"):
        draft.say("enable_p2p", "not needed", "off")
        draft.say("lookup_url", "not needed", "goes with enable_p2p")
        return
    found = _MASTER.fullmatch(draft.text("lookup_url"))
    if found is None:
        why = "peers share a pool: where Mooncake's master runs, write lookup_url: mooncake://HOST:PORT"
        draft.say("enable_p2p", "no counterpart", f"{why} (docs/use/mooncake.md)")
        draft.say("lookup_url", "no counterpart", "goes with enable_p2p")
        return
    master, size = literal(found[1]), gibibytes(draft.number("max_local_cpu_size"))
    pool = draft.done.tier("mooncake")
    if pool is None:
        pool = draft.tier(names, type="mooncake", master=master, segment=size)
    elif pool["master"] != master:
        for name in names:
            draft.say(name, "no counterpart", f"one pool, not two: remote_url names another, {pool['master']}")
        return
    else:
        pool["segment"] = size
        for name in names:
            draft.say(name, "mapped", "the tier `mooncake` of remote_url", part="tiers/mooncake")
    _serve_from(draft, pool)


def _serve_from(draft: Draft, pool: dict[str, Any]) -> None:
    """Take up the address at which peers reach this process; `distributed_url` had a scheme and a port, too."""
    host = draft.given.get("p2p_host")
    if isinstance(host, str) and host:
        place = host.strip().rpartition("://")[2].rpartition("@")[2].partition("/")[0]
        pool["local_host"] = literal(place.rpartition(":")[0] if place.rpartition(":")[2].isdecimal() else place)
        text = "`local_host` of the tier `mooncake`; the client chooses the port"
        draft.say("p2p_host", "mapped", text, part="tiers/mooncake")
        draft.taken.add("p2p_host")
