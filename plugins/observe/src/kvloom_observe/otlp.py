"""An exporter of OTLP over HTTP that no collector keeps, and that draws none of the application's random numbers."""

from __future__ import annotations

import os
import random
from typing import Any

import requests
import urllib3
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from .ending import Ending

_CREDENTIALS = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}CREDENTIAL_PROVIDER"
"""The variable with the user's own session, which is left unchanged."""
_JITTER = 0.2
_system = random.SystemRandom()


def exporter(endpoint: str | None, timeout: float) -> OTLPSpanExporter:
    """Return one whose requests end after `timeout` seconds, whatever comes back, and that reads headers alone."""
    others = any(_CREDENTIALS.format(signal) in os.environ for signal in ("", "TRACES_"))
    made = OTLPSpanExporter(endpoint=endpoint, timeout=timeout, session=None if others else _Session(timeout))
    client = getattr(made, "_client", None)
    if client is not None:  # from 1.43 on it draws a pause from Python's `random` for each batch, needed or not
        client._compute_backoff = _pause
    return made


def _pause(retry: int) -> float:
    return 2.0**retry * _system.uniform(1 - _JITTER, 1 + _JITTER)


class _Session(requests.Session):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(seconds))

    def request(self, *args: Any, **settings: Any) -> requests.Response:
        """Send a request. The body may have any length, and is ignored."""
        response = super().request(*args, **{**settings, "stream": True})
        response.close()
        return response


class _Adapter(HTTPAdapter):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        super().__init__()

    def init_poolmanager(self, *args: Any, **settings: Any) -> None:
        super().init_poolmanager(*args, **settings)
        self.poolmanager.pool_classes_by_scheme = _pools(self._seconds)

    def proxy_manager_for(self, proxy: str, **settings: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **settings)
        manager.pool_classes_by_scheme = _pools(self._seconds)
        return manager


def _pools(seconds: float) -> dict[str, Any]:
    """Connection pools with a total time limit. A timeout of requests begins anew with each byte."""

    class HTTP(Ending, HTTPConnection):
        most_seconds = seconds

    class HTTPS(Ending, HTTPSConnection):
        most_seconds = seconds

    class HTTPPool(urllib3.HTTPConnectionPool):
        ConnectionCls = HTTP

    class HTTPSPool(urllib3.HTTPSConnectionPool):
        ConnectionCls = HTTPS

    return {"http": HTTPPool, "https": HTTPSPool}
