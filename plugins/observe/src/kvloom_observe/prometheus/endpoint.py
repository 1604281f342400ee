"""One HTTP endpoint for each address, shared by the engines of a process."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from kvloom import pip_install

from ..http_messages import Request, Response
from ..http_server import HTTPServer, listening
from . import metrics as m
from .figures import Figures, Sample


class Endpoint:
    """Serves what its engines' figures are at the time. It ends with the last of them."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if the address cannot be had, ImportError without prometheus-client."""
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import make_wsgi_app
        except ImportError:
            raise ImportError(f"needs prometheus-client: {pip_install('kvloom-observe', 'prometheus')}") from None
        self.figures: list[Figures] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._app = make_wsgi_app(self._registry)
        listener = _listening(host, port)
        self.port: int = listener.getsockname()[1]
        self._server = HTTPServer(listener, self._scraped, name="kvloom-prometheus")
        self._server.start()

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        """For prometheus-client: all families, with a label `engine` in front."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        families: dict[m.Metric, Any] = {}
        for metric in m.METRICS:
            labels = ("engine", *metric.labels)
            made = kinds.get(metric.kind, HistogramMetricFamily)
            families[metric] = made(metric.name, metric.help, labels=labels)
        names: set[str] = set()
        for figures in tuple(self.figures):
            if figures.engine is None:
                continue
            name, number = figures.engine.instance_id, 1
            while name in names:  # the name with a number may be another engine's own
                number += 1
                name = f"{figures.engine.instance_id}-{number}"
            names.add(name)
            for sample in figures.samples():
                _put(families[sample.metric], (name, *sample.labels), sample)
        return [family for family in families.values() if family.samples]

    def close(self) -> None:
        self._server.close()

    def _scraped(self, request: Request) -> Response:
        """The answer of prometheus-client's own application."""
        path, _, query = request.target.partition("?")
        environ = {
            "REQUEST_METHOD": request.method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT": request.headers.get("Accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("Accept-Encoding", ""),
        }
        said: list[Any] = []
        body = b"".join(self._app(environ, lambda *status_and_headers: said.extend(status_and_headers)))
        status, headers = said
        return Response(int(status.split()[0]), body, tuple(headers))


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError with what to set instead."""
    try:
        return listening(host, port)
    except OSError as error:
        other = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        text = f"port {port} of {host}: {error.strerror or error}; set another `{other}`"
        raise OSError(error.errno, text) from None


def _put(family: Any, labels: tuple[str, ...], sample: Sample) -> None:
    if not sample.buckets:
        family.add_metric(labels, sample.value)
        return
    bounds = [*(f"{bound:g}" for bound in m.LATENCY_BUCKETS), "+Inf"]
    counts = accumulate(sample.buckets)
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), sum_value=sample.value)


_endpoints: dict[tuple[str, int], Endpoint] = {}
_changing = threading.Lock()


def acquire(host: str, port: int, figures: Figures) -> Endpoint:
    """The endpoint at an address, with these figures among its own. Raises as `Endpoint` does."""
    with _changing:
        endpoint = _endpoints.get((host, port)) if port else None
        if endpoint is None:
            endpoint = Endpoint(host, port)
            _endpoints[host, endpoint.port] = endpoint
        endpoint.figures.append(figures)
        return endpoint


def release(endpoint: Endpoint, figures: Figures) -> None:
    """Take them out, and end the endpoint if they were the last."""
    with _changing:
        if figures in endpoint.figures:
            endpoint.figures.remove(figures)
        if not endpoint.figures:
            for address in [address for address, one in _endpoints.items() if one is endpoint]:
                del _endpoints[address]
                endpoint.close()


def _forked() -> None:
    global _changing
    _changing = threading.Lock()
    _endpoints.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
