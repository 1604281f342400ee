"""The record of what went from a tier: bounded, carried on from process to process, and none if it is damaged."""

from __future__ import annotations

import struct
import threading

import pytest
import xxhash

from kvloom.tiers.index.eviction_history import _HEADER, _MAGIC, MOST, EvictionHistory, parse


class Clock:
    """The part of a runtime that the record needs."""

    def __init__(self) -> None:

        self.time = 1000.0
        self.lock = threading.Lock

    def wall(self) -> float:
        return self.time


def test_the_record_is_bounded_and_says_from_when_it_is_complete() -> None:
    clock = Clock()
    evictions = EvictionHistory(clock)  # type: ignore[arg-type]
    digests = [number.to_bytes(8, "big") + bytes(24) for number in range(MOST + 10)]
    for number, digest in enumerate(digests):
        clock.time = 1000.0 + number
        evictions.note([digest], "capacity")
    assert evictions.news
    record = evictions.record()
    assert not evictions.news and len(record) < 512 << 10
    found = parse(record)
    assert found is not None
    assert (found.since, found.until) == (1009.0, clock.time), "what went before the oldest row may be missing"
    assert found.of(digests[9]) is None and found.of(digests[10]) is not None
    last = found.of(digests[-1])
    assert last is not None and (last.when, last.reason) == (clock.time, "capacity")


def test_a_record_goes_on_in_the_next_process() -> None:
    clock = Clock()
    old, new = EvictionHistory(clock), EvictionHistory(clock)  # type: ignore[arg-type]
    old.note([b"a" * 32, b"b" * 32], "quota")
    clock.time = 2000.0
    new.note([b"c" * 32, b"b" * 32], "expired")
    new.restore(old.record())
    found = parse(new.record())
    assert found is not None and found.since == 1000.0
    assert {name: (row.when, row.reason) for name, row in found.rows.items()} == {
        b"a" * 8: (1000.0, "quota"), b"b" * 8: (2000.0, "expired"), b"c" * 8: (2000.0, "expired"),
    }  # fmt: skip


def test_a_damaged_record_is_none() -> None:
    evictions = EvictionHistory(Clock())  # type: ignore[arg-type]
    evictions.note([b"a" * 32], "capacity")
    record = evictions.record()
    assert parse(record) is not None
    for at in range(len(record)):
        assert parse(record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]) is None
    assert parse(b"") is None and parse(record[:-1]) is None and parse(record + record[-13:]) is None


@pytest.mark.parametrize("times", [(float("nan"), 1.0), (1.0, float("inf")), (-1.0, 1.0), (1.0, 1e300)])
def test_times_that_are_none_make_no_record(times: tuple[float, float]) -> None:
    behind = struct.pack("<dd", *times)
    assert parse(_HEADER.pack(_MAGIC, xxhash.xxh3_64_intdigest(behind), *times)) is None
