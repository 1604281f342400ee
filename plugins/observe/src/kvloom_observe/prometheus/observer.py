"""`prometheus`: metrics over HTTP, for a Prometheus server to fetch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from kvloom import Config, Event, KVSpec, Observer, Request, Watched

from .endpoint import Endpoint, acquire, release
from .figures import Figures


class PrometheusConfig(Config):
    port: int = Field(default=9464, ge=0, le=65535)
    """Engines of one process share it, told apart by the label `engine`. 0: any that is free, for tests."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """The address to listen on. There is no authentication, so the default is this machine alone."""


class PrometheusObserver(Observer):
    """Counts; a scrape reads the counts and asks the engine how its tiers are, and no store."""

    type = "prometheus"
    sees_requests = True
    Config = PrometheusConfig
    extras: ClassVar[Mapping[str, str]] = {"prometheus_client": "prometheus"}

    def __init__(self, config: PrometheusConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self.figures = Figures()
        self._endpoint: Endpoint | None = acquire(config.host, config.port, self.figures)
        self.port = self._endpoint.port
        """The port it listens on."""

    def watch(self, engine: Watched) -> None:
        self.figures.engine = engine

    def on_event(self, event: Event) -> None:
        self.figures.event(event)

    def on_request(self, request: Request, caller: object) -> None:
        self.figures.request(request)

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            release(endpoint, self.figures)
