"""One read-only page: static files, the engine's snapshot, and `kvloom why` for a prompt."""

from __future__ import annotations

import ipaddress
import json
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..http_messages import Request, RequestError, Response
from ..http_server import HTTPServer, Later, Limits, listening
from ..sources import Source
from .daemon_threads import DaemonThreads
from .questions import Questions

_STATIC = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'"
)
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Server", "kvloom"),
)
_LIMITS = Limits(connections=32, body_bytes=8 << 20, seconds=30.0)
_READERS = 2
"""Threads that ask the engine for snapshots."""


class Page:
    """Serves until `close`."""

    def __init__(self, source: Source, host: str, port: int, *, config: Path | None, spec: Path | None) -> None:
        """Raises OSError if the address cannot be had."""
        self._source = source
        self._questions = None if config is None or spec is None else Questions(config, spec)
        self._readers = DaemonThreads("kvloom-serve")
        self._names = {_name(host)}
        if _is_loopback(host):
            self._names |= {"localhost", "127.0.0.1", "::1"}
        listener = listening(host, port)
        self.port: int = listener.getsockname()[1]
        self._server = HTTPServer(listener, self._answer, _LIMITS, refuse=_refused)

    def run(self) -> None:
        self._server.run()

    def close(self) -> None:
        """Stop. Answers that are being made are not waited for."""
        self._server.close()
        if self._questions is not None:
            self._questions.close()

    def stop(self) -> None:
        """Have `run` return. From another thread."""
        self._server.stop()

    def _answer(self, request: Request) -> Response | Later:
        try:
            self._check_origin(request)
            path = urlsplit(request.target).path
        except ValueError:
            raise RequestError(400, "its target or Origin is not a URL") from None
        if request.method == "POST":
            return self._asked(path, request)
        if request.method not in ("GET", "HEAD"):
            raise RequestError(501, f"Unsupported method {request.method}")
        if path in _STATIC:
            name, kind = _STATIC[path]
            return _response(200, kind, files(__package__).joinpath("static", name).read_bytes())
        if path == "/snapshot.json":
            return Later(self._readers, self._snapshot, _LIMITS.connections // 2, _READERS)
        raise RequestError(404, "there is no such page")

    def _snapshot(self) -> Response:
        try:
            told = self._source.read(True)
        except (OSError, ValueError) as error:
            return _json(503, {"error": str(error)})
        return _json(200, {**told, "why": self._questions is not None})

    def _asked(self, path: str, request: Request) -> Response | Later:
        """A question with a body; nothing is changed by it."""
        if path != "/why.json":
            raise RequestError(404, "there is no such question; POST /why.json")
        if self._questions is None:
            raise RequestError(404, "start it with --config and --spec")
        if not request.body or request.headers.get("Content-Type") != "application/json":
            raise RequestError(400, 'send JSON: {"tokens": [...], "salts": [...]}')
        return self._questions.ask(request.body, answered=_json)

    def _check_origin(self, request: Request) -> None:
        """A page elsewhere that has its name point here is not answered, nor one that asks across origins."""
        host = (request.headers.get("Host") or "").lower()
        name = _name(host if host.endswith("]") else host.rpartition(":")[0] or host)
        origin = request.headers.get("Origin")
        if name not in self._names and not (self._names & {"0.0.0.0", "::"}):
            raise RequestError(
                403, "the Host header names another server; use the name or address that `kvloom serve` listens on"
            )
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            raise RequestError(403, "requests from pages of other origins are refused")


def _refused(status: int, text: str) -> Response:
    return _json(status, {"error": text})


def _json(status: int, content: dict[str, Any]) -> Response:
    return _response(status, "application/json", json.dumps(content).encode())


def _response(status: int, kind: str, body: bytes) -> Response:
    return Response(status, body, (("Content-Type", f"{kind}; charset=utf-8"), *_HEADERS))


def _name(host: str) -> str:
    """Return a host in the one form in which it is compared; an address has several, and brackets in a URL."""
    host = host.lower().strip("[]")
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
