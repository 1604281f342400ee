"""The backend meets the requirements of storage backends on WebDAV, by fsspec's own implementation."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from kvloom import CorruptBlobError, StorageBackend
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.testing import WebDavServer
from kvloom_testkit import BackendConformance


class TestWebDav(BackendConformance):
    @pytest.fixture
    def make(self, webdav: WebDavServer) -> Callable[[], StorageBackend]:
        url = f"webdav://127.0.0.1:{webdav.port}/{uuid.uuid4().hex}"
        return lambda: FsspecBackend(FsspecBackend.Config(url=url, allow_http=True, threads=4, timeout=30))


@pytest.mark.parametrize("taken", [True, False])
def test_requests_that_were_lost_or_not_taken_are_asked_again(webdav: WebDavServer, taken: bool) -> None:
    httpx: Any = pytest.importorskip("httpx")
    url = f"webdav://127.0.0.1:{webdav.port}/{uuid.uuid4().hex}"
    backend = FsspecBackend(FsspecBackend.Config(url=url, allow_http=True))
    lost: set[str] = set()

    class Loses(httpx.HTTPTransport):  # type: ignore[misc]
        """The first answer to each method is lost, and the server did what it was asked if it was `taken`."""

        def handle_request(self, request: Any) -> Any:
            if not taken and request.method not in lost:
                lost.add(request.method)
                raise httpx.ConnectTimeout("timed out")
            answer = super().handle_request(request)
            if request.method in lost:
                return answer
            lost.add(request.method)
            answer.close()
            raise httpx.ReadError("[Errno 9] Bad file descriptor")

    store: Any = backend._store()
    store._fs.client.http._transport = Loses()
    backend.put("key", [b"value"])
    assert [entry.key for entry in backend.scan()] == ["key"]
    assert backend.get("key") == b"value"
    backend.delete("key")
    assert backend.get("key") is None
    assert lost == {"PUT", "MKCOL", "MOVE", "PROPFIND", "GET", "DELETE"}
    backend.close()


def test_what_lies_in_the_way_of_a_blob_is_no_failure_of_the_store(webdav: WebDavServer) -> None:
    folder = uuid.uuid4().hex
    backend = FsspecBackend(FsspecBackend.Config(url=f"webdav://127.0.0.1:{webdav.port}/{folder}", allow_http=True))
    backend.put("key", [b"value"])
    root = webdav.directory / "root" / folder
    (root / "a=kv").mkdir()
    (root / "b").write_text("a file")
    assert not backend.contains("a") and backend.get("a") is None
    assert not backend.get_range("a", 0, memoryview(bytearray(1)))
    with pytest.raises(CorruptBlobError, match="a file lies in the place of a directory"):
        backend.put("b/c", [b"value"])
    backend.put("a", [b"value"])
    assert backend.get("a") == b"value"
    backend.close()
