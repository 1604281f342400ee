"""The KV buffers: each entry goes to one, whoever claims it, and damage is never given."""

from __future__ import annotations

import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from buffers_support import NOTHING, CreatingDict, directory, ids, lookup, mark, put_in, store
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom
from kvloom import Buffer, DeadlineExceeded, envelope
from kvloom_connector_vllm.buffers import room
from kvloom_connector_vllm.buffers.lookup import Prefix

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
    """A reader that listed an entry before another one took it finds that it is gone."""
    backend = CreatingDict(kvloom.Config())
    slow, quick = lookup(backend), lookup(backend)
    put_in(slow, [1], mark=1)
    (id,) = slow._candidates(None)
    assert mark(quick.drop_select(None, None)) == 1
    assert slow._take(id) is None
    assert list(backend.scan("")) == []


@pytest.mark.parametrize("query", [None, ids(1)])
def test_another_thread_may_list_at_any_line(query: torch.Tensor | None) -> None:
    buffer = lookup(CreatingDict(kvloom.Config()))
    put_in(buffer, [1], mark=1)
    asked = None if query is None else Prefix(query, query)

    def meddle(frame: types.FrameType, event: str, arg: object) -> Any:
        buffer._known = {}
        return meddle

    before = sys.gettrace()
    sys.settrace(meddle)
    try:
        (id,) = buffer._candidates(asked)
        (again,) = buffer._candidates(asked)
    finally:
        sys.settrace(before)
    assert id == again and mark(buffer.drop_select(query, query)) == 1


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
    backend.put(f"kv-lookup/room/{room.new_id()}-8192", [b"reserved"])
    with pytest.raises(DeadlineExceeded):
        put_in(lookup(backend, capacity=8192, abandoned=3600), [1])
    time.sleep(0.02)
    put_in(lookup(backend, capacity=8192, abandoned=0.01), [1])


@pytest.mark.parametrize("content", [b"", b"nobody", b"7" + b"f" * 47, b"x" * 10_000])
def test_what_nobody_can_have_claimed_or_reserved_is_in_nobodys_way(content: bytes) -> None:
    """Of no time, or of one that is still to come."""
    backend = CreatingDict(kvloom.Config())
    buffer = lookup(backend, capacity=8192)
    put_in(buffer, [1], mark=1)
    (id,) = buffer._candidates(None)
    backend.put(f"kv-lookup/claim/{id}", [content])
    backend.put(f"kv-lookup/room/{content[:40].decode()}-8192", [b"reserved"])
    buffer._next_upkeep = 0.0
    assert buffer.drop_select(None, None) == NOTHING and buffer.counts()["abandoned"] == 1
    put_in(buffer, [1], mark=2)
    assert mark(buffer.drop_select(None, None)) == 2 and not [*backend.scan("")]


def test_a_claim_that_cannot_be_read_keeps_no_other() -> None:
    class Failing(CreatingDict):
        def get(self, key: str) -> Buffer | None:
            if key.endswith("/claim/1"):
                raise OSError("not that one")
            return super().get(key)

    backend = Failing(kvloom.Config())
    for id in ("1", "2"):
        backend.put(f"kv-lookup/claim/{id}", [b"nobody"])
    lookup(backend).drop_select(None, None)
    assert [entry.key for entry in backend.scan("")] == ["kv-lookup/claim/1"]


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
