"""Servers of one process: moto, wsgidav, Azurite and OpenSSH's."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from kvloom_backend_fsspec.testing.server import Server, answers, listens, need, wait_until

AZURE_ACCOUNT, AZURE_KEY = "kvloom", base64.b64encode(b"kvloom-test-secret-of-32-bytes!!").decode()
"""Credentials of Azurite."""


_MOTO = """
import threading
from moto.s3.responses import S3Response
from moto.server import main
lock, put = threading.Lock(), S3Response.put_object
def put_alone(self):
    with lock:
        return put(self)
S3Response.put_object = put_alone
main()
"""
"""moto looks whether an object is there (If-None-Match) and makes it in two steps, on as many threads as there are
requests: two of them may both be told that they made it."""


class MotoServer(Server):
    """moto's S3: the semantics of S3 in memory, and slow."""

    main = "moto"

    def start(self) -> None:
        need("moto_server", "pip install 'moto[server,s3]'")
        self.spawn("moto", sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(self.port))
        wait_until(lambda: listens(self.port), "moto_server")

    restart = start


class WebDavServer(Server):
    """wsgidav, over a directory that outlives a restart."""

    main = "wsgidav"

    def start(self) -> None:
        program = need("wsgidav", "pip install wsgidav cheroot")
        (self.directory / "root").mkdir(exist_ok=True)
        settings = {
            "host": "127.0.0.1", "port": self.port, "server": "cheroot", "verbose": 1,
            "provider_mapping": {"/": str(self.directory / "root")},
            "simple_dc": {"user_mapping": {"*": True}}, "http_authenticator": {"domain_controller": None},
            "lock_storage": False, "property_manager": False,  # unused, but each request would ask both
        }  # fmt: skip
        (self.directory / "wsgidav.json").write_text(json.dumps(settings))
        self.spawn("wsgidav", program, "--config", str(self.directory / "wsgidav.json"))
        wait_until(lambda: answers(self.endpoint), "wsgidav")

    restart = start


class AzuriteServer(Server):
    """Microsoft's emulator of Azure Blob Storage, in memory."""

    main = "azurite"

    @property
    def endpoint(self) -> str:
        """The URL of its account."""
        return f"{super().endpoint}/{AZURE_ACCOUNT}"

    def start(self) -> None:
        program = need("azurite-blob", "npm install azurite")
        self.spawn(
            "azurite", program, "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--inMemoryPersistence",
            "--silent", "--disableTelemetry", "--skipApiVersionCheck",
            environment={"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"},
        )  # fmt: skip
        wait_until(lambda: listens(self.port), "azurite")

    def make_container(self, name: str) -> None:
        """Make a container with the account's credentials."""
        from azure.storage.blob import BlobServiceClient

        owner = {"account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}
        with BlobServiceClient(self.endpoint, credential=owner) as client:
            client.create_container(name)


_SSHD_CONFIG = """ListenAddress 127.0.0.1:{port}
HostKey {root}/host
AuthorizedKeysFile {root}/authorized
StrictModes no
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 10:30:100
Subsystem sftp internal-sftp
"""


class SshServer(Server):
    """OpenSSH's server, for the current user, with a generated key."""

    main = "sshd"

    def __init__(self) -> None:
        super().__init__()
        self.key = self.directory / "user"
        """The private key that may log in."""
        self.known_hosts = self.directory / "known_hosts"
        """Its own key."""

    def start(self) -> None:
        need("ssh-keygen", "apt-get install openssh-client")
        for name in ("host", "user"):
            self.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / name))
        (self.directory / "authorized").write_text((self.directory / "user.pub").read_text())
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {(self.directory / 'host.pub').read_text()}")
        (self.directory / "sshd_config").write_text(_SSHD_CONFIG.format(port=self.port, root=self.directory))
        self.restart()

    def kill(self) -> None:
        """Send SIGKILL, also to the processes of its connections, which would continue."""
        children = Path(f"/proc/{self._running[self.main].pid}/task/{self._running[self.main].pid}/children")
        connections = [int(pid) for pid in children.read_text().split()]
        super().kill()
        for pid in connections:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        if self.main in self._running:
            self.kill()
        super().close()

    def restart(self) -> None:
        program = need("sshd", "apt-get install openssh-server")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # of privilege separation
        self.spawn("sshd", program, "-D", "-e", "-f", str(self.directory / "sshd_config"))
        wait_until(lambda: listens(self.port), "sshd")
