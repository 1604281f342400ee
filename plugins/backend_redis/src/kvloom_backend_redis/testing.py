"""Real servers for tests, benchmarks and examples: each in a temporary directory, on free ports of 127.0.0.1.

`with RedisServer() as server:` starts one that ends with its block, and with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from redis import Redis, RedisError

START_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def binary(name: str) -> str:
    """Raises RuntimeError if it is not installed."""
    found = shutil.which(name)
    if found is None:
        package = "openssl" if name == "openssl" else name
        raise RuntimeError(f"{name} is not installed; on Debian and Ubuntu: apt-get install {package}")
    return found


def until(true: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> None:
    """Wait until something is so. Raises RuntimeError if it never is; RedisError counts as not yet."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(RedisError, OSError):
            if true():
                return
        if time.monotonic() > end:
            raise RuntimeError(f"never came: {what}")
        time.sleep(0.02)


class RedisServer:
    """A `redis-server`. settings: of redis.conf, with `_` for `-`, on top of what keeps it small and quick.

    under: what makes of a command one that runs on another host.
    """

    program = "redis-server"

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, tls: Certificates | None = None, unix: bool = False,
        under: Callable[[Sequence[str]], list[str]] = list, **settings: Any,
    ) -> None:  # fmt: skip
        self._under = under
        self.host = host
        self.port = port or free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="kvloom-redis-"))
        self.tls = tls
        self.socket = self.directory / "redis.sock" if unix else None
        self._settings: dict[str, object] = {"save": '""', "appendonly": "no", "bind": "127.0.0.1", **self._ports()}
        self._settings |= {name.replace("_", "-"): value for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def _ports(self) -> dict[str, object]:
        ports: dict[str, object] = {"port": 0 if self.tls else self.port}
        if self.tls is not None:
            ports |= {"tls-port": self.port, "tls-ca-cert-file": self.tls.ca, "tls-auth-clients": "optional"}
            ports |= {"tls-cert-file": self.tls.cert, "tls-key-file": self.tls.key}
        if self.socket is not None:
            ports["unixsocket"] = self.socket
        return ports

    @property
    def url(self) -> str:
        if self.socket is not None:
            return f"unix://{self.socket}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}"

    def client(self, **settings: Any) -> Redis:
        """redis-py, to look and to set things round the backend."""
        if self.tls is not None:
            tls = self.tls
            settings |= {"ssl": True, "ssl_ca_certs": str(tls.ca)}
            settings |= {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
        password: Any = self._settings.get("requirepass")
        return Redis(host=self.host, port=self.port, password=password, socket_timeout=5, protocol=2, **settings)

    def __enter__(self) -> RedisServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill it and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(self) -> None:
        """Start it with its saved data, and wait until it answers. Raises RuntimeError."""
        config = self.directory / "redis.conf"
        if not config.exists():
            lines = [f"{name} {value}" for name, value in self._settings.items()]
            config.write_text("\n".join([*lines, f"dir {self.directory}", ""]))
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._under(self._command(config)), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=_ends_with_its_parent,
            )  # fmt: skip
        try:
            until(self._answers, f"the start of {self.program}")
        except RuntimeError as error:
            self.kill()
            raise RuntimeError(f"{error}: {(self.directory / 'log').read_text()[-500:]}") from None

    def kill(self) -> None:
        """SIGKILL, also where it is frozen. May be repeated."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Restart on the same port; unsaved data is lost."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections are accepted, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        os.killpg(self._process.pid, number)

    def _command(self, config: Path) -> list[str]:
        return [binary(self.program), str(config)]

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.program} ended by itself")
        with contextlib.closing(self.client()) as client:
            return bool(client.ping())


class RedisSentinel(RedisServer):
    """A `redis-sentinel` of its own for one master, quick to decide."""

    program = "redis-sentinel"

    def __init__(self, master: RedisServer, service: str = "kv") -> None:
        super().__init__()
        self.service = service
        name = f"sentinel %s {service}"
        lines: dict[str, object] = {"port": self.port, "bind": self.host}
        lines |= {f"sentinel monitor {service}": f"{master.host} {master.port} 1"}
        lines |= {name % "down-after-milliseconds": 300, name % "failover-timeout": 2000}
        self._settings = lines

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self.host}:{self.port}/{self.service}"


class RedisCluster:
    """Masters that share all slots evenly."""

    def __init__(self, masters: int = 3, **settings: Any) -> None:
        self.nodes = [
            RedisServer(cluster_enabled="yes", cluster_node_timeout=1000, cluster_port=free_port(), **settings)
            for _ in range(masters)
        ]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    def __enter__(self) -> RedisCluster:
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.callback(node.close)
            for node in self.nodes:
                node.start()
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _join(self) -> None:
        first = self.nodes[0]
        for number, node in enumerate(self.nodes):
            start, end = (16384 * which // len(self.nodes) for which in (number, number + 1))
            self._say(node, "CLUSTER", "ADDSLOTSRANGE", start, end - 1)
            self._say(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            bus = node._settings["cluster-port"]
            self._say(first, "CLUSTER", "MEET", node.host, node.port, bus)
        for node in self.nodes:
            until(lambda node=node: b"cluster_state:ok" in self._info(node), "a cluster that serves all slots")  # type: ignore[misc]
            until(lambda node=node: len(self._say(node, "CLUSTER", "SLOTS")) == len(self.nodes), "one that agrees")  # type: ignore[misc]

    def node_id(self, node: RedisServer) -> str:
        return str(self._say(node, "CLUSTER", "MYID").decode())

    def begin_moving(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """From then on, `source` sends for keys that it no longer has to `target` (ASK)."""
        self._say(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        self._say(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(target))

    def move_keys(self, slot: int, source: RedisServer, target: RedisServer, most: int = 1000) -> int:
        keys = self._say(source, "CLUSTER", "GETKEYSINSLOT", slot, most)
        for key in keys:
            self._say(source, "MIGRATE", target.host, target.port, key, 0, 5000)
        return len(keys)

    def end_moving(self, slot: int, target: RedisServer) -> None:
        """From now on, all other nodes redirect to `target` (MOVED)."""
        for node in [target, *(node for node in self.nodes if node is not target)]:
            self._say(node, "CLUSTER", "SETSLOT", slot, "NODE", self.node_id(target))

    def _info(self, node: RedisServer) -> bytes:
        answer = self._say(node, "CLUSTER", "INFO")
        return answer if isinstance(answer, bytes) else repr(answer).encode()

    def _say(self, node: RedisServer, *words: object) -> Any:
        """Run a command; return the server's reply, not redis-py's interpretation of it."""
        with contextlib.closing(node.client()) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)  # type: ignore[no-untyped-call]


class Certificates:
    """An authority of its own in `directory`, and a certificate for `names` that it has signed."""

    def __init__(self, directory: Path, names: str) -> None:
        self.ca, self.cert, self.key = (directory / name for name in ("ca.crt", "server.crt", "server.key"))
        ca_key, request = directory / "ca.key", directory / "server.csr"
        extensions = directory / "extensions"
        extensions.write_text(f"subjectAltName = {names}\n")
        new = ["req", "-newkey", "rsa:2048", "-nodes"]
        _openssl(*new, "-x509", "-days", "2", "-subj", "/CN=kvloom test CA", "-keyout", ca_key, "-out", self.ca)
        _openssl(*new, "-subj", "/CN=localhost", "-keyout", self.key, "-out", request)
        signed = ["-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions]
        _openssl("x509", "-req", "-in", request, *signed, "-out", self.cert)


@contextlib.contextmanager
def certificates(names: str = "IP:127.0.0.1, DNS:localhost") -> Iterator[Certificates]:
    """In a directory that is removed again."""
    with tempfile.TemporaryDirectory(prefix="kvloom-tls-") as directory:
        yield Certificates(Path(directory), names)


def _openssl(*words: object) -> None:
    done = subprocess.run([binary("openssl"), *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl: {done.stderr[-500:]}")


def _ends_with_its_parent() -> None:
    if hasattr(signal, "SIGKILL"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
