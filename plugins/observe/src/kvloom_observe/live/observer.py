"""`live`: offers what the engine does now on a Unix socket, for `kvloom top` and `kvloom serve`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any, cast

from pydantic import Field

from kvloom import Config, Event, KVSpec, Observer, Request, Watched

from .snapshot import View
from .sockets import bind, default_path


class LiveConfig(Config):
    path: Path | None = None
    """The socket, 0600; by default one in a directory that is this user's alone, found by `kvloom top` by itself."""
    prefill_tokens_per_second: float | None = Field(default=None, gt=0)
    """How fast the engine computes a prompt; with it, the time that hits have saved can be told."""


class LiveObserver(Observer):
    type = "live"
    sees_requests = True
    Config = LiveConfig

    def __init__(self, config: LiveConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._settings = config
        if config.path is not None and not config.path.expanduser().parent.is_dir():
            raise ValueError(f"path: there is no directory {config.path.expanduser().parent}; make it")
        self.view = View(prefill_tokens_per_second=config.prefill_tokens_per_second)
        self._server: _Server | None = None

    def watch(self, engine: Watched) -> None:
        self.view.engine = engine
        self._server = _Server(self._settings.path or default_path(engine.instance_id), self.view)

    @property
    def path(self) -> Path | None:
        """Where it listens, once the engine is open."""
        return None if self._server is None else self._server.path

    def on_event(self, event: Event) -> None:
        self.view.event(event)

    def on_request(self, request: Request, caller: object) -> None:
        self.view.request(request)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


class _Answer(BaseHTTPRequestHandler):
    timeout = 10.0

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path != "/snapshot":
            self.send_error(404)
            return
        told = cast(_Server, self.server).view.snapshot(series=query == "series=1")
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody wants to read this."""

    def address_string(self) -> str:
        return "local"


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, view: View) -> None:
        self.path = path.expanduser()
        self.view = view
        listening = bind(self.path)
        super().__init__(str(self.path), _Answer, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._pid = os.getpid()
        self._file = os.lstat(self.path).st_ino
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="kvloom-live", daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, str]:
        request, _ = self.socket.accept()
        return request, "local"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked went away."""

    def close(self) -> None:
        if os.getpid() != self._pid:  # the socket is the parent's
            self.socket.close()
            return
        self.shutdown()
        self.server_close()
        self._thread.join(5.0)
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._file:
                os.unlink(self.path)
