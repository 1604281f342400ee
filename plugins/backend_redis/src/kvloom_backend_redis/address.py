"""Parses a URL: the servers, how they belong together, and the credentials."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

Kind = Literal["single", "sentinel", "cluster"]

_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("single", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS: dict[Kind, int] = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_FORMS = {
    "single": "redis://host:port/db",
    "sentinel": "redis+sentinel://host:port,host2:port/service/db",
    "cluster": "redis+cluster://host:port,host2:port",
}


class Endpoint(NamedTuple):
    """The address of one server. port: 0 if `host` is the path of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, taken apart."""

    kind: Kind
    tls: bool
    endpoints: tuple[Endpoint, ...]
    """The server; or the Sentinels, or some nodes of the cluster."""
    db: int = 0
    service: str = ""
    """The Sentinels' name for the servers."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)


def parse(url: str) -> Address:
    """Raises ValueError with what to write instead; the message holds nothing of the URL but its scheme."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        raise ValueError(f"is not a URL; write {_FORMS['single']}") from None
    if parts.scheme not in _SCHEMES or "://" not in url:
        said = f"does not know the scheme {parts.scheme!r}" if "://" in url else "has no scheme"
        raise ValueError(f"{said}; write one of {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    kind, tls = _SCHEMES[parts.scheme]
    if parts.fragment:
        raise ValueError("has a '#' in it; write it as %23 where it belongs to a password")
    user, _, place = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    login = (unquote(name) or None, unquote(password) or None)
    if parts.scheme == "unix":
        return _unix(parts, place, login)
    if parts.query:
        raise ValueError("has settings behind a '?'; write them as settings of the tier")
    endpoints = tuple(_endpoint(one, kind) for one in place.split(","))
    if kind == "single" and len(endpoints) > 1:
        raise ValueError(f"names several servers; write {_FORMS['sentinel']} or {_FORMS['cluster']}")
    service, db = _path(parts.path, kind)
    return Address(kind, tls, endpoints, db, service, *login)


def _unix(parts: SplitResult, place: str, login: tuple[str | None, str | None]) -> Address:
    path = unquote(place + parts.path)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    db = query.pop("db", "0")
    if not path.startswith("/") or query:
        raise ValueError("should name a socket by its absolute path; write unix:///run/redis.sock or ...sock?db=1")
    return Address("single", False, (Endpoint(path, 0),), _db(db), "", *login)


def _endpoint(text: str, kind: Kind) -> Endpoint:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port == 0 or (port is None and text.rpartition("]")[2].count(":")):
        raise ValueError(f"names no server, or its port is not a number from 1 to 65535; write {_FORMS[kind]}")
    return Endpoint(host, _PORTS[kind] if port is None else port)


def _path(path: str, kind: Kind) -> tuple[str, int]:
    words = [unquote(word) for word in path.split("/")[1:] if word]
    if kind == "sentinel":
        if not words or len(words) > 2:
            raise ValueError(f"names no service of the Sentinels; write {_FORMS[kind]}")
        return words[0], _db(words[1]) if len(words) == 2 else 0
    if len(words) > 1 or (kind == "cluster" and words not in ([], ["0"])):
        raise ValueError(f"has an unexpected path; write {_FORMS[kind]}")
    return "", _db(words[0]) if words else 0


def _db(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("names a database that is not a number; write the number from 0, or leave it out")
    return int(text)
