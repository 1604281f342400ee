"""A directory is listed whatever happens in it meanwhile."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom import BackendError
from kvloom_backend_fsspec import fsspec_store
from kvloom_backend_fsspec.backend import FsspecBackend


class ServerError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status_code = status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The store's own: only sleeping takes time."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: vars(clock).update(now=clock.now + seconds)
    monkeypatch.setattr(fsspec_store, "time", clock)
    return clock


@pytest.fixture
def backend() -> FsspecBackend:
    backend = FsspecBackend(FsspecBackend.Config(url=f"memory://{uuid.uuid4().hex}", timeout="5s"))
    backend.put("a/b", [b"blob"])
    return backend


def failing(backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch, verb: str, status: int, times: int) -> list[int]:
    """Have the store's client answer `status` so many times; a list of the calls."""
    fs: Any = backend._store()._fs  # type: ignore[attr-defined]
    usual, calls = getattr(fs, verb), []

    def call(*args: Any, **more: Any) -> Any:
        calls.append(status)
        if len(calls) <= times:
            raise ServerError(status)
        return usual(*args, **more)

    monkeypatch.setattr(fs, verb, call)
    return calls


def test_a_server_that_cannot_list_while_files_vanish_is_asked_until_the_timeout(
    backend: FsspecBackend, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(backend, monkeypatch, "ls", 500, 20)
    assert [entry.key for entry in backend.scan()] == ["a/b"]
    failing(backend, monkeypatch, "ls", 500, 10_000)
    with pytest.raises(BackendError, match="answered 500"):
        list(backend.scan())
    assert clock.now < 2 * 5.0, "one timeout for each listing"


def test_what_a_client_did_wrong_is_not_asked_again(
    backend: FsspecBackend, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in (403, 507):
        calls = failing(backend, monkeypatch, "ls", status, 10_000)
        with pytest.raises(BackendError):
            list(backend.scan())
        assert len(calls) == 1
        monkeypatch.undo()


def test_other_requests_are_repeated_as_often_as_the_settings_say(
    backend: FsspecBackend, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = failing(backend, monkeypatch, "cat_file", 500, 10_000)
    with pytest.raises(BackendError):
        backend.get("a/b")
    assert len(calls) == 3
