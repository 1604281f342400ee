"""The settings of the `fsspec` tier, and what a URL says."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvloom import Config as BaseConfig
from kvloom import ConfigError, Duration

OBSTORE_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "file": "file"}
"""The schemes that obstore serves, with one word for each kind of store."""

SFTP_SCHEMES = ("sftp", "ssh")

STANDARD_PLACES = (
    "credentials come from the standard places only: the environment (AWS_ACCESS_KEY_ID, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, ...), ~/.aws, ~/.ssh, ~/.netrc, or the machine's role"
)

_SECRET = re.compile(
    r"secret|passw|passphrase|token|access_key|account_key|sas|credential|connection_string|signature|bearer|pkey|apikey"
    r"|api_key|service_account_key|private_key"
)
_SECRET_NAMES = {"key", "auth", "master_key", "cookies", "headers"}
_NO_SECRET = re.compile(r"(?:aws_|azure_|google_)?skip_signature|anon|.*_(?:file|path|filename|uri|url)")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_ENDPOINT = re.compile(r"https?://[^/\s]", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")
_FILES = re.compile(
    r"key_filename|known_hosts|root_certificate|verify|cert|(?:google_)?service_account(?:_path)?"
    r"|(?:aws_)?(?:web_identity|container_authorization)_token_file|(?:azure_)?federated_token_file",
    re.IGNORECASE,
)
"""Options that name files; relative ones begin where the configuration file is."""
_MOST_FILES = {"key_filename": 100, "cert": 2}
"""Options that may be a list, with its maximum length: behind a certificate and its key would be a password."""
_ELSE = {"key_filename": ", or a list of them", "cert": ", or a list of it and its key's", "verify": ", true or false"}
"""The other forms of options that name files."""
_QUERY = re.compile(r"\?[\w.-]+=")
_NO_PART = ("", ".", "..")


class Place(NamedTuple):
    """The parts of a URL."""

    scheme: str
    host: str
    """Bucket, container or host, with user and port if given; empty for a place on this machine."""
    prefix: str
    """The path inside the bucket; no slash at either end."""


class Config(BaseConfig):
    """The `fsspec` tier's own settings."""

    url: str
    """`scheme://bucket/prefix`; the prefix is taken literally, nothing in it is decoded."""
    options: Mapping[str, Any] = {}
    """Settings of the store's client (`endpoint`, `region`, ...); no credentials."""
    driver: Literal["auto", "obstore", "fsspec"] = "auto"
    """`auto`: obstore where it serves the scheme, paramiko for SFTP, else fsspec's own implementation."""
    timeout: Duration = Field(default=5.0, gt=0, le=600)
    """Seconds for one request: of at most 8 MiB where obstore serves; of 256 KiB by SFTP and WebDAV, and so on."""
    connect_timeout: Duration = Field(default=1.0, gt=0, le=600)
    """Seconds to connect."""
    retries: int = Field(default=2, ge=0, le=10)
    """Maximum number of repeats of a request that failed by itself; none once `timeout` has passed since it began.

    Listings by fsspec are repeated until then."""
    allow_http: bool = False
    """Allow an endpoint without TLS: its traffic can be read on the way."""
    threads: int = Field(default=16, ge=1, le=256)
    """Maximum number of concurrent requests for one call about many keys, or for one large blob."""

    @field_validator("url")
    @classmethod
    def _names_a_place(cls, url: str) -> str:
        place_of(url)
        return url

    @field_validator("options")
    @classmethod
    def _has_no_secrets(cls, options: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        for name in _names_in(options):
            plain = name.lower().replace("-", "_")
            if (_SECRET.search(plain) or plain in _SECRET_NAMES) and not _NO_SECRET.fullmatch(plain):
                raise ValueError(f"{name} is refused: {STANDARD_PLACES}")
        for name, value in _texts_in(options):
            host, _, query = value.partition("://")[2].partition("?")
            if "@" in host.partition("/")[0]:
                raise ValueError(f"{name} has a login in it; {STANDARD_PLACES}")
            if query:
                raise ValueError(f"{name} is a URL with a query; name the server alone. {STANDARD_PLACES}")
        directory = (info.context or {}).get("directory", Path())
        return {
            name: _as_files(name, value, directory) if _FILES.fullmatch(name) else value
            for name, value in options.items()
        }

    @model_validator(mode="after")
    def _can_work(self) -> Config:
        if self.driver == "obstore" and self.place.scheme not in OBSTORE_SCHEMES:
            raise ValueError(f"driver: obstore has no {self.place.scheme}://; use `driver: auto`")
        if self.driver == "fsspec" and self.by_sftp:
            raise ValueError("driver: fsspec's own SFTP never reconnects; use `driver: auto`")
        for name in ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "azure_endpoint", "base_url"):
            if name in self.options and not _ENDPOINT.match(str(self.options[name])):
                raise ValueError(f"options.{name}: is not a URL; write https://host:port, with its scheme")
            if not self.allow_http and str(self.options.get(name, "")).lower().startswith("http://"):
                raise ValueError(
                    f"options.{name}: has no TLS; use https://, or `allow_http: true` if anyone on the network "
                    "may read the KV"
                )
        return self

    def check_files(self) -> None:
        """Raise ConfigError for an option whose file is missing, or is no regular file; `verify` may be a directory.

        Clients would wait for what comes from a FIFO, some of them with the interpreter's lock.
        """
        for name, value in self.options.items():
            paths = value if isinstance(value, list | tuple) else [value]
            for path in paths if _FILES.fullmatch(name) else ():
                if isinstance(path, str) and (problem := _problem_of(path, directory=name.lower() == "verify")):
                    raise ConfigError(f"options.{name}", problem)

    @property
    def place(self) -> Place:
        """The parts of the URL."""
        return place_of(self.url)

    @property
    def by_sftp(self) -> bool:
        """Return whether paramiko is the client."""
        return self.place.scheme in SFTP_SCHEMES

    @property
    def by_obstore(self) -> bool:
        """Return whether obstore is the client."""
        return self.driver != "fsspec" and self.place.scheme in OBSTORE_SCHEMES


