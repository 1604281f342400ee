"""Results of the numbers of Mooncake's client: None, a specific error, or another attempt."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom import BackendError
from kvloom_backend_mooncake import client, codes
from kvloom_backend_mooncake.backend import PLACEHOLDERS, MooncakeBackend
from kvloom_backend_mooncake.config import MooncakeConfig

KEY, BLOB = "some/key", b"blob" * 20


class Store:
    """Stands for the client: `told` has the answers to come for a verb; without any it is a store with one blob."""

    def __init__(self) -> None:
        self.told: dict[str, deque[Any]] = {}
        self.calls: list[str] = []
        self.blobs = {KEY: BLOB}
        self.closed = False

    def _answer(self, verb: str, usual: Any) -> Any:
        self.calls.append(verb)
        waiting = self.told.get(verb)
        return waiting.popleft() if waiting else usual

    def get_size(self, key: str) -> int:
        return int(self._answer("get_size", len(self.blobs[key]) if key in self.blobs else codes.NOT_FOUND))

    def get_into(self, key: str, start: int, size: int) -> int:
        answer = self._answer("get_into", None)
        if answer is not None:
            return int(answer)
        ctypes.memmove(start, self.blobs[key], len(self.blobs[key]))
        return len(self.blobs[key])

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return list(self._answer("batch_is_exist", [int(key in self.blobs) for key in keys]))

    def batch_remove(self, keys: list[str]) -> list[int]:
        return list(self._answer("batch_remove", [codes.NOT_FOUND] * len(keys)))

    def upsert(self, key: str, blob: bytes) -> int:
        self.blobs[key] = blob
        return int(self._answer("upsert", 0))

    def batch_put_from_multi_buffers(self, keys: Any, starts: Any, sizes: Any, config: Any) -> list[int]:
        return list(self._answer("put", [0] * len(keys)))

    def register_buffer(self, start: int, size: int) -> int:
        return int(self._answer("register_buffer", 0))

    def unregister_buffer(self, start: int) -> int:
        assert not self.closed
        return int(self._answer("unregister_buffer", 0))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def backend(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeBackend]:
    def set_up(self: client.Client, config: MooncakeConfig) -> None:
        self._config, self._pid, self._idle = config, os.getpid(), threading.Condition()
        self._calls, self._closed, self._silent, self._store, self.replication = 0, False, False, store, None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    monkeypatch.setattr(client.Client, "__init__", set_up)
    backend = MooncakeBackend(MooncakeConfig(master="127.0.0.1:1", timeout="200ms"))
    yield backend
    backend.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The backend's own: it goes on by `step` with each look, and sleeping takes no time."""
    clock = SimpleNamespace(now=0.0, step=0.0, sleep=lambda seconds: None)

    def monotonic() -> float:
        clock.now += clock.step
        return clock.now

    clock.monotonic = monotonic
    monkeypatch.setattr("kvloom_backend_mooncake.backend.time", clock)
    return clock


def test_a_blob(backend: MooncakeBackend) -> None:
    assert bytes(backend.get(KEY) or b"") == BLOB and backend.contains(KEY)


@pytest.mark.parametrize("code", [codes.NOT_FOUND, codes.NOT_READY, -710, -712])
def test_what_is_gone_is_none(backend: MooncakeBackend, store: Store, code: int) -> None:
    store.told["get_size"] = deque([code])
    assert backend.get(KEY) is None
    store.told["get_into"] = deque([code])
    assert backend.get(KEY) is None, "between asking for its size and reading it"


@pytest.mark.parametrize(
    ("code", "kind"),
    [(-900, codes.MasterError), (-901, codes.MasterError), (-800, codes.TransferError), (-200, codes.NoRoomError),
     (-707, codes.LeaseExpiredError), (-12345, codes.MooncakeError)],
)  # fmt: skip
@pytest.mark.usefixtures("clock")
def test_failures_are_no_misses(backend: MooncakeBackend, store: Store, code: int, kind: type[Exception]) -> None:
    store.told["get_into"] = deque([code] * 9)
    calls: list[Callable[[], Any]] = [lambda: backend.get(KEY)]
    if kind is not codes.LeaseExpiredError:
        store.told |= {
            "get_size": deque([len(BLOB)] * (4 if kind is codes.TransferError else 1) + [code]),
            "batch_is_exist": deque([[1, code]]),
            "put": deque([[code]] * 9),
        }
        calls += [lambda: backend.get(KEY), lambda: backend.contains_many([KEY, "b"]), lambda: backend.put("b", [BLOB])]
    for call in calls:
        with pytest.raises(kind, match=str(code)) as raised:
            call()
        assert type(raised.value) is kind
        backend._client._silent = False


