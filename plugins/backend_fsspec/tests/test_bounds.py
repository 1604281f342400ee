"""A value longer than its reader accepts is refused before a client reads it into memory."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from kvloom import BackendError, CorruptBlobError, get_at_most
from kvloom_backend_fsspec import pace
from kvloom_backend_fsspec.backend import FsspecBackend


def test_fsspec_asks_how_long_a_file_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FsspecBackend(FsspecBackend.Config(url=f"memory://{uuid.uuid4().hex}"))
    backend.put("key", [b"x" * 11])
    assert get_at_most(backend, "key", 11) == b"x" * 11 and get_at_most(backend, "other", 11) is None
    monkeypatch.setattr(type(backend._store()._fs), "cat_file", None)
    with pytest.raises(CorruptBlobError, match="11 bytes where at most 10"):
        get_at_most(backend, "key", 10)


_PROPERTIES = b"""<?xml version="1.0"?><D:multistatus xmlns:D="DAV:"><D:response><D:href>/kv/a%3Dkv</D:href><D:propstat>
<D:prop><D:getcontentlength>1000</D:getcontentlength><D:resourcetype/></D:prop><D:status>HTTP/1.1 200 OK</D:status>
</D:propstat></D:response></D:multistatus>"""


@pytest.mark.parametrize(("packed", "problem"), [(True, "compresses its answer"), (False, "more than 1000 bytes")])
def test_a_server_that_sends_more_than_it_said_is_not_listened_to(packed: bool, problem: str) -> None:
    pytest.importorskip("webdav4")
    sent: list[int] = []

    class Server(BaseHTTPRequestHandler):
        def do_PROPFIND(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.answer(207, _PROPERTIES)

        def do_GET(self) -> None:
            sent.append(1)
            self.answer(200, gzip.compress(bytes(1 << 20)) if packed else bytes(1001))

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            if packed and status == 200:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Server) as port:
        backend = FsspecBackend(FsspecBackend.Config(url=f"webdav://127.0.0.1:{port}/kv", allow_http=True, retries=0))
        with pytest.raises(BackendError, match=problem):
            get_at_most(backend, "a", 1000)
        assert len(sent) == 1
        backend.close()


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("long", "more than 1000 bytes"),
        ("packed", "compresses its answer"),
        ("tags", "too many tags"),
        ("header", "timed out"),
        ("body", "timed out"),
    ],
)
def test_a_server_whose_listing_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: str, problem: str
) -> None:
    """header, body: it sends a byte at a time of these, and each in time."""
    pytest.importorskip("webdav4")
    over = threading.Event()

    class Server(BaseHTTPRequestHandler):
        def do_PROPFIND(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            if kind != "header":
                self.send_response(207)
                if kind == "packed":
                    self.send_header("Content-Encoding", "gzip")
                self.end_headers()
            if kind in ("header", "body"):
                self.wfile.write(b"HTTP/1.1 207 Multi-Status\r\nX: " if kind == "header" else b"<")
                while not over.wait(0.02):
                    self.wfile.write(b" ")
            else:
                much = b"<a/>" * 200 if kind == "tags" else b" " * 1001
                self.wfile.write(gzip.compress(_PROPERTIES) if kind == "packed" else _PROPERTIES + much)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(pace, "_MOST_ANSWER_BYTES", 1000 if kind != "tags" else 10_000)
    with serving(Server) as port:
        config = FsspecBackend.Config(
            url=f"webdav://127.0.0.1:{port}/kv",
            allow_http=True,
            retries=0,
            timeout="5s" if kind in ("long", "tags") else "300ms",
        )
        backend = FsspecBackend(config)
        threading.Timer(20, over.set).start()
        with pytest.raises(BackendError, match=problem):
            list(backend.scan())
        assert not over.is_set()
        over.set()
        backend.close()


def test_a_request_that_a_server_takes_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout of httpx begins anew with each part that is taken."""
    taken, now, bytes_a_second = 0, 0.0, 1 << 20

    class Network:
        def write(self, data: bytes, timeout: float) -> None:
            nonlocal taken, now
            taken += len(data)
            now += len(data) / bytes_a_second

        def read(self, most: int, timeout: float) -> bytes:
            assert timeout == 5
            return b"HTTP/1.1 201"

    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now))
    stream = pace._PacedStream(Network(), pace.Pace(5))
    for data in (b"PUT", bytes(32 << 20)):
        stream.write(data, timeout=60)
    assert stream.read(100, timeout=60) and taken == (32 << 20) + 3
    bytes_a_second, taken = 1 << 10, 0
    with pytest.raises(TimeoutError):
        stream.write(bytes(32 << 20), timeout=60)
    assert taken < 1 << 20


