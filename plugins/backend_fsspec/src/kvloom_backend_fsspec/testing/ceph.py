"""Ceph's S3 gateway."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

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

_CEPH_CONF = """[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
mon initial members = a
mon data = {root}/mon
mon allow pool size one = true
mon warn on pool no redundancy = false
ms bind msgr2 = false
public addr = 127.0.0.1
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
osd data = {root}/osd
osd objectstore = {store}
osd memory target = 939524096
osd max object name len = 256
osd max object namespace len = 64
memstore device bytes = {capacity}
bluestore block size = {capacity}
log file = {root}/$name.log
admin socket = {root}/$name.$pid.asok
pid file = {root}/$name.pid
run dir = {root}
crash dir = {root}
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1 {tls}
rgw thread pool size = 64
rgw run sync thread = false
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw enable usage log = false
"""


class CephRGW(Server):
    """Ceph's S3 gateway over one monitor and one storage daemon: a real S3 server, which starts in about 15 s.

    bytes: what the storage daemon has room for. store: `memstore` keeps objects in memory, `bluestore` in a file.
    """

    main = "radosgw"

    def __init__(self, *, capacity: int = 2 << 30, store: str = "memstore") -> None:
        super().__init__()
        self.config = self.directory / "ceph.conf"
        self.tls_port = free_port()
        """The same with TLS."""
        self.authority = self.directory / "ca.pem"
        """The authority that signed the server's certificate."""
        self._mon_port, self._fsid = free_port(), str(uuid.uuid4())
        self._capacity, self._store = capacity, store

    def start(self) -> None:
        packages = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
        for program in ("radosgw", "ceph-mon", "ceph-osd", "ceph", "radosgw-admin", "monmaptool"):
            need(program, packages)
        root = self.directory
        self.config.write_text(
            _CEPH_CONF.format(
                fsid=self._fsid, mon_port=self._mon_port, root=root, store=self._store, capacity=self._capacity,
                port=self.port, tls=f"ssl_endpoint=127.0.0.1:{self.tls_port} ssl_certificate={root}/tls.pem",
            )
        )  # fmt: skip
        self._sign()
        self._start_monitor(root)
        self._start_storage(root)
        self.restart()
        self.add_user(ACCESS_KEY, SECRET_KEY)
        self._write()

    def _write(self) -> None:
        """The first object: the gateway makes its pools when they are first written to, which takes seconds."""
        client = s3_client(self.endpoint)
        client.create_bucket(Bucket="first")
        client.put_object(Bucket="first", Key="object", Body=b"kvloom")

    def _sign(self) -> None:
        """An authority, and a certificate of 127.0.0.1 that it vouches for."""
        need("openssl", "apt-get install openssl")
        key, new = self.directory / "ca.key", ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
        self.run(*new, "-subj", "/CN=kvloom tests", "-keyout", str(key), "-out", str(self.authority))
        both = self.directory / "tls.pem"
        self.run(
            *new, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-addext",
            "basicConstraints=CA:FALSE", "-CA", str(self.authority), "-CAkey", str(key), "-keyout", f"{both}.key",
            "-out", str(both),
        )  # fmt: skip
        both.write_text(both.read_text() + Path(f"{both}.key").read_text())

    def _start_monitor(self, root: Path) -> None:
        address = f"[v1:127.0.0.1:{self._mon_port}]"
        self.run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", address, str(root / "monmap"))
        (root / "mon").mkdir()
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(root / "monmap"))
        self.spawn("mon", "ceph-mon", "-i", "a", "-f")
        wait_until(lambda: listens(self._mon_port), "ceph-mon")

    def _start_storage(self, root: Path) -> None:
        (root / "osd").mkdir()
        self.run("ceph-osd", "-i", "0", "--mkfs")
        self._tell("osd", "new", (root / "osd" / "fsid").read_text().strip(), "0")
        self.spawn("osd", "ceph-osd", "-i", "0", "-f")
        self._tell("osd", "crush", "add", "osd.0", "1.0", "host=h", "root=default")

        def is_up() -> bool:
            if (
                self._running["osd"].poll() is not None
            ):  # now and then it asks before it knows the cluster: `wrong fsid`
                self.spawn("osd", "ceph-osd", "-i", "0", "-f")
            return "1 up" in self._tell("osd", "stat")

        wait_until(is_up, "ceph-osd")

    def _tell(self, *command: str) -> str:
        """Run `ceph` until it succeeds: a monitor that has just started refuses commands for a moment."""
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                return self.run("ceph", "--connect-timeout", "5", *command)
            except (RuntimeError, subprocess.TimeoutExpired):
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def restart(self) -> None:
        self.spawn("radosgw", "radosgw", "-n", "client.rgw.a", "-f")
        wait_until(lambda: answers(self.endpoint), "radosgw")

    def admin(self, *arguments: str) -> str:
        """`radosgw-admin`: users, quotas."""
        return self.run("radosgw-admin", "-n", "client.rgw.a", *arguments)

    def add_user(self, access_key: str, secret_key: str) -> None:
        """A user, named like its access key."""
        self.admin(
            "user", "create", f"--uid={access_key}", f"--display-name={access_key}", f"--access-key={access_key}",
            f"--secret-key={secret_key}",
        )  # fmt: skip

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self.config), **(more or {})}
