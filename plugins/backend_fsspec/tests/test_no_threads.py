"""Clients that need a thread of their own where the machine has none: their error says so, and core blames no store.

And calls that are late: they make no thread and no client of a backend that was closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvloom import BackendError
from kvloom.runtime import lacks_resource
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.daemon_threads import DaemonThreads
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


HANGING = """
import os, sys, threading
from kvloom_backend_fsspec.backend import FsspecBackend
backend = FsspecBackend(FsspecBackend.Config(url=f"file://{sys.argv[1]}/kv"))
assert backend.contains_many(["a", "b"]) == [False, False]
asked = threading.Event()
def hang(*_, **__):
    asked.set()
    threading.Event().wait()
os.stat = hang
threading.Thread(target=backend.contains_many, args=(["a", "b"],), daemon=True).start()
assert asked.wait(60)
"""


def test_a_file_system_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANGING, tmp_path], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", [DaemonThreads, ThreadPoolExecutor])
def test_threads_of_local_files_are_those_of_an_executor(kind: Any) -> None:
    """Results in order, errors, few threads, and calls that nobody waits for any more at the end."""
    before, going, go = threading.active_count(), threading.Barrier(3), threading.Event()
    with kind(2, "local") as threads:
        assert list(threads.map(lambda n: n * n, range(50))) == [n * n for n in range(50)]
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 / 0).result(60)
        busy = [threads.submit(lambda: (going.wait(60), go.wait(60))) for _ in range(2)]
        going.wait(60)
        waiting = [threads.submit(int) for _ in range(3)]
        assert threading.active_count() <= before + 2
        threads.shutdown(wait=False, cancel_futures=True)
        assert all(call.cancelled() for call in waiting) and not any(call.done() for call in busy)
        go.set()
    assert all(call.done() for call in busy) and threading.active_count() == before
    with pytest.raises(RuntimeError):
        threads.submit(int)
