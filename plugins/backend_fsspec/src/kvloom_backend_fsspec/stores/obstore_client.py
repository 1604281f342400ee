"""Opening obstore's clients: with timeouts, and credentials from the standard places."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvloom import ConfigError, pip_install
from kvloom_backend_fsspec.config import OBSTORE_SCHEMES, Config

_MOST_CERTIFICATE_BYTES = 16 << 20
"""Many times as much as all that a system trusts."""


def client_of(module: Any, config: Config, *, bulk_delete: bool = True) -> Any:
    """A client of obstore's. Raises its errors, ValueError or ImportError if the settings cannot work.

    Without `bulk_delete` it deletes by S3's DeleteObject, which every server knows.
    """
    place, options = config.place, dict(config.options)
    if place.scheme == "file":
        if options:
            raise ValueError(f"options: file:// has none; remove {', '.join(sorted(options))}")
        return module._store.LocalStore("/", mkdir=False)
    seconds = timedelta(seconds=config.timeout)
    shared = {
        "client_options": {
            "timeout": seconds,
            "connect_timeout": timedelta(seconds=config.connect_timeout),
            "allow_http": config.allow_http,
            **_root_certificate(options),
        },
        "retry_config": {
            "max_retries": config.retries,
            "retry_timeout": seconds,
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
        },
    }
    kind = OBSTORE_SCHEMES[place.scheme]
    if kind == "s3":
        if not bulk_delete:
            options["disable_bulk_delete"] = "true"
        return module._store.S3Store(place.host, config=options, **shared, **_aws_files(options))
    if kind == "gs":
        return module._store.GCSStore(place.host, config=options, **shared)
    return module._store.AzureStore(place.host, config=options, **shared)


def _root_certificate(options: dict[str, Any]) -> dict[str, bytes]:
    """`options: {root_certificate: ca.pem}`: trusted besides the system's."""
    path = options.pop("root_certificate", None)
    if path is None:
        return {}
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        content = file.read(_MOST_CERTIFICATE_BYTES + 1) or b""  # None: a FIFO with a writer that is silent
    if not 0 < len(content) <= _MOST_CERTIFICATE_BYTES:
        problem = f"{path} is empty, or has more than {_MOST_CERTIFICATE_BYTES} bytes"
        raise ConfigError("options.root_certificate", problem)
    return {"root_certificate": content}


def _aws_files(options: dict[str, Any]) -> dict[str, Any]:
    """Settings from ~/.aws, unless the environment has them: boto3 reads these files, obstore does not."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or "true" in str(options.get("skip_signature", "")).lower():
        return {}
    home = Path("~/.aws").expanduser()
    files = [Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials")), home / "config"]
    if not os.environ.get("AWS_PROFILE") and not any(file.is_file() for file in files):
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ImportError(
            f"to read ~/.aws, boto3 is needed: {pip_install('kvloom-backend-fsspec', 'aws')}, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    session = boto3.session.Session()
    if session.region_name and not {"region", "aws_region"} & set(options):
        options["region"] = session.region_name
    return {"credential_provider": Boto3CredentialProvider(session)} if session.get_credentials() else {}
