"""Rights by leases, over a store in memory and a clock that tests move."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvloom import BackendError
from kvloom_backend_fsspec import lease
from kvloom_backend_fsspec.backend import ExclusiveFsspecBackend, FsspecBackend
from kvloom_backend_fsspec.lease import LEASE_SECONDS, Leases
from kvloom_backend_fsspec.names import Names
from kvloom_backend_fsspec.stores.base import Listed

RIGHT = "evict"


class Shelf:
    """Objects of a dictionary, of which one writer creates each."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.fails = False
        self.writes = 0

    def put(self, name: str, data: bytes) -> None:
        if self.fails:
            raise BackendError("gone")
        self.writes += 1
        self.objects[name] = (data, self.writes)

    def create(self, name: str, data: bytes) -> bool:
        if name in self.objects:
            return False
        self.put(name, data)
        return True

    def size(self, name: str) -> int | None:
        return len(self.objects[name][0]) if name in self.objects else None

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def list(self, directory: str) -> Iterator[Listed]:
        for name, (data, version) in list(self.objects.items()):
            if name.startswith(f"{directory}/"):
                yield Listed(name, len(data), 0.0, str(version))


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 3600.0)  # no thread renews: the tests do
    return clock


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def leases(shelf: Any) -> Leases:
    return Leases(Names("kv"), lambda: shelf)


def renew(one: Leases) -> None:
    one.renew(RIGHT, one._held[RIGHT])


def test_a_right_that_no_thread_renews_is_had_for_a_while(
    shelf: Shelf, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = leases(shelf)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more)
        assert one.take(RIGHT) and one.take(RIGHT)
        clock.now += LEASE_SECONDS
        assert not one.take(RIGHT)
    clock.now += LEASE_SECONDS
    assert one.take(RIGHT)
    one.release()


def test_one_has_it_and_gives_it_back(shelf: Shelf, clock: Clock) -> None:
    one, other = leases(shelf), leases(shelf)
    assert one.take(RIGHT) and one.take(RIGHT) and not other.take(RIGHT)
    assert other.take("another-right")
    one.release()
    assert other.take(RIGHT) and not one.take(RIGHT)


def test_what_is_not_renewed_can_be_taken_once_its_time_is_over(shelf: Shelf, clock: Clock) -> None:
    one, other = leases(shelf), leases(shelf)
    assert one.take(RIGHT) and not other.take(RIGHT)
    clock.now += LEASE_SECONDS - 0.1
    assert not other.take(RIGHT)
    clock.now += 0.2
    assert other.take(RIGHT)
    assert not one.take(RIGHT), "its own time is over by its own clock"


def test_what_is_renewed_is_kept(shelf: Shelf, clock: Clock) -> None:
    one, other = leases(shelf), leases(shelf)
    assert one.take(RIGHT)
    for _ in range(10):
        assert not other.take(RIGHT)
        clock.now += LEASE_SECONDS / 3
        renew(one)
        assert one.take(RIGHT)


def test_of_those_who_wait_one_takes_it(shelf: Shelf, clock: Clock) -> None:
    gone, *rest = (leases(shelf) for _ in range(6))
    assert gone.take(RIGHT) and not any(one.take(RIGHT) for one in rest)
    clock.now += LEASE_SECONDS
    assert sum(one.take(RIGHT) for one in rest) == 1


def test_who_was_asleep_does_not_take_back_what_is_anothers(shelf: Shelf, clock: Clock) -> None:
    one, other = leases(shelf), leases(shelf)
    assert one.take(RIGHT)
    other.take(RIGHT)
    clock.now += LEASE_SECONDS
    assert other.take(RIGHT)
    held = one._held[RIGHT]
    held.renewed = clock.now  # a clock that stood still while the process slept
    renew(one)
    assert held.ended.is_set() and not one.take(RIGHT)
    one.release()
    assert other.take(RIGHT) and not leases(shelf).take(RIGHT)


def test_who_cannot_renew_loses_it(shelf: Shelf, clock: Clock) -> None:
    one = leases(shelf)
    assert one.take(RIGHT)
    shelf.fails = True
    clock.now += LEASE_SECONDS / 2
    with pytest.raises(BackendError):
        renew(one)
    assert one.take(RIGHT), "its time is not over"
    clock.now += LEASE_SECONDS / 2
    assert not one.take(RIGHT)


@pytest.mark.parametrize("number", ["999999999999", "100000000000"])
def test_a_number_that_no_process_comes_to_is_nobodys(shelf: Shelf, clock: Clock, number: str) -> None:
    """Behind the last one there was no place: whoever took it next was not seen by others."""
    shelf.put(f"kv/=hold/{RIGHT}/{number}", b"free")
    one, other = leases(shelf), leases(shelf)
    assert one.take(RIGHT) and not other.take(RIGHT)
    one.release()
    assert other.take(RIGHT) and not one.take(RIGHT)
    other.release()


def test_a_right_leaves_one_object(shelf: Shelf, clock: Clock) -> None:
    for _ in range(5):
        one = leases(shelf)
        assert one.take(RIGHT)
        one.release()
    assert len(shelf.objects) == 1


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 101])
def test_names_of_rights(shelf: Shelf, name: str) -> None:
    with pytest.raises(ValueError, match="hold: "):
        leases(shelf).take(name)


def opened(path: Path) -> ExclusiveFsspecBackend:
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{path}/kv"))
    assert isinstance(backend, ExclusiveFsspecBackend)
    return backend


def test_it_is_renewed_while_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.02)
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.hold(RIGHT)
    seen: set[bytes] = set()
    until = time.monotonic() + 60
    while len(seen) < 5:  # whoever waits sees that it is another one
        for path in tmp_path.rglob("0*"):
            with contextlib.suppress(FileNotFoundError):  # it is replaced by a new one just now
                seen |= {path.read_bytes()} if path.is_file() else set()
        assert not other.hold(RIGHT) and time.monotonic() < until
    one.close()
    assert other.hold(RIGHT)
    other.close()


def test_a_server_that_overwrites_what_should_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    for backend in (one, other):
        store = backend._store()
        monkeypatch.setattr(store, "create", lambda name, data, store=store: store.put(name, data) or True)
    with pytest.raises(NotImplementedError, match="overwrote an object in an exclusive create"):
        one.create("key", [b"blob"])
    assert one.get("key") is None
    assert one.hold(RIGHT) and other.hold(RIGHT), "each acts as the only one"
    assert len([record for record in caplog.records if "If-None-Match" in record.message]) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    os.listdir(tmp_path)