def test_a_control_character_in_the_name_of_a_file_ends_no_listing() -> None:
    pytest.importorskip("webdav4")

    class Server(BaseHTTPRequestHandler):
        def do_PROPFIND(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.send_response(207)
            self.end_headers()
            self.wfile.write(_PROPERTIES.replace(b"<D:prop>", b"<D:prop><D:displayname>\1</D:displayname>"))

        def log_message(self, *_: object) -> None:
            pass

    with serving(Server) as port:
        backend = FsspecBackend(FsspecBackend.Config(url=f"webdav://127.0.0.1:{port}/kv", allow_http=True, retries=0))
        assert [entry.key for entry in backend.scan()] == ["a"]
        backend.close()


@pytest.mark.parametrize(
    ("key", "date", "problem"),
    [("kv//x", "2026-01-01T00:00:00.000Z", "remove the object"), ("kv/x", "0000-01-01T00:00:00.000Z", "cannot be")],
)
def test_what_no_bucket_can_have_is_an_error_of_the_store(key: str, date: str, problem: str) -> None:
    pytest.importorskip("obstore")

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            one = f"<Contents><Key>{key}</Key><LastModified>{date}</LastModified><Size>4</Size></Contents>"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"<ListBucketResult><IsTruncated>false</IsTruncated>{one}</ListBucketResult>".encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Server) as port:
        options = {"endpoint": f"http://127.0.0.1:{port}", "region": "x", "skip_signature": "true"}
        backend = FsspecBackend(FsspecBackend.Config(url="s3://bucket/kv", options=options, allow_http=True))
        with pytest.raises(BackendError, match=problem):
            list(backend.scan())
        backend.close()


@pytest.mark.parametrize("kind", ["repeated", "new", "empty"])
def test_a_bucket_whose_listing_goes_on_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """kind: of its pages. obstore goes on past empty ones by itself."""
    pytest.importorskip("obstore")
    from kvloom_backend_fsspec.stores import obstore_store

    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            name = f"{0 if kind == 'repeated' else len(asked):08d}=kv"
            one = (
                ""
                if kind == "empty"
                else (
                    f"<Contents><Key>kv/{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    "<ETag>&quot;1&quot;</ETag><Size>4</Size></Contents>"
                )
            )
            token = "<NextContinuationToken>t</NextContinuationToken>"
            body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}{one}</ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(obstore_store, "_PAGE", 1)
    monkeypatch.setattr(obstore_store, "_MOST_PAGES", 5)
    monkeypatch.setattr(obstore_store, "_PAGE_TIMEOUTS", 0.1 if kind == "empty" else 10)
    with serving(Server) as port:
        options = {"endpoint": f"http://127.0.0.1:{port}", "region": "x", "skip_signature": "true"}
        config = FsspecBackend.Config(url="s3://bucket/kv", options=options, allow_http=True)
        backend = FsspecBackend(config)
        found: list[str] = []
        pages = {"repeated": 1, "new": 5, "empty": 0}[kind]
        with pytest.raises(BackendError, match=f"does not end: it is at page {pages}"):
            found.extend(entry.key for entry in backend.scan())
        assert len(found) == pages
        backend.close()
        asked.clear()
        time.sleep(0.2)
        assert len(asked) < 2, "it is asked on"


@pytest.mark.parametrize("status", [200, 301])
def test_a_directory_in_the_place_of_a_blob_is_not_there(status: int) -> None:
    """WebDAV says no length of one; servers send a page about it, or to where it ends in a slash."""
    pytest.importorskip("webdav4")
    collection = _PROPERTIES.replace(b"<D:getcontentlength>1000</D:getcontentlength><D:resourcetype/>",
                                     b"<D:resourcetype><D:collection/></D:resourcetype>")  # fmt: skip

    class Server(BaseHTTPRequestHandler):
        def do_PROPFIND(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.answer(207, collection)

        def do_GET(self) -> None:
            self.answer(status, b"<html>an index</html>")

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            if status == 301:
                self.send_header("Location", f"{self.path}/")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Server) as port:
        backend = FsspecBackend(FsspecBackend.Config(url=f"webdav://127.0.0.1:{port}/kv", allow_http=True, retries=0))
        assert not backend.contains("a") and backend.get("a") is None and get_at_most(backend, "a", 1000) is None
        assert not backend.get_range("a", 0, memoryview(bytearray(1)))
        backend.close()
