"""Servers, one of each for all tests of a process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.testing import (
    ACCESS_KEY,
    AZURE_KEY,
    SECRET_KEY,
    AzuriteServer,
    CephRGW,
    MotoServer,
    Server,
    SshServer,
    WebDavServer,
    s3_client,
)

Open = Callable[..., FsspecBackend]


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Credentials in a standard place, and none of the machine's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
        yield


def _need(*names: str) -> None:
    """Skip unless all are installed: programs, and modules by `import NAME`."""
    places = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    for name in names:
        module = name.removeprefix("import ")
        if shutil.which(name, path=places) is None if module == name else importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.fixture(scope="session")
def rgw() -> Iterator[CephRGW]:
    _need("radosgw", "ceph-mon", "ceph-osd", "ceph", "import boto3")
    with CephRGW() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    _need("moto_server", "import moto", "import boto3")
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def webdav() -> Iterator[WebDavServer]:
    _need("wsgidav", "import wsgidav", "import cheroot", "import webdav4")
    with WebDavServer() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    _need("azurite-blob", "node", "import azure")
    with AzuriteServer() as server:
        yield server


@pytest.fixture(scope="session")
def sshd() -> Iterator[SshServer]:
    _need("sshd", "ssh-keygen", "import paramiko")
    with SshServer() as server:
        yield server


@pytest.fixture(scope="session")
def new_bucket() -> Callable[[Server], str]:
    """Makes a bucket in a server that speaks S3."""

    def new_bucket(server: Server) -> str:
        name = f"kv-{uuid.uuid4().hex[:12]}"
        s3_client(server.endpoint).create_bucket(Bucket=name)
        return name

    return new_bucket


class Raw:
    """A bucket, round the backend."""

    def __init__(self, server: Server, bucket: str, prefix: str) -> None:
        self.client, self.bucket, self.prefix = s3_client(server.endpoint), bucket, prefix

    def get(self, key: str) -> bytes | None:
        try:
            return bytes(self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}=kv")["Body"].read())
        except self.client.exceptions.NoSuchKey:
            return None

    def set(self, key: str, blob: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}=kv", Body=blob)


@pytest.fixture(scope="session")
def raw_of() -> type[Raw]:
    return Raw


@pytest.fixture(scope="session")
def s3() -> Open:
    """Opens a backend on a bucket of a server."""

    def s3(server: Any, bucket: str, prefix: str = "kv", **settings: Any) -> FsspecBackend:
        options = {"endpoint": getattr(server, "endpoint", server), **settings.pop("options", {})}
        return FsspecBackend(
            FsspecBackend.Config(url=f"s3://{bucket}/{prefix}", options=options, allow_http=True, **settings)
        )

    return s3


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call it with the counts of what was done: they are printed behind the results."""
    name = request.function.__name__

    def add(**counts: int) -> None:
        for what, number in counts.items():
            request.node.user_properties.append(("counted", (f"{name}: {what.replace('_', ' ')}", number)))

    return add


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path