def test_a_lease_that_ended_is_renewed_once(backend: MooncakeBackend, store: Store) -> None:
    store.told["get_into"] = deque([codes.LEASE_EXPIRED])
    assert bytes(backend.get(KEY) or b"") == BLOB
    store.calls.clear()
    store.told["get_into"] = deque([codes.LEASE_EXPIRED] * 9)
    with pytest.raises(codes.LeaseExpiredError, match="default_kv_lease_ttl"):
        backend.get(KEY)
    assert store.calls.count("get_into") == 2


@pytest.mark.usefixtures("clock")
def test_a_transfer_that_failed_under_load_is_tried_again(backend: MooncakeBackend, store: Store) -> None:
    store.told["get_into"] = deque([codes.TRANSFER_FAILED] * 2)
    assert bytes(backend.get(KEY) or b"") == BLOB
    store.told["put"] = deque([[codes.TRANSFER_FAILED], [codes.ILLEGAL_CLIENT], [0]])
    backend.put(KEY, [BLOB])
    store.told["batch_remove"] = deque([[codes.LEASED], [codes.LEASED], [0]])
    store.told["upsert"] = deque([codes.TRANSFER_FAILED, 0])
    backend.delete(KEY)
    assert not any(store.told.values()), "each answer was asked for"


def test_a_blob_that_is_gone_when_its_transfer_has_failed_is_a_miss(backend: MooncakeBackend, store: Store) -> None:
    store.told = {"get_into": deque([codes.TRANSFER_FAILED]), "get_size": deque([len(BLOB), codes.NOT_FOUND])}
    assert backend.get(KEY) is None


def test_a_delete_whose_transfers_fail_all_the_time_is_an_error_in_the_end(
    backend: MooncakeBackend, store: Store, clock: SimpleNamespace
) -> None:
    clock.step = 0.05
    store.told = {"batch_remove": deque([[codes.LEASED]] * 99), "upsert": deque([codes.TRANSFER_FAILED] * 99)}
    with pytest.raises(codes.TransferError):
        backend.delete(KEY)


def test_a_blob_that_became_another_is_not_served(backend: MooncakeBackend, store: Store) -> None:
    store.told["get_into"] = deque([len(BLOB) - 1])
    assert backend.get(KEY) is None, "a shorter one"
    store.told = {"get_into": deque([codes.INVALID]), "get_size": deque([len(BLOB), len(BLOB) + 5])}
    assert backend.get(KEY) is None, "a longer one"


class Expecting:
    """A sink that expects a blob of a length."""

    def __init__(self, expected_bytes: int) -> None:
        self.expected_bytes = expected_bytes
        self.reserved: list[int] = []
        self.told: list[int] = []

    def reserve(self, num_bytes: int) -> memoryview:
        self.reserved.append(num_bytes)
        self.memory = memoryview(bytearray(num_bytes))
        return self.memory

    def filled(self, num_bytes: int) -> None:
        self.told.append(num_bytes)


@pytest.mark.parametrize(
    ("expected", "calls"),
    [(len(BLOB), ["get_into"]), (len(BLOB) + 5, ["get_into", "get_size", "get_into"]), (0, ["get_size", "get_into"])],
)
def test_a_blob_of_the_length_that_is_expected_takes_one_request(
    backend: MooncakeBackend, store: Store, expected: int, calls: list[str]
) -> None:
    sink = Expecting(expected)
    assert backend.get_into(KEY, sink)
    assert store.calls == calls and bytes(sink.memory) == BLOB
    assert sink.told == [len(BLOB)] and sink.reserved[-1] == len(BLOB)


