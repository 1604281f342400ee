"""Real servers for tests and benches: Ceph's S3 gateway, moto and WebDAV, on free ports, in temporary directories.

Each is a context manager. Nothing outlives it, nor the process that started it: the kernel kills what is left (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

START_SECONDS = 60.0
ACCESS_KEY, SECRET_KEY = "KVLOOMTESTKEY", "kvloom-test-secret"
_PR_SET_PDEATHSIG = 1
_LAST_WORDS = 1000
S = TypeVar("S", bound="Server")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def need(program: str, package: str) -> str:
    """Where `program` is. Raises RuntimeError that names the package to install."""
    if path := shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent)):
        return path
    raise RuntimeError(f"{program} is not installed; install it with: {package}")


def wait_until(ready: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Return once `ready`. Raises RuntimeError after `seconds`."""
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} is not ready after {seconds:.0f} s")
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Whether somebody accepts connections at `port` of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def answers(url: str) -> bool:
    """Whether a server speaks HTTP there, whatever it says."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def s3_client(endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
    """A client of boto3, to look at a store round the backend."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
    )  # fmt: skip


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """One or several processes in a temporary directory; `main` is the one that clients talk to."""

    main = ""

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="kvloom-server-"))
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start everything and return when it answers."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL to the one that clients talk to."""
        self._end(self.main)

    def freeze(self) -> None:
        """SIGSTOP: connections are still accepted, by the kernel, and nothing is answered."""
        self._running[self.main].send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._running[self.main].send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Start again what was killed, on the same port and the same data."""
        raise NotImplementedError

    def run(self, *command: str, environment: Mapping[str, str] | None = None, seconds: float = START_SECONDS) -> str:
        """What a command prints. Raises RuntimeError with its last words if it fails."""
        told = subprocess.run(
            command, capture_output=True, timeout=seconds, text=True, env=self._environment(environment)
        )
        if told.returncode:
            raise RuntimeError(f"{' '.join(command[:3])} failed: {told.stderr.strip()[-500:]}")
        return told.stdout

    def spawn(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a process of this server; what it says goes to `<name>.out` in its directory."""
        out: IO[bytes]
        with open(self.directory / f"{name}.out", "ab") as out:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=_die_with_parent, env=self._environment(environment),
            )  # fmt: skip

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, **(more or {})}

    def _end(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self: S) -> S:
        try:
            self.start()
        except BaseException as error:
            said = {path.name: path.read_text(errors="replace")[-_LAST_WORDS:] for path in self.directory.glob("*.out")}
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(f"{error}; its last words: {said}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything and remove the directory."""
        for name in list(self._running)[::-1]:
            self._end(name)
        shutil.rmtree(self.directory, ignore_errors=True)


class MotoServer(Server):
    """moto's S3: the semantics of S3 in memory, and slow."""

    main = "moto"

    def start(self) -> None:
        program = need("moto_server", "pip install 'moto[server,s3]'")
        self.spawn("moto", program, "-H", "127.0.0.1", "-p", str(self.port))
        wait_until(lambda: listens(self.port), "moto_server")

    restart = start


class WebDavServer(Server):
    """wsgidav, over a directory that outlives a restart."""

    main = "wsgidav"

    def start(self) -> None:
        program = need("wsgidav", "pip install wsgidav cheroot")
        (self.directory / "root").mkdir(exist_ok=True)
        self.spawn(
            "wsgidav", program, "--host", "127.0.0.1", "--port", str(self.port), "--root",
            str(self.directory / "root"), "--auth", "anonymous", "--no-config",
        )  # fmt: skip
        wait_until(lambda: answers(self.endpoint), "wsgidav")

    restart = start


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
        """Who vouches for its certificate."""
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
        """`ceph`, again and again: a monitor that has just begun to listen refuses what it will do a moment later."""
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
