"""One read-only page: static files, the engine's snapshot, and `kvloom why` for a prompt."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from ..sources import Source

_STATIC = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'"
)
_MOST_BYTES = 8 << 20
_WHY_SECONDS = 60


class Page:
    """Serves until `close`."""

    def __init__(self, source: Source, host: str, port: int, *, config: Path | None, spec: Path | None) -> None:
        """Raises OSError if the address cannot be had."""
        self._server = _Server((host, port), _Answer)
        self._server.source, self._server.config, self._server.spec = source, config, spec
        self._server.names = {host.lower()}
        if _is_loopback(host):
            self._server.names |= {"localhost", "127.0.0.1", "[::1]"}
        self.port: int = self._server.server_port

    def run(self) -> None:
        self._server.serve_forever(0.1)

    def close(self) -> None:
        self._server.server_close()

    def stop(self) -> None:
        """Have `run` return. From another thread."""
        self._server.shutdown()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    source: Source
    config: Path | None
    spec: Path | None
    names: set[str]


class _Answer(BaseHTTPRequestHandler):
    timeout = 30.0
    server_version = "kvloom"
    sys_version = ""

    @property
    def page(self) -> _Server:
        return cast(_Server, self.server)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        path = urlsplit(self.path).path
        if path in _STATIC:
            name, kind = _STATIC[path]
            self._send(200, kind, files(__package__).joinpath("static", name).read_bytes())
        elif path == "/snapshot.json":
            try:
                told = self.page.source.read(True)
            except (OSError, ValueError) as error:
                self._json(503, {"error": str(error)})
                return
            self._json(200, {**told, "why": self.page.config is not None})
        else:
            self._json(404, {"error": "there is no such page"})

    def do_POST(self) -> None:
        """A question with a body; nothing is changed by it."""
        if not self._is_ours():
            return
        text = self.headers.get("Content-Length") or ""
        length = int(text) if text.isdecimal() else 0
        if urlsplit(self.path).path != "/why.json":
            self._json(404, {"error": "there is no such question; POST /why.json"})
        elif self.page.config is None:
            self._json(404, {"error": "start it with --config and --spec"})
        elif not 0 < length <= _MOST_BYTES or self.headers.get("Content-Type") != "application/json":
            self._json(400, {"error": 'send JSON: {"tokens": [...], "salts": [...]}'})
        else:
            self._json(*self._why(self.rfile.read(length)))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses by itself, such as other methods, is said as everything else is."""
        self.close_connection = True
        self._json(code, {"error": message or "not understood"})

    def _why(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            asked = json.loads(body)
            tokens, salts = asked["tokens"], asked.get("salts", [])
            if type(tokens) is not list or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            return 400, {"error": "tokens: a JSON list of token ids"}
        if type(salts) is not list or not all(isinstance(salt, str) and "\0" not in salt for salt in salts):
            return 400, {"error": "salts: a JSON list of strings"}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(tokens, file)
            file.flush()
            command = [
                sys.executable, "-c", "from kvloom.cli.main import main; main()", "why", str(self.page.config),
                "--tokens", file.name, "--spec", str(self.page.spec), "--json",
                *(part for salt in salts for part in ("--salt", salt)),
            ]  # fmt: skip
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_WHY_SECONDS, check=False)
            except subprocess.TimeoutExpired:
                return 504, {"error": f"no answer within {_WHY_SECONDS} s"}
        if done.returncode:
            return 400, {"error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
        return 200, cast(dict[str, Any], json.loads(done.stdout))

    def _is_ours(self) -> bool:
        """A page elsewhere that has its name point here is not answered, nor one that asks across origins."""
        host = (self.headers.get("Host") or "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        origin = self.headers.get("Origin")
        if name not in self.page.names and not (self.page.names & {"0.0.0.0", "::"}):
            self._json(403, {"error": "ask by the name that it listens on"})
            return False
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            self._json(403, {"error": "asked from another page"})
            return False
        return True

    def _json(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """A page that asks once a second would fill the screen."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
