"""Spans: whose children they are, when they began and ended, and what is told of them."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from observe_support import dripping, kv_of, opened, settled, tokens_of
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvloom import ConfigError
from kvloom_observe import otel
from kvloom_observe.otel import OpenTelemetryObserver
from kvloom_observe.otlp import _Session, exporter
from kvloom_testkit.faults import refusing_port


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of an application that has a tracer provider."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def finished(exporter: InMemorySpanExporter) -> dict[str, Any]:
    found = {span.name: span for span in exporter.get_finished_spans()}
    exporter.clear()
    return found


def test_a_store_and_a_retrieve_in_the_callers_trace(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer_provider().get_tracer("application")
    with opened(tmp_path, "opentelemetry") as engine:
        with tracer.start_as_current_span("request") as request:
            engine.store(tokens_of(16), kv=kv_of(16))
        settled(engine)
        found = finished(spans)
        assert set(found) == {"request", "kvloom.store", "copy", "write disk", "encode torch"}
        store, write, encode = found["kvloom.store"], found["write disk"], found["encode torch"]
        assert store.parent.span_id == request.get_span_context().span_id
        assert {span.context.trace_id for span in found.values()} == {request.get_span_context().trace_id}
        assert found["copy"].parent.span_id == write.parent.span_id == store.context.span_id
        assert encode.parent.span_id == write.context.span_id
        assert write.start_time <= encode.start_time <= encode.end_time <= write.end_time
        assert found["request"].start_time <= store.start_time <= store.end_time <= found["request"].end_time + 10**6
        assert write.attributes["kvloom.chunks"] == 4 and write.attributes["kvloom.tier"] == "disk"
        assert encode.attributes["kvloom.bytes"] == 4 * 256 and encode.attributes["kvloom.codec"] == "torch"
        assert store.attributes["kvloom.tokens"] == store.attributes["kvloom.served_tokens"] == 16
        assert store.attributes["kvloom.model"] == "tiny"
    with opened(tmp_path, "opentelemetry") as engine:
        engine.retrieve(tokens_of(20), kv=kv_of(20))
        settled(engine)
        found = finished(spans)
    assert set(found) == {"kvloom.retrieve", "copy", "read disk", "decode torch"}
    retrieve = found["kvloom.retrieve"]
    assert retrieve.parent is None and retrieve.attributes["kvloom.tokens_from.disk"] == 16
    assert (retrieve.attributes["kvloom.tokens"], retrieve.attributes["kvloom.served_tokens"]) == (20, 16)
    words = [value for span in found.values() for value in (span.attributes or {}).values() if isinstance(value, str)]
    assert set(words) == {"disk", "torch", "kvloom", "tiny"}  # neither keys nor tokens


def test_threads_have_traces_of_their_own(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer_provider().get_tracer("application")
    with opened(tmp_path, "opentelemetry") as engine:

        def one(name: str, seed: int) -> None:
            with tracer.start_as_current_span(name):
                engine.prefetch(tokens_of(8, seed)).result(30)

        threads = [threading.Thread(target=one, args=(f"caller {seed}", seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settled(engine)
    callers = {span.context.trace_id: span for span in spans.get_finished_spans() if span.name.startswith("caller")}
    ours = [span for span in spans.get_finished_spans() if span.name == "kvloom.prefetch"]
    assert len(ours) == 4 and {span.context.trace_id for span in ours} == set(callers)
    assert all(span.parent.span_id == callers[span.context.trace_id].context.span_id for span in ours)


def test_errors_and_lookups(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    with opened(tmp_path, "opentelemetry") as engine:
        with pytest.raises(ValueError, match="kv"):
            engine.store(tokens_of(8), kv=kv_of(4))
        engine.lookup(tokens_of(8))
        settled(engine)
        found = finished(spans)
        assert set(found) == {"kvloom.store"}
        assert found["kvloom.store"].status.description == "ValueError" and not found["kvloom.store"].status.is_ok
    with opened(tmp_path, {"type": "opentelemetry", "lookups": True}) as engine:
        engine.lookup(tokens_of(8))
        settled(engine)
        assert set(finished(spans)) == {"kvloom.lookup"}


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_without_a_provider_spans_go_to_a_collector_by_otlp(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    server.got = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        with opened(tmp_path, {"type": "opentelemetry", "endpoint": endpoint, "service_name": "mine"}) as engine:
            engine.store(tokens_of(8), kv=kv_of(8))
            settled(engine)
        (path, told), *_ = server.got  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    resource = {one.key: one.value.string_value for one in told.resource_spans[0].resource.attributes}
    names = {span.name for scope in told.resource_spans[0].scope_spans for span in scope.spans}
    assert path == "/v1/traces" and resource["service.name"] == "mine"
    assert names == {"kvloom.store", "copy", "write disk", "encode torch"}


def exporting_to(port: int) -> dict[str, Any]:
    return {"type": "opentelemetry", "endpoint": f"http://127.0.0.1:{port}/v1/traces", "timeout": 0.3}


def test_a_collector_that_is_not_there_keeps_nobody(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with refusing_port() as port, opened(tmp_path, exporting_to(port)) as engine:
        engine.store(tokens_of(8), kv=kv_of(8))
        assert engine.retrieve(tokens_of(8), kv=kv_of(8)).all()
    assert not [thread for thread in set(threading.enumerate()) - before if "pages" not in thread.name]


def test_a_redirection_that_comes_a_byte_at_a_time_has_an_end() -> None:
    with dripping(b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n") as port, pytest.raises(requests.RequestException):
        _Session(0.1).post(f"http://127.0.0.1:{port}/v1/traces", data=b"", timeout=0.3)


@pytest.mark.parametrize("endpoint", ["nonsense", "collector:4318", "http://collector:4318", "http:///v1/traces", ""])
def test_what_no_collector_answers_at_is_refused_at_the_start(tmp_path: Path, endpoint: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"observers\.0\.endpoint: .*write http://collector:4318/v1/traces"),
        opened(tmp_path, {"type": "opentelemetry", "endpoint": endpoint}),
    ):
        pass


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(__import__("sys").modules, "kvloom_observe.otlp", raising=False)
    with pytest.raises(ImportError, match=r"pip install .*observe\[otel\]'"):
        OpenTelemetryObserver(OpenTelemetryObserver.Config())


def test_ids_are_not_drawn_from_the_applications_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OTLPSpanExporter, "export", lambda *_: SpanExportResult.SUCCESS)
    provider = otel._provider(OpenTelemetryObserver.Config(endpoint="http://127.0.0.1:1/v1/traces")).provider
    tracer, before, ids = provider.get_tracer("kvloom"), random.getstate(), set()
    for _ in range(2):
        random.setstate(before)
        span = tracer.start_span("kvloom.store")
        ids |= {span.get_span_context().trace_id, span.get_span_context().span_id}
        span.end()
    assert random.getstate() == before and len(ids) == 4
    provider.shutdown()


def test_a_batch_that_fails_draws_none_of_the_applications_random_numbers() -> None:
    before = random.getstate()
    with refusing_port() as port:
        assert exporter(f"http://127.0.0.1:{port}/v1/traces", 0.1).export([]) is SpanExportResult.FAILURE
    assert random.getstate() == before


def answered(serve: Callable[[socket.socket], None], timeout: float) -> bool:
    """Send a batch to what answers so; return whether that ends."""

    def accept() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        out = exporter(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", timeout)
        threads = [threading.Thread(target=target, daemon=True) for target in (accept, lambda: out.export([]))]
        for thread in threads:
            thread.start()
        threads[1].join(10)
        over = not threads[1].is_alive()
        out.shutdown()
        if over:
            threads[0].join()
    return over


def test_the_body_of_an_answer_is_not_read() -> None:
    sent = []

    def serve(connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
            for _ in range(64):
                connection.sendall(bytes(1 << 20))
                sent.append(1)
        except OSError:
            pass

    assert answered(serve, 10.0) and len(sent) < 32


def test_an_answer_that_comes_a_byte_at_a_time_is_ended() -> None:
    pause = threading.Event()

    def serve(connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nName: ")
            while True:
                connection.sendall(b"x")
                pause.wait(0.01)
        except OSError:
            pass

    assert answered(serve, 0.1)


class Stuck(SpanExporter):
    """Ends a batch when it is shut down."""

    def __init__(self) -> None:
        self._ended, self.kept = threading.Event(), False

    def export(self, spans: Any) -> SpanExportResult:
        self.kept |= not self._ended.wait(5)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._ended.set()


def test_closing_waits_for_the_first_batch_alone() -> None:
    stuck, provider = Stuck(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(stuck, max_export_batch_size=1))
    for _ in range(3):
        provider.get_tracer("kvloom").start_span("kvloom.store").end()
    otel._Own(provider, stuck).finish(0.02)
    assert not stuck.kept
