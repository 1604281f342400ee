"""A value longer than its reader accepts is refused before a client reads it into memory."""

from __future__ import annotations

import gzip
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvloom import BackendError, CorruptBlobError, get_at_most
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

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"webdav://127.0.0.1:{server.server_port}/kv"
        backend = FsspecBackend(FsspecBackend.Config(url=url, allow_http=True, retries=0))
        with pytest.raises(BackendError, match=problem):
            get_at_most(backend, "a", 1000)
        assert len(sent) == 1
        backend.close()
        server.shutdown()