def test_where_the_length_that_is_expected_is_too_short_it_is_asked_for(backend: MooncakeBackend, store: Store) -> None:
    store.told["get_into"] = deque([codes.INVALID])
    sink = Expecting(len(BLOB) - 1)
    assert backend.get_into(KEY, sink)
    assert bytes(sink.memory) == BLOB and sink.told == [len(BLOB)]


@pytest.mark.parametrize("code", [codes.NOT_FOUND, *map(len, PLACEHOLDERS)])
def test_what_is_expected_and_not_there_is_a_miss(backend: MooncakeBackend, store: Store, code: int) -> None:
    store.told = {"get_into": deque([code]), "get_size": deque([code])}
    sink = Expecting(len(BLOB))
    assert not backend.get_into(KEY, sink) and not sink.told


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_a_placeholder_is_no_blob(backend: MooncakeBackend, store: Store, placeholder: bytes) -> None:
    store.blobs[KEY] = placeholder
    assert backend.get(KEY) is None
    store.blobs[KEY] = bytes(len(placeholder))
    assert backend.get(KEY) is None, "nor what was to become one"
    with pytest.raises(ValueError, match="cannot be distinguished from a placeholder"):
        backend.put(KEY, [placeholder])


def test_what_is_leased_is_replaced_and_never_forced(backend: MooncakeBackend, store: Store) -> None:
    store.told["batch_remove"] = deque([[codes.LEASED], [codes.LEASED], [0]])
    backend.delete(KEY)
    assert store.calls == ["batch_remove", "upsert", "batch_remove", "upsert", "batch_remove"]
    assert store.blobs[KEY] == PLACEHOLDERS[1], "the second one has another length"


def test_a_writer_that_is_busy_is_waited_for_and_a_dead_one_is_not(
    backend: MooncakeBackend, store: Store, clock: SimpleNamespace
) -> None:
    clock.step = 0.01
    store.told["batch_remove"] = deque([[codes.NOT_READY], [codes.NOT_READY], [0]])
    backend.put(KEY, [BLOB])
    assert store.calls == ["batch_remove"] * 3 + ["put"]
    store.calls.clear()
    store.told["batch_remove"] = deque([[codes.NOT_READY]] * 10_000)
    backend.put(KEY, [BLOB])
    assert store.calls[-3:] == ["upsert", "batch_remove", "put"]
    store.calls.clear()
    backend.delete(KEY)
    assert store.calls == ["batch_remove"], "there is nothing yet that could be deleted"


def test_a_master_that_was_not_there_is_looked_for_before_the_next_call(
    backend: MooncakeBackend, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.told["get_size"] = deque([-900])
    with pytest.raises(codes.MasterError):
        backend.get(KEY)
    with pytest.raises(codes.MasterError, match="refused"):
        backend.get(KEY)
    assert store.calls == ["get_size"], "the client would try for seconds"
    monkeypatch.setattr(client.Client, "_reach_master", lambda self: None)
    assert bytes(backend.get(KEY) or b"") == BLOB


def test_a_closed_client_is_not_called(backend: MooncakeBackend, store: Store) -> None:
    backend.close()
    assert store.closed
    with pytest.raises(BackendError, match="closed"):
        backend.get(KEY)


def test_closing_waits_for_a_call_and_never_closes_under_it(
    backend: MooncakeBackend, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    monkeypatch.setattr(client, "_left", left)
    memory = memoryview(bytearray(64))
    backend.register(memory)
    with contextlib.ExitStack() as call:
        call.enter_context(backend._client.using())
        backend.close()
        assert not store.closed, "the client would crash"
        assert store.calls == ["register_buffer"] and left, "the call may still use the memory"


def test_memory_is_given_back_before_the_client_closes(backend: MooncakeBackend, store: Store) -> None:
    backend.register(memoryview(bytearray(64)))
    backend.close()
    assert store.calls == ["register_buffer", "unregister_buffer"] and store.closed


def test_a_child_of_a_fork_is_told_at_once(backend: MooncakeBackend, store: Store) -> None:
    backend._client._pid += 1
    with pytest.raises(BackendError, match="does not survive a fork"):
        backend.get(KEY)
    backend.close()
    assert not store.calls and not store.closed
