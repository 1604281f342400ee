"""The KV buffers in one process: what fits what, room, damage, threads, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom
from kvloom import BackendError, Buffer, Buffers, ConfigError, DeadlineExceeded, envelope
from kvloom.builtin.dict_backend import DictBackend
from kvloom_connector_vllm import buffer_room
from kvloom_connector_vllm.buffers import KVLookupBuffer, KVStoreBuffer
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend

NOTHING = [None] * 5
MIB = 2**20


class CreatingDict(DictBackend):
    """A dictionary that can create; what its verbs do can be replaced."""

    type = "creating_dict"

    def create(self, key: str, blob: Buffers) -> bool:
        mine = kvloom.join(blob)
        return self._blobs.setdefault(key, mine) is mine


def directory(path: Path) -> CompleteDirectoryBackend:
    return CompleteDirectoryBackend(CompleteDirectoryBackend.Config(path=path))


def lookup(backend: Any = None, **settings: Any) -> KVLookupBuffer:
    return KVLookupBuffer(backend or CreatingDict(kvloom.Config()), **{"capacity": MIB, "timeout": 0.0, **settings})


def store(backend: Any = None, **settings: Any) -> KVStoreBuffer:
    return KVStoreBuffer(backend or CreatingDict(kvloom.Config()), **{"capacity": MIB, "timeout": 0.0, **settings})


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


def put_in(buffer: KVLookupBuffer, tokens: Sequence[int], roi: Sequence[int] | None = None, mark: float = 0) -> None:
    mask = torch.ones(len(tokens), dtype=torch.bool) if roi is None else torch.tensor(roi, dtype=torch.bool)
    buffer.insert(ids(*tokens), mask, torch.full((2, 3), mark), torch.full((3,), -mark), torch.full((1, 4), mark))


def mark(taken: list[torch.Tensor | None]) -> float | None:
    return None if taken[2] is None else float(taken[2].flatten()[0])


# -- taking ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int8", "bool"])
def test_an_entry_comes_back_as_it_was_put_in(dtype: str) -> None:
    buffer = lookup()
    key = torch.randint(0, 2, (2, 3, 4, 5)).to(getattr(torch, dtype)).transpose(0, 2)
    value, hidden = torch.randn(0, 7), torch.randn(())
    roi = torch.tensor([0, 1, 1], dtype=torch.int32)
    buffer.insert(ids(5, 6, 7), roi, key, value, hidden)
    for got, put in zip(buffer.drop_select(ids(5, 6, 7), roi), (ids(5, 6, 7), roi, key, value, hidden), strict=True):
        assert got is not None and got.dtype == put.dtype and got.shape == put.shape
        assert torch.equal(got.contiguous().view(-1).view(torch.uint8), put.contiguous().view(-1).view(torch.uint8))
    assert buffer.drop_select(ids(5, 6, 7), roi) == NOTHING
    assert buffer.counts() == {"inserted": 1, "taken": 1, "missed": 1}


def test_a_part_may_be_none() -> None:
    buffer = lookup()
    buffer.insert(ids(1), ids(1), None, torch.ones(2), None)  # type: ignore[arg-type]
    _, _, key, value, hidden = buffer.drop_select(None, None)
    assert key is None and hidden is None and torch.equal(value, torch.ones(2))  # type: ignore[arg-type]


def test_the_tensors_are_the_callers_again() -> None:
    buffer, key = lookup(), torch.zeros(3)
    buffer.insert(ids(1), ids(1), key, key, key)
    key += 1
    assert mark(buffer.drop_select(ids(1), ids(1))) == 0


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        (([1, 2, 3], [1, 1, 1]), ([1, 2, 3], [1, 1, 1])),
        (([1, 2], [1, 1]), ([1, 2, 3], [1, 1, 1])),
        (([1, 2, 3], [1, 1, 1]), ([1, 2], [1, 1])),
        (([1, 2, 3], [0, 1, 1]), ([1, 2, 9], [0, 1, 0])),
        (([1, 2, 3], [1, 1, 0]), ([1, 2, 9, 9], [1, 1, 0, 0])),
        (([1, 2, 3], [1, 1, 1]), ([1, 2, 3], None)),
    ],
)
def test_what_fits(there: tuple[list[int], list[int]], asked: tuple[list[int], list[int] | None]) -> None:
    buffer = lookup()
    put_in(buffer, *there, mark=4)
    roi = None if asked[1] is None else torch.tensor(asked[1])
    assert mark(buffer.drop_select(ids(*asked[0]), roi)) == 4


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        (([1, 2, 3], [1, 1, 1]), ([1, 2, 4], [1, 1, 1])),
        (([2, 3], [1, 1]), ([1, 2, 3], [1, 1, 1])),
        (([1, 2, 3], [0, 1, 1]), ([9, 2, 3], [0, 1, 1])),  # another token before: other KV
        (([1, 2, 3], [0, 1, 1]), ([1, 2, 9], [0, 1, 1])),
        (([1, 2], [0, 1]), ([2, 3], [1, 1])),  # the same token elsewhere
        (([1, 2, 3], [1, 1, 1]), ([1, 2, 3], [0, 0, 0])),
    ],
)
def test_what_does_not_fit(there: tuple[list[int], list[int]], asked: tuple[list[int], list[int]]) -> None:
    buffer = lookup()
    put_in(buffer, *there)
    assert buffer.drop_select(ids(*asked[0]), torch.tensor(asked[1])) == NOTHING
    assert mark(buffer.drop_select(None, None)) == 0


def test_the_best_entry_is_taken_first() -> None:
    buffer = lookup()
    for number, tokens in enumerate([[1], [1, 2, 3, 4], [1, 2, 3], [1, 2, 3], [1, 2]]):
        put_in(buffer, tokens, mark=number)
    asked = ids(1, 2, 3)
    assert [mark(buffer.drop_select(asked, torch.ones(3))) for _ in range(6)] == [2, 3, 1, 4, 0, None]


def test_none_takes_the_oldest() -> None:
    buffer = lookup()
    for number in range(4):
        put_in(buffer, [number], mark=number)
    assert [mark(buffer.drop_select(None, None)) for _ in range(5)] == [0, 1, 2, 3, None]


TOKENS = st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=5)


def fits(there: list[tuple[int, bool]], asked: list[tuple[int, bool]]) -> int:
    """How many tokens of KV both have, told token by token."""
    both = 0
    for place in range(max(len(there), len(asked))):
        mine, theirs = there[place : place + 1], asked[place : place + 1]
        more_here = any(keep for _, keep in there[place:])
        more_asked = any(keep for _, keep in asked[place:])
        if not (more_here and more_asked):
            break
        if mine != theirs:
            return 0
        both += mine[0][1]
    return both


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "ask", "any"]), TOKENS), max_size=12))
def test_it_does_what_a_list_would_do(steps: list[tuple[str, list[tuple[int, bool]]]]) -> None:
    buffer, model = lookup(), []
    for number, (verb, pairs) in enumerate(steps):
        tokens, roi = [token for token, _ in pairs], [int(keep) for _, keep in pairs]
        if verb == "insert" and any(roi):
            put_in(buffer, tokens, roi, mark=number)
            model.append((number, pairs))
        elif verb == "any":
            assert mark(buffer.drop_select(None, None)) == (model.pop(0)[0] if model else None)
        elif verb == "ask":
            fitting = [(-fits(there, pairs), sum(keep for _, keep in there), number) for number, there in model]
            best = min((one for one in fitting if one[0]), default=(0, 0, None))[2]
            model = [one for one in model if one[0] != best]
            asked = torch.tensor(tokens, dtype=torch.int64), torch.tensor(roi, dtype=torch.bool)
            assert mark(buffer.drop_select(*asked)) == best
    assert buffer._backend._blobs.keys() == {  # nothing is left of what was taken
        key for key in buffer._backend._blobs if key.startswith("kv-lookup/entry/")
    }
    assert len(buffer._backend._blobs) == len(model)


# -- waiting and room --------------------------------------------------------------------------------------------------


def test_taking_waits_for_an_entry() -> None:
    buffer = lookup(timeout=30)
    thread = threading.Timer(0.05, put_in, (buffer, [7]), {"mark": 7})
    thread.start()
    assert mark(buffer.drop_select(ids(7), ids(1))) == 7
    thread.join()


def test_taking_waits_until_its_deadline() -> None:
    buffer = lookup(timeout=0.1)
    began = time.monotonic()
    assert buffer.drop_select(ids(7), ids(1)) == NOTHING
    assert time.monotonic() - began >= 0.1


def test_putting_in_waits_for_room() -> None:
    buffer = lookup(capacity=8192, timeout=30)
    put_in(buffer, [1], mark=1)  # a frame is 4 KiB, and its payload goes into the next 4
    done = threading.Event()

    def second() -> None:
        put_in(buffer, [2], mark=2)
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(0.1)
    assert mark(buffer.drop_select(ids(1), ids(1))) == 1
    assert done.wait(30)
    thread.join()
    assert mark(buffer.drop_select(None, None)) == 2


def test_putting_in_gives_up_at_its_deadline() -> None:
    buffer = lookup(capacity=8192, timeout=0.05)
    put_in(buffer, [1])
    with pytest.raises(DeadlineExceeded, match="no room for 8192 bytes in a buffer of 8192"):
        put_in(buffer, [2])
    assert buffer.counts() == {"inserted": 1, "refused": 1}
    assert [len(list(buffer._backend.scan(part))) for part in ("kv-lookup/entry/", "kv-lookup/room/")] == [1, 0]


def test_what_can_never_fit_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="make capacity larger"):
        put_in(lookup(capacity=4096, timeout=30), [1])


def test_many_who_put_in_stay_within_the_capacity(tmp_path: Path) -> None:
    """Two buffers, as two processes would have them, with four threads each."""
    buffers = [lookup(directory(tmp_path), capacity=3 * 8192, timeout=30) for _ in range(2)]
    over, stop = [], threading.Event()

    def watch() -> None:
        watcher = directory(tmp_path)
        while not stop.is_set():
            entries = sum(entry.bytes for entry in watcher.scan("kv-lookup/entry/"))
            over.extend([entries] if entries > 3 * 8192 else [])

    def fill(buffer: KVLookupBuffer, first: int) -> None:
        for number in range(first, first + 5):
            put_in(buffer, [number], mark=number)

    threads = [threading.Thread(target=watch)]
    threads += [threading.Thread(target=fill, args=(buffers[n % 2], 5 * n)) for n in range(8)]
    for thread in threads:
        thread.start()
    taken = [mark(buffers[0].drop_select(None, None)) for _ in range(40)]
    stop.set()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(40)) and over == []


def test_of_two_who_reserve_at_once_one_gives_way() -> None:
    """Both looked before either had written its reservation."""

    class Rivalled(CreatingDict):
        def put(self, key: str, blob: Buffers) -> None:
            if "/room/" in key:
                super().put(f"kv-lookup/room/{buffer_room.new_id()}-8192", [b"a rival"])
            super().put(key, blob)

    buffer = lookup(Rivalled(kvloom.Config()), capacity=8192)
    with pytest.raises(DeadlineExceeded):
        put_in(buffer, [1])
    assert [entry.key for entry in buffer._backend.scan("kv-lookup/entry/")] == []


def test_closing_wakes_whoever_waits() -> None:
    buffer = lookup(timeout=60)
    raised: list[BaseException] = []

    def take() -> None:
        try:
            buffer.drop_select(None, None)
        except BackendError as error:
            raised.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    time.sleep(0.05)
    buffer.close()
    buffer.close()
    thread.join(30)
    assert not thread.is_alive() and str(raised[0]) == "the buffer is closed"
    with pytest.raises(BackendError, match="closed"):
        put_in(buffer, [1])


def test_a_backend_that_was_given_stays_open() -> None:
    class Closing(CreatingDict):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    backend = Closing(kvloom.Config())
    with lookup(backend) as buffer:
        put_in(buffer, [1], mark=3)
    assert backend.closed == 0
    assert mark(lookup(backend).drop_select(None, None)) == 3


# -- once --------------------------------------------------------------------------------------------------------------


def test_each_entry_goes_to_one_of_many_threads(tmp_path: Path) -> None:
    """Over four instances on one directory, half of the threads asking for something and half for anything."""
    buffers = [lookup(directory(tmp_path), timeout=0.2) for _ in range(4)]
    taken: list[float] = []

    def take(number: int) -> None:
        while True:
            asked = (ids(1), ids(1)) if number % 2 else (None, None)
            got = mark(buffers[number % 4].drop_select(*asked))
            if got is None:
                return
            taken.append(got)

    for number in range(40):
        put_in(buffers[0], [1, number], mark=number)
    threads = [threading.Thread(target=take, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for number in range(40, 60):
        put_in(buffers[1], [1, number], mark=number)
    for thread in threads:
        thread.join()
    taken += [mark(buffers[0].drop_select(None, None)) for _ in range(60 - len(taken))]  # type: ignore[misc]
    assert sorted(taken) == list(range(60))
    assert list(buffers[0]._backend.scan("")) == []


def test_a_claim_from_an_old_listing_is_worth_nothing() -> None:
    """Who has listed an entry before another took it finds that it is gone."""
    backend = CreatingDict(kvloom.Config())
    slow, quick = lookup(backend), lookup(backend)
    put_in(slow, [1], mark=1)
    (id,) = slow._candidates(None)
    assert mark(quick.drop_select(None, None)) == 1
    assert slow._take(id) is None
    assert list(backend.scan("")) == []


def test_an_entry_that_cannot_be_deleted_is_not_given_twice() -> None:
    class Keeping(CreatingDict):
        def delete(self, key: str) -> None:
            if "/entry/" in key:
                raise OSError("read only")
            super().delete(key)

    buffer = lookup(Keeping(kvloom.Config()))
    put_in(buffer, [1], mark=1)
    assert mark(buffer.drop_select(None, None)) == 1
    assert buffer.drop_select(None, None) == NOTHING
    assert buffer.drop_select(ids(1), ids(1)) == NOTHING
    assert buffer.counts()["failed"] == 1


def test_an_entry_that_could_not_be_read_can_be_had_later() -> None:
    class Failing(CreatingDict):
        failures = 3

        def get(self, key: str) -> Buffer | None:
            if "/entry/" in key and self.failures:
                self.failures -= 1
                raise OSError("not now")
            return super().get(key)

    buffer = lookup(Failing(kvloom.Config()), timeout=30)
    put_in(buffer, [1], mark=1)
    assert mark(buffer.drop_select(None, None)) == 1
    assert buffer.counts() == {"inserted": 1, "failed": 3, "taken": 1}


def test_what_the_dead_claimed_goes_after_a_while() -> None:
    backend = CreatingDict(kvloom.Config())
    buffer = lookup(backend, abandoned=3600)
    put_in(buffer, [1])
    (id,) = buffer._candidates(None)
    assert buffer._claim(id)
    assert buffer.drop_select(None, None) == NOTHING  # its claim is young
    assert len(list(backend.scan("kv-lookup/entry/"))) == 1
    time.sleep(0.02)
    later = lookup(backend, abandoned=0.01)
    assert later.drop_select(None, None) == NOTHING
    assert later.counts() == {"abandoned": 1, "missed": 1}
    assert list(backend.scan("")) == []


def test_room_that_the_dead_reserved_is_given_back() -> None:
    backend = CreatingDict(kvloom.Config())
    backend.put(f"kv-lookup/room/{buffer_room.new_id()}-8192", [b"reserved"])
    with pytest.raises(DeadlineExceeded):
        put_in(lookup(backend, capacity=8192, abandoned=3600), [1])
    time.sleep(0.02)
    put_in(lookup(backend, capacity=8192, abandoned=0.01), [1])


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [(None, None), (ids(1, 2), ids(1, 1))])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_damaged_entry_is_counted_and_never_given(asked: Any, data: st.DataObject) -> None:
    buffer = lookup()
    blobs = buffer._backend._blobs
    put_in(buffer, [1, 2], mark=1)
    (place,) = blobs
    damaged = bytearray(blobs[place])
    cut = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        damaged[cut] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[max(1, cut) :]
    blobs[place] = bytes(damaged)
    put_in(buffer, [1, 2], mark=2)
    assert mark(buffer.drop_select(*asked)) == 2
    assert buffer.drop_select(*asked) == NOTHING
    assert buffer.counts() == {"inserted": 2, "taken": 1, "corrupt": 1, "missed": 1}
    assert not blobs


def test_damaged_tokens_are_not_compared() -> None:
    buffer = lookup()
    put_in(buffer, [1, 2], mark=1)
    ((place, blob),) = buffer._backend._blobs.items()
    buffer._backend._blobs[place] = blob[:4096] + bytes([blob[4096] ^ 2]) + blob[4097:]  # 3 where there was 1
    assert buffer.drop_select(ids(1, 2), ids(1, 1)) == NOTHING
    assert buffer.counts()["corrupt"] == 1


def test_another_entry_under_this_name_is_damage() -> None:
    buffer = lookup()
    put_in(buffer, [1], mark=1)
    ((place, blob),) = buffer._backend._blobs.items()
    buffer._backend._blobs = {place[:-1] + ("0" if place[-1] != "0" else "1"): blob}
    assert buffer.drop_select(None, None) == NOTHING
    assert buffer.counts()["corrupt"] == 1


def test_an_entry_of_a_later_version_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = lookup()
    monkeypatch.setattr(envelope, "PLAIN_VERSION", envelope.VERSION + 1)
    put_in(buffer, [1], mark=1)
    monkeypatch.undo()
    put_in(buffer, [1], mark=2)
    assert [mark(buffer.drop_select(None, None)) for _ in range(2)] == [2, None]
    assert lookup(buffer._backend).drop_select(ids(1), ids(1)) == NOTHING
    assert buffer.counts()["unreadable"] == 1
    assert len(buffer._backend._blobs) == 1


def test_a_blob_of_something_else_is_not_unpickled(tmp_path: Path) -> None:
    buffer = store()
    place = buffer._place("a")
    description = envelope.Description(place, "torch", (1,), "uint8", "x", 0, "exact")
    buffer._backend.put(place, envelope.seal(description, [b"\x80\x04."]))
    assert buffer.get("a") is None
    assert buffer.counts() == {"unreadable": 1}


# -- tensors by name ---------------------------------------------------------------------------------------------------

VALUES = st.one_of(st.none(), st.lists(st.integers(-3, 3), max_size=4))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "a/b", "", "\ud800", "é" * 300]), st.booleans(), VALUES), max_size=12))
def test_it_does_what_a_dict_would_do(steps: list[tuple[str, bool, list[int] | None]]) -> None:
    buffer, model = store(), {}
    for key, write, value in steps:
        if write:
            buffer.put(key, None if value is None else torch.tensor(value, dtype=torch.int8))
            model.pop(key, None)
            if value is not None:
                model[key] = value
        got = buffer.get(key)
        assert (None if got is None else got.tolist()) == model.get(key)
    assert len(buffer._backend._blobs) == len(model)


def test_a_value_takes_the_place_of_another_within_the_capacity() -> None:
    buffer = store(capacity=8192)
    for number in range(3):
        buffer.put("a", torch.full((10,), number))
    assert buffer.get("a").tolist() == [2] * 10  # type: ignore[union-attr]
    with pytest.raises(DeadlineExceeded):
        buffer.put("b", torch.zeros(1))
    buffer.put("a", None)
    buffer.put("b", torch.zeros(1))


def test_a_damaged_value_is_not_there() -> None:
    buffer = store()
    buffer.put("a", torch.ones(100))
    ((place, blob),) = buffer._backend._blobs.items()
    buffer._backend._blobs[place] = blob[:-1] + b"!"
    assert buffer.get("a") is None and buffer.counts()["corrupt"] == 1


def test_a_store_that_fails_is_a_miss_to_readers_and_an_error_to_writers() -> None:
    class Broken(CreatingDict):
        def get(self, key: str) -> Buffer | None:
            raise OSError("gone")

        def put(self, key: str, blob: Buffers) -> None:
            raise OSError("full")

    buffer = store(Broken(kvloom.Config()))
    assert buffer.get("a") is None
    with pytest.raises(BackendError, match="full"):
        buffer.put("a", torch.ones(1))
    assert buffer.counts() == {"failed": 2}


# -- what is refused ---------------------------------------------------------------------------------------------------


class Evicting(CreatingDict):
    type = "evicting"
    bounded = True


class Listless(CreatingDict):
    type = "listless"
    scan = kvloom.StorageBackend.scan


@pytest.mark.parametrize("make", [lookup, store])
@pytest.mark.parametrize(
    ("cls", "why"),
    [(DictBackend, "'dict' cannot create a key exclusively"), (Evicting, "evicts"), (Listless, "cannot list")],
)
def test_backends_that_will_not_do_are_refused(make: Callable[..., Any], cls: type[DictBackend], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^backend: .*{why}.*; use one that implements `create`"):
        make(cls(kvloom.Config()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": {"type": "dict"}}, r"^backend: 'dict' cannot create a key exclusively"),
        ({"backend": {"path": "x"}}, r"^backend: expected a StorageBackend or a block with a `type`"),
        ({"capacity": 0}, r"^capacity: must be more than 0"),
        ({"capacity": "lots"}, r"^capacity: "),
        ({"timeout": -1}, r"^timeout: must be 0 or more"),
        ({"timeout": "soon"}, r"^timeout: "),
        ({"abandoned": 0}, r"^abandoned: must be more than 0"),
        ({"name": "a/b"}, r"^name: 'a/b' cannot be part of a key"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lookup(**settings)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(kvloom.PluginError, match="no backend of type 'nothing'"):
        lookup({"type": "nothing"})


def test_units_as_in_yaml() -> None:
    buffer = lookup(capacity="4GiB", timeout="250ms")
    assert (buffer.capacity, buffer.timeout) == (2**32, 0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ids(1), ids(1, 1)), "roi: expected a 1-D mask of 1 entries"),
        ((torch.ones(2), None), "input_tokens: expected a 1-D integer tensor"),
        ((torch.ones(2, 2, dtype=torch.int64), None), "input_tokens: expected a 1-D"),
        ((None, ids(1)), "input_tokens: None takes any entry"),
    ],
)
def test_questions_that_mean_nothing(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookup().drop_select(*arguments)


def test_entries_that_nobody_could_ask_for() -> None:
    with pytest.raises(ValueError, match="roi: selects no token"):
        put_in(lookup(), [1, 2], [0, 0])
    with pytest.raises(TypeError, match=r"value: expected a torch\.Tensor, got list"):
        lookup().insert(ids(1), ids(1), torch.ones(1), [1], torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key: expected a str"):
        store().get(7)  # type: ignore[arg-type]


VLLM = """
class KVStoreBufferBase: pass
class KVLookupBufferBase: pass
"""


def test_they_are_vllms_where_it_has_them(tmp_path: Path) -> None:
    place = tmp_path / "vllm/distributed/kv_transfer/kv_lookup_buffer"
    place.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("")
    (place / "base.py").write_text(VLLM)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from kvloom_connector_vllm.buffers import KVLookupBuffer, KVStoreBuffer\n"
        "print(*(cls.__mro__[2].__module__ for cls in (KVLookupBuffer, KVStoreBuffer)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["vllm.distributed.kv_transfer.kv_lookup_buffer.base"] * 2
