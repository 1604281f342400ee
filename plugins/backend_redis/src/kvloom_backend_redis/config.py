"""The settings of a `redis` tier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from kvloom import Config, Duration
from kvloom_backend_redis import address
from kvloom_backend_redis.address import Address

_PREFIX = re.compile(r"[A-Za-z0-9._/:+@-]{0,99}:")


class RedisConfig(Config):
    """The `redis` tier's own settings."""

    # A URL may hold a password, and what pydantic says about a setting quotes it otherwise.
    model_config = ConfigDict(hide_input_in_errors=True)

    url: str
    """The server's address. A password in it is moved to `password`."""
    username: str | None = None
    """The login's user (ACL), if it is not the default user."""
    password: SecretStr | None = None
    """Write `${env:NAME}`: a file is no place for it."""
    sentinel_username: str | None = None
    """For the Sentinels themselves, as the password."""
    sentinel_password: SecretStr | None = None
    """For the Sentinels themselves, which have logins of their own."""
    prefix: str = "kvloom:"
    """Begins every key. Ends with `:`, which no key of kvloom's has in it, so that no two prefixes share a key."""
    expire: Duration | None = Field(default=None, ge=0.001, le=10 * 365 * 86400)
    """After this long without being written, the server deletes a blob."""
    connect_timeout: Duration = Field(default=1.0, gt=0, le=3600)
    """Seconds for reaching a server and logging in, each."""
    timeout: Duration = Field(default=5.0, gt=0, le=3600)
    """Seconds without a byte, sent or received, after which a connection is given up; and a bound for an exchange."""
    threads: int = Field(default=4, ge=1, le=256)
    """Maximum number of concurrent reads."""
    tls_ca: Path | None = None
    """Trusted certificates; the system's by default."""
    tls_cert: Path | None = None
    """A certificate of ours, for servers that ask for one."""
    tls_key: Path | None = None
    """The key of it."""
    tls_verify: bool = True
    """Require a trusted certificate from the server."""

    @model_validator(mode="before")
    @classmethod
    def _moves_the_login(cls, settings: Any) -> Any:
        """So that neither `repr` nor an error shows it."""
        if not isinstance(settings, dict) or not isinstance(settings.get("url"), str):
            return settings
        try:
            found = address.parse(settings["url"])
        except ValueError:
            return settings  # told about where the URL is checked
        moved = {"username": found.username, "password": found.password}
        for name, value in moved.items():
            if value is not None and settings.get(name) is not None:
                raise ValueError(f"url and {name} both have a {name}; remove one of them")
        if not any(moved.values()):
            return settings
        scheme, _, rest = settings["url"].partition("://")
        clean = f"{scheme}://{rest.rpartition('@')[2]}"
        return {**settings, "url": clean, **{name: value for name, value in moved.items() if value}}

    @field_validator("url")
    @classmethod
    def _can_be_read(cls, url: str) -> str:
        address.parse(url)
        return url

    @field_validator("prefix")
    @classmethod
    def _keeps_to_itself(cls, prefix: str) -> str:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError("should be up to 99 of [A-Za-z0-9._/:+@-] and end with ':', such as kvloom:")
        return prefix

    @model_validator(mode="after")
    def _belongs_together(self) -> RedisConfig:
        if self.username is not None and self.password is None:
            raise ValueError("username: needs a password; add one, or remove the name")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: give both")
        if not self.address.tls and (self.tls_ca or self.tls_cert or not self.tls_verify):
            raise ValueError("tls_...: the url has no TLS; write rediss://, or remove these settings")
        if self.address.kind != "sentinel" and (self.sentinel_username or self.sentinel_password):
            raise ValueError("sentinel_...: the url names no Sentinels; write redis+sentinel://, or remove these")
        return self

    @property
    def address(self) -> Address:
        return address.parse(self.url)


def shown(secret: SecretStr | None) -> str | None:
    """The secret's text."""
    return None if secret is None else secret.get_secret_value()
