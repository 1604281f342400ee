"""The KV buffers in one process: what fits what, waiting, room."""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
import xxhash
from buffers_support import NOTHING, CreatingDict, directory, ids, lookup, mark, put_in
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom
from kvloom import BackendError, Buffers, CorruptBlobError, DeadlineExceeded, UnreadableBlobError
from kvloom_backend_disk.backend import DiskBackend
from kvloom_connector_vllm.buffers import KVLookupBuffer, blobs, room

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
    """Number of tokens of KV that both have, counted token by token."""
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
                super().put(f"kv-lookup/room/{room.new_id()}-8192", [b"a rival"])
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


# -- what others put there ---------------------------------------------------------------------------------------------


def test_an_entry_that_is_longer_than_the_buffer_is_not_read(tmp_path: Path) -> None:
    backend = DiskBackend(DiskBackend.Config(path=tmp_path))
    buffer = lookup(backend)
    put_in(buffer, [1, 2])
    (file,) = tmp_path.glob("*/entry/+*/*")
    head = file.read_bytes()
    os.truncate(file, 1 << 43)
    assert buffer.drop_select(None, None) == NOTHING and buffer.counts()["corrupt"] == 1

    put_in(buffer, [1, 2])
    (file,) = tmp_path.glob("*/entry/+*/*")
    header = bytearray(file.read_bytes()[:4096])  # whose tensors of tokens are of terabytes
    at = 112 + struct.unpack_from("<I", header, 16)[0]
    struct.pack_into("<Q", header, 24, 1 << 43)
    for number in range(5):
        struct.pack_into("<Q", header, at + 24 * number, 0 if number else 1 << 43)
    header[40:56] = bytes(16)
    header[40:56] = xxhash.xxh3_128_digest(bytes(header))
    file.write_bytes(header)
    os.truncate(file, 1 << 43)
    assert buffer.drop_select(ids(1, 2), None) == NOTHING and buffer.counts()["corrupt"] == 2
    assert "failed" not in buffer.counts() and len(head) > 4096


@pytest.mark.parametrize("shape", [[1 << 50], [10**30], [2] * 100, "1000", [-1, -1], None, {}])
def test_the_shape_that_an_entry_says_takes_no_memory(shape: object) -> None:
    described = {"dtype": "uint8", "shape": shape}
    with pytest.raises((CorruptBlobError, UnreadableBlobError)):
        blobs._tensor(described, memoryview(b"x"))
