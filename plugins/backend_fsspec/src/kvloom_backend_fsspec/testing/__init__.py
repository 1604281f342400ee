"""Real servers for tests and benches, on free ports, in temporary directories.

Ceph's S3 gateway, moto, wsgidav (WebDAV), Azurite (Azure) and OpenSSH's (SFTP). Each is a context manager. Its
processes end with it, and with the process that started it (on Linux the kernel kills them).
"""

from kvloom_backend_fsspec.testing.ceph import CephRGW
from kvloom_backend_fsspec.testing.others import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    AzuriteServer,
    MotoServer,
    SshServer,
    WebDavServer,
)
from kvloom_backend_fsspec.testing.server import (
    ACCESS_KEY,
    SECRET_KEY,
    START_SECONDS,
    Server,
    answers,
    free_port,
    listens,
    need,
    s3_client,
    wait_until,
)

__all__ = [
    "ACCESS_KEY",
    "AZURE_ACCOUNT",
    "AZURE_KEY",
    "SECRET_KEY",
    "START_SECONDS",
    "AzuriteServer",
    "CephRGW",
    "MotoServer",
    "Server",
    "SshServer",
    "WebDavServer",
    "answers",
    "free_port",
    "listens",
    "need",
    "s3_client",
    "wait_until",
]
