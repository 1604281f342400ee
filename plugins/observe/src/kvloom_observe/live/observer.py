"""`live`: offers what the engine does now on a Unix socket, for `kvloom top` and `kvloom serve`."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

import kvloom
from kvloom import Config, Event, KVSpec, Observer, Watched

from ..http_messages import Request, Response
from ..http_server import HTTPServer
from .snapshot import View
from .sockets import bind, bind_default


class LiveConfig(Config):
    path: Path | None = None
    """The socket, 0600; by default one in a directory that is this user's alone, found by `kvloom top` by itself."""
    prefill_tokens_per_second: float | None = Field(default=None, gt=0)
    """The engine's speed of prefill. With it, the view shows the time that hits have saved."""


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
        self._server = _Server(self._settings.path, engine.instance_id, self.view)

    @property
    def path(self) -> Path | None:
        """The socket's path, once the engine is open."""
        return None if self._server is None else self._server.path

    def on_event(self, event: Event) -> None:
        self.view.event(event)

    def on_request(self, request: kvloom.Request, caller: object) -> None:
        self.view.request(request)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


class _Server:
    """Answers /snapshot until `close`."""

    def __init__(self, path: Path | None, instance_id: str, view: View) -> None:
        self._view = view
        self._bound = bind_default(instance_id) if path is None else bind(path.expanduser())
        try:
            self._http = HTTPServer(self._bound.listener, self._answer, name="kvloom-live")
            self._http.start()
        except BaseException:
            self._bound.close()
            raise

    @property
    def path(self) -> Path:
        return self._bound.path

    def close(self) -> None:
        self._http.close()
        self._bound.close()

    def _answer(self, request: Request) -> Response:
        path, _, query = request.target.partition("?")
        if request.method != "GET" or path != "/snapshot":
            return Response(404)
        told = self._view.snapshot(series=query == "series=1")
        return Response(200, json.dumps(told).encode(), (("Content-Type", "application/json"),))
