"""LMCache's URLs taken apart: where a store is, apart from who logs in there. No message quotes a URL."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kvloom import ConfigError

_PATHS = ("s3", "gs", "az", "fs", "file")
"""Schemes whose paths are names, in which an `@` may stand."""
_AWS = re.compile(r"(?P<bucket>.+)\.s3(?:express-[^.]+)?[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com", re.IGNORECASE)


class Address(NamedTuple):
    """A URL without its secrets."""

    scheme: str
    place: str
    """Host and port, or several; without a login."""
    path: str
    """Behind it, with its first slash."""
    user: str = ""
    password: bool = False
    """True if it holds one."""
    escaped: bool = False
    """True if `%` stands for other characters in it."""
    query: bool = False
    """True if settings stood behind a `?` that are not in here."""


def address(url: str, *, field: str) -> Address:
    """Raises ConfigError, with the name of the field, for text that is not a URL, or whose login is ambiguous."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(field, "is not a URL; write scheme://host:port") from None
    if not url.lower().startswith(f"{parts.scheme}://") or not parts.scheme:
        raise ConfigError(field, "is not a URL; write it with its scheme, such as redis://host:port")
    login, at, place = parts.netloc.rpartition("@")
    rest = parts.path + parts.query + parts.fragment
    if "@" in rest and (parts.scheme not in _PATHS or ":" in parts.netloc or ":" in rest.partition("@")[0]):
        raise ConfigError(field, "has an '@' behind its host; in a password write %2F for /, %3F for ? and %23 for #")
    if "@" in login and "," in parts.netloc:
        raise ConfigError(field, "has several '@'; write one login for all servers, and %40 for an '@' in a password")
    user, colon, password = login.partition(":")
    if at and not password:
        raise ConfigError(field, "has a login without a password; write scheme://USER:PASSWORD@host:port")
    found = Address(parts.scheme, place, parts.path, unquote(user), bool(colon), "%" in password)
    return _queried(found, parts.query) if parts.query else found


def _queried(found: Address, query: str) -> Address:
    """redis-py takes database and login behind a `?` too."""
    settings = dict(parse_qsl(query, keep_blank_values=True))
    if found.path in ("", "/") and settings.get("db", "").isdecimal():
        found = found._replace(path=f"/{settings.pop('db')}")
    if settings.pop("password", ""):
        found = found._replace(password=True, user=found.user or settings.pop("username", ""))
    return found._replace(query=bool(settings))


class Bucket(NamedTuple):
    """A place in S3 as kvloom names it."""

    url: str
    region: str = ""
    endpoint: str = ""
    """Host and port of a server that is not Amazon's; no scheme."""


def bucket(found: Address) -> Bucket:
    """LMCache names hosts: `BUCKET.s3.REGION.amazonaws.com`, `HOST:PORT/BUCKET` or `BUCKET.HOST:PORT`."""
    if amazon := _AWS.fullmatch(found.place):
        return Bucket(f"s3://{amazon['bucket']}{found.path}", region=amazon["region"].lower())
    if ":" not in found.place:
        return Bucket(f"s3://{found.place}{found.path}")
    if found.path.strip("/"):
        return Bucket(f"s3://{found.path.strip('/')}", endpoint=found.place)
    name, _, host = found.place.partition(".")
    return Bucket(f"s3://{name}", endpoint=host)
