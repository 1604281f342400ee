"""`opentelemetry`: a span for each request, with one for each tier and codec in it, in the caller's trace."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kvloom import Config, Event, KVSpec, Observer, Request, Step, Watched, pip_install

_VERBS = ("lookup",)
"""Told of only if `lookups` is set."""
_PAST_END = ("write", "encode")


class OpenTelemetryConfig(Config):
    endpoint: str | None = None
    """The address for spans by OTLP over HTTP, such as http://collector:4318/v1/traces; the default comes from
    OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT. Unused if the application has its own tracer
    provider: kvloom's spans then go there too."""
    service_name: str = "kvloom"
    """The resource's service name, unless OTEL_SERVICE_NAME is set."""
    sample: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of sampled requests among those without a caller's trace; the others follow their caller's."""
    lookups: bool = False
    """Tell of lookups, too."""
    timeout: float = Field(default=2.0, gt=0, le=60)
    """Seconds for a batch to be sent, and for `close`. Of answers the headers are read alone."""

    @field_validator("endpoint")
    @classmethod
    def _takes_spans(cls, value: str | None) -> str | None:
        """The exporter would find out at its first batch, and say so in a log alone."""
        if value is not None:
            parts = urlsplit(value)
            host = parts.hostname if parts.port is None or parts.port > 0 else None  # ValueError for no port at all
            if parts.scheme not in ("http", "https") or not host or not parts.path.strip("/"):
                raise ValueError(
                    f"{value!r} is not an address for OTLP over HTTP: write http://collector:4318/v1/traces"
                )
        return value


class OpenTelemetryObserver(Observer):
    """Times are those of the request; spans are made when it is over."""

    type = "opentelemetry"
    sees_requests = True
    Config = OpenTelemetryConfig
    extras: ClassVar[Mapping[str, str]] = {"opentelemetry.sdk": "otel"}

    def __init__(self, config: OpenTelemetryConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        try:
            from opentelemetry import context, trace
        except ImportError:
            raise ImportError(f"needs opentelemetry-sdk: {pip_install('kvloom-observe', 'otel')}") from None
        self._settings = config
        self._current = context.get_current
        self._trace = trace
        self._own: _Own | None = None
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):  # none is set
            self._own = _provider(config)
            provider = self._own.provider
        self._tracer = provider.get_tracer("kvloom")
        self._about: dict[str, str] = {}

    def watch(self, engine: Watched) -> None:
        self._about = {"kvloom.engine": engine.instance_id, "kvloom.model": engine.spec.model}

    def on_event(self, event: Event) -> None:
        """Sums are for metrics."""

    def caller(self) -> object:
        return self._current()

    def on_request(self, request: Request, caller: object) -> None:
        if request.verb in _VERBS and not self._settings.lookups:
            return
        began, ended = _nanoseconds(request.began), _nanoseconds(request.began + request.seconds)
        attributes: dict[str, Any] = {
            **self._about,
            "kvloom.tokens": request.tokens,
            "kvloom.served_tokens": request.served_tokens,
            "kvloom.chunks": len(request.keys) - request.first,
            **{f"kvloom.tokens_from.{tier}": tokens for tier, tokens in request.sources.items()},
        }
        span = self._tracer.start_span(
            f"kvloom.{request.verb}", context=caller, start_time=began, attributes=attributes,
        )  # fmt: skip
        if request.error:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, request.error))
        inside = self._trace.set_span_in_context(span)
        whole = {step.tier: step for step in request.steps if not step.codec}
        for tier, step in whole.items():
            child = self._child(step, inside)
            within = self._trace.set_span_in_context(child)
            for part in request.steps:
                if part.codec and part.tier == tier:
                    self._child(part, within).end(_nanoseconds(part.began + part.seconds))
            child.end(_nanoseconds(step.began + step.seconds))
        span.end(ended)

    def _child(self, step: Step, context: Any) -> Any:
        about: dict[str, Any] = {
            "kvloom.chunks": step.chunks, "kvloom.bytes": step.bytes, "kvloom.busy_seconds": step.busy_seconds,
        }  # fmt: skip
        if step.tier:
            about["kvloom.tier"] = step.tier
        if step.codec:
            about["kvloom.codec"] = step.codec
        name = f"{step.name} {step.codec or step.tier}".strip()
        return self._tracer.start_span(name, context=context, start_time=_nanoseconds(step.began), attributes=about)

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.finish(self._settings.timeout)


class _Own:
    """A tracer provider for kvloom's spans alone, and where its spans go."""

    def __init__(self, provider: Any, exporter: Any) -> None:
        self.provider, self._exporter = provider, exporter

    def finish(self, seconds: float) -> None:
        """Send the queue, for at most so many seconds; a batch under way then ends on its own, and the
        rest is dropped."""
        thread = threading.Thread(target=self.provider.shutdown, name="kvloom-spans", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():  # each batch may take as long, and the provider waits for all of them
            self._exporter.shutdown()


def _provider(config: OpenTelemetryConfig) -> _Own:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        from .otlp import exporter
    except ImportError:
        remedy = pip_install("kvloom-observe", "otel")
        raise ImportError(f"needs opentelemetry-sdk and an OTLP exporter: {remedy}") from None

    class Ids(RandomIdGenerator):
        """Random ids from the system. Python's `random` belongs to the application, which may seed every rank alike."""

        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1

        def generate_trace_id(self) -> int:
            return secrets.randbits(128) or 1

    resource = Resource.create({"service.name": config.service_name})
    provider = TracerProvider(
        resource=resource, sampler=ParentBasedTraceIdRatio(config.sample), id_generator=Ids(), shutdown_on_exit=False
    )
    out = exporter(config.endpoint, config.timeout)
    provider.add_span_processor(BatchSpanProcessor(out, export_timeout_millis=1000 * config.timeout))
    return _Own(provider, out)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
