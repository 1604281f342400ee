"""Opening fsspec's file systems: with timeouts, without caches, and with what the standard places know."""

from __future__ import annotations

import contextlib
import importlib
import netrc
from typing import Any

from kvloom import pip_install
from kvloom_backend_fsspec.config import Config, Place
from kvloom_backend_fsspec.pace import bound_http

_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az",
    "webdav": "webdav", "dav": "webdav",
}  # fmt: skip
_WEBDAV = ("webdav", "dav")


def open_fs(place: Place, config: Config) -> tuple[Any, str]:
    """The file system, and what comes before a name in its paths."""
    try:
        import fsspec
    except ModuleNotFoundError:
        raise ImportError("fsspec is not installed; pip install fsspec") from None
    from fsspec.registry import known_implementations, registry

    if place.scheme not in known_implementations and place.scheme not in registry:
        raise ValueError(
            f"url: nothing serves {place.scheme}://; it is spelt wrong, or needs another package: "
            "https://filesystem-spec.readthedocs.io/en/latest/api.html#other-known-implementations lists them"
        )
    try:
        settings = {"skip_instance_cache": True, **_defaults(place, config), **config.options}
        if place.scheme in _WEBDAV:
            fs = fsspec.filesystem("webdav", **settings)
            bound_http(fs.client.http, config.timeout)
            return fs, ""
        fs, path = fsspec.core.url_to_fs(config.url, **settings)
    except ImportError as error:
        extra = _EXTRAS.get(place.scheme)
        remedy = pip_install("kvloom-backend-fsspec", extra) if extra else str(error)
        raise ImportError(f"url: {place.scheme}:// needs another package: {remedy}") from error
    if hasattr(fs, "retries"):
        fs.retries = config.retries + 1
    return fs, path[: len(path) - len(place.prefix)] if place.prefix else f"{path.rstrip('/')}/"


def _defaults(place: Place, config: Config) -> dict[str, Any]:
    """Options that limit an implementation's waiting and locate its credentials, as far as known."""
    if place.scheme in ("s3", "s3a"):
        return {
            "use_listings_cache": False,
            "config_kwargs": {
                "connect_timeout": config.connect_timeout,
                "read_timeout": config.timeout,
                "retries": {"max_attempts": config.retries + 1},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        }
    if place.scheme in _WEBDAV:
        httpx = importlib.import_module("httpx")
        return {
            "base_url": f"{'http' if config.allow_http else 'https'}://{place.host}",
            "timeout": httpx.Timeout(config.timeout, connect=config.connect_timeout),
            "headers": {"Accept-Encoding": "identity"},
            "retry": False,
            "auth": _from_netrc(place.host),
        }
    return {"use_listings_cache": False}


def _from_netrc(host: str) -> tuple[str, str] | None:
    try:
        found = netrc.netrc().authenticators(host.rpartition("@")[2].partition(":")[0])
    except (OSError, netrc.NetrcParseError):
        return None
    return (found[0], found[2]) if found else None


def close_fs(fs: Any) -> None:
    """Give back its connections and threads, whichever of these it has."""
    for give_back in (_close_webdav, _close_session):
        with contextlib.suppress(Exception):
            give_back(fs)


def _close_webdav(fs: Any) -> None:
    fs.client.http.close()


def _close_session(fs: Any) -> None:
    fs.close_session(fs.loop, fs.s3)
