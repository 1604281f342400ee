"""Clients that need a thread of their own where the machine has none: their error says so, and core blames no store.

And calls that are late: they make no thread and no client of a backend that was closed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvloom import BackendError
from kvloom.runtime import lacks_resource
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.stores.obstore_store import PART_BYTES, ObstoreStore


def none_left(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("verb", ["get", "scan"])
def test_obstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    config = FsspecBackend.Config(url=f"file://{tmp_path}/kv")
    backend = FsspecBackend(config)
    backend._clients[os.getpid()] = ObstoreStore(config)
    backend.put("a", [bytes(PART_BYTES + 1)])
    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(Exception, match="start new thread") as caught:
        backend.get("a") if verb == "get" else list(backend.scan())
    assert lacks_resource(caught.value)


def test_sftp(monkeypatch: pytest.MonkeyPatch) -> None:
    paramiko = pytest.importorskip("paramiko")
    backend = FsspecBackend(FsspecBackend.Config(url="sftp://host/kv"))
    monkeypatch.setattr(paramiko.SSHClient, "connect", none_left)
    with pytest.raises(Exception, match="start new thread") as caught:
        backend.get("a")
    assert lacks_resource(caught.value)


def test_a_call_after_close_makes_nothing(tmp_path: Path) -> None:
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}/kv"))
    backend.close()
    before = threading.active_count()
    for call in (lambda: backend.get("a"), lambda: backend.contains_many(["a", "b"])):
        with pytest.raises(BackendError, match="closed"):
            call()
    assert threading.active_count() == before and not (backend._clients or backend._pools)
