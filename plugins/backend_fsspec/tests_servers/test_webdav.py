"""The backend meets the requirements of storage backends on WebDAV, by fsspec's own implementation."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from kvloom import StorageBackend
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.testing import WebDavServer
from kvloom_testkit import BackendConformance


class TestWebDav(BackendConformance):
    @pytest.fixture
    def make(self, webdav: WebDavServer) -> Callable[[], StorageBackend]:
        url = f"webdav://127.0.0.1:{webdav.port}/{uuid.uuid4().hex}"
        return lambda: FsspecBackend(FsspecBackend.Config(url=url, allow_http=True, threads=4, timeout=30))