def place_of(url: str) -> Place:
    """Split a URL. Raises ValueError with the problem; it never quotes a password."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise ValueError("not a URL; expected scheme://bucket/prefix, such as s3://my-bucket/kv or file:///srv/kv")
    if any(ord(character) < 32 or character == "\x7f" for character in rest):
        raise ValueError("has a control character in it; name a place without one")
    host, _, path = rest.partition("/")
    if urlsplit(f"//{host}").password is not None:
        raise ValueError(f"has a password in it; {STANDARD_PLACES}")
    local = scheme in ("file", "local", "memory")
    if "?" in host or "#" in host or (_QUERY.search(path) and not local):
        raise ValueError(f"{scheme}:// takes no query; put settings into `options`")
    if local and host and scheme != "memory":
        raise ValueError(f"{scheme}://{host}/... names a host; write three slashes: {scheme}:///absolute/path")
    if scheme == "memory":
        host, path = "", rest
    path = path.strip("/")
    if any(part in _NO_PART for part in path.split("/")) and path:
        raise ValueError("its path has an empty part, `.` or `..` in it; name the place itself")
    if not (path if local else host):
        raise ValueError(
            f"names no path; expected {scheme}:///path"
            if local
            else f"names no bucket or host; expected {scheme}://bucket/prefix"
        )
    if OBSTORE_SCHEMES.get(scheme) == "s3" and not _BUCKET.fullmatch(host):
        raise ValueError("names no bucket that S3 has: up to 255 of [A-Za-z0-9._-]; and no port")
    return Place(scheme, host, path)


def _names_in(options: Any) -> Iterator[str]:
    if isinstance(options, Mapping):
        for name, value in options.items():
            yield str(name)
            yield from _names_in(value)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _names_in(value)


def _texts_in(options: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text, with the name of the option that it is in."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _texts_in(value, str(key))
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _texts_in(value, name)
    elif isinstance(options, str):
        yield name, options


def _problem_of(path: str, *, directory: bool) -> str:
    """The reason that a path cannot be read; empty if it names a regular file. directory: it may name one of these."""
    if path.startswith("~"):
        return f"unknown home directory: {path}; name a file"
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return f"there is no file {path}"
    except (OSError, ValueError) as error:  # a name too long, no right to look, a NUL
        return f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
    return "" if stat.S_ISREG(mode) or (directory and stat.S_ISDIR(mode)) else f"{path} is not a regular file"


def _as_files(name: str, value: Any, directory: Path) -> Any:
    """The path in a file option, or each of several: absolute, and below a known home if it begins with `~`. Raises
    ValueError for what is no path."""
    if value is None or (name.lower() == "verify" and isinstance(value, bool)):
        return value
    if isinstance(value, list | tuple) and len(value) <= _MOST_FILES.get(name.lower(), 0):
        return [_as_files(name, one, directory) for one in value]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected the path of a file{_ELSE.get(name.lower(), '')}")
    path = os.path.expanduser(value)
    return path if path.startswith("~") else str(directory / path)
