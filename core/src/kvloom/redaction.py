"""Decides which settings may be shown, by their names and the look of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET = re.compile(
    r"passw|passphrase|secret|credential|connection_?string|api_?key|access_?key|account_?key|private_?key|bearer"
    r"|signature$|(?:^|[_-])(?:token|sas|pkey)$|^(?:key|auth|cookies?|authorization)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"skip_signature$|_(?:file|path|filename)$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_LOGIN_IN_TEXT = re.compile(r"(?<![^\s/'\"@])[^\s/'\"@:]+:[^\s/'\"@]+@|(?<=://)[^/?#\s'\"]*@")
"""Also of an address without a scheme."""
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+")
"""The query of a URL, which may have a key to a service under any name."""
_KEY = re.compile(r"[A-Za-z0-9+/_-]{43}=")
_INTERPOLATED = re.compile(r"(\$\{[^}]*\})")


def is_secret(name: object) -> bool:
    """Return whether a setting of this name is secret."""
    return isinstance(name, str) and _SECRET.search(name) is not None and _NO_SECRET.search(name) is None


def looks_like_a_key(text: str) -> bool:
    """Return whether this is 32 bytes in base64 rather than a name."""
    return _KEY.fullmatch(text) is not None


def masked(value: Any, name: object = "") -> Any:
    """`value`, a setting called `name` or a tree of settings, without passwords, logins and queries of URLs, and
    keys."""
    if value is None or value == "" or isinstance(value, bool):
        return value
    if is_secret(name):
        return MASK
    if isinstance(value, Mapping):
        # The names of quotas are salts, and say nothing of what they are for.
        return {key: masked(child, "" if name == "quota" else key) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [masked(child, name) for child in value]
    if isinstance(value, str):
        return MASK if looks_like_a_key(value) else _QUERY.sub(rf"\1{MASK}", _LOGIN.sub(f"{MASK}@", value))
    return value


def without_logins(text: str) -> str:
    """A message without the logins and queries of addresses that it quotes."""
    return _QUERY.sub(rf"\1{MASK}", _LOGIN_IN_TEXT.sub(f"{MASK}@", text))


def masked_template(text: str, name: object = "") -> str:
    """A text with `${env:NAME}` in it: of what stands beside those, as much as `masked` shows."""
    if is_secret(name):
        return _beside(text)
    return _LOGIN.sub(lambda login: _login(login[0]), text)


def _login(text: str) -> str:
    user, colon, password = text[:-1].partition(":")
    return f"{user}:{_beside(password)}@" if colon else f"{_beside(user)}@"


def _beside(text: str) -> str:
    parts = _INTERPOLATED.split(text)
    return "".join(part if number % 2 else MASK if part else "" for number, part in enumerate(parts))
