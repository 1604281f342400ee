"""Blobs that are not what was stored: whatever happened to their bytes, nobody gets a wrong one."""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import xxhash
from core_support import Shelf
from reliability_support import (
    GENEROUS_SECONDS,
    SMALL,
    WIDE,
    events,
    kv_of,
    open_engine,
    plugins_with,
    same_bits,
    tokens_of,
)

from kvloom import KVSpec, StorageBackend
from kvloom_backend_disk.backend import DiskBackend

PAGE = 4096
Damage = Callable[[bytes, bytes, random.Random], bytes]


class Kind(NamedTuple):
    """Blobs of one kind."""

    serializer: str
    spec: KVSpec
    chunk_tokens: int
    chunks: int
    """Number of chunks damaged and read at a time."""


RAW = Kind("raw", SMALL, 4, 64)
TORCH = RAW._replace(serializer="torch")
SAFETENSORS = RAW._replace(serializer="safetensors")
LARGE = Kind("raw", WIDE, 256, 8)
"""2 MiB in eight buffers, each with a checksum of its own."""
KINDS = {"raw": RAW, "torch": TORCH, "safetensors": SAFETENSORS, "large": LARGE}


class Bench:
    """An engine over one store and nothing above it, and the store itself, to do damage in."""

    def __init__(self, kind: Kind, backend: str, path: Path) -> None:
        self.kind = kind
        tier: dict[str, Any] = {"type": "shelf", "shelf": str(path)}
        if backend == "disk":
            tier = {"type": "disk", "path": str(path)}
        tier |= {"serializer": kind.serializer, "deadline": "60s"}
        self.engine = open_engine(
            tier,
            spec=kind.spec,
            chunk_tokens=kind.chunk_tokens,
            registry=plugins_with("core_support"),
        )
        count = kind.chunks * kind.chunk_tokens
        self.tokens, self.kv = tokens_of(count, 1), kv_of(count, 1, kind.spec)
        self.engine.store(self.tokens, kv=self.kv)
        assert self.engine.flush(GENEROUS_SECONDS)
        self.segments = self.engine.segments(self.tokens)
        self.keys = [str(segment.key) for segment in self.segments]
        self.store: StorageBackend
        if backend == "disk":
            self.store = DiskBackend(DiskBackend.Config(path=path))
        else:
            self.store = Shelf.shelves[str(path)]
        self.blobs = [bytes(self.store.get(key) or b"") for key in self.keys]
        self.payload_at = len(self.blobs[0]) - struct.unpack_from("<Q", self.blobs[0], 24)[0]
        self.reads = 0
        self.damaged = 0

    def read(self) -> list[bool]:
        """Read everything; which chunks came. Fails if a byte of them, or of the others' place, is wrong."""
        got = torch.zeros_like(self.kv)
        mask = self.engine.load(self.segments, kv=got).result(GENEROUS_SECONDS)
        mine = mask.repeat_interleave(self.kind.chunk_tokens)
        assert same_bits(got[:, :, mine], self.kv[:, :, mine]), "wrong bytes"
        assert not got[:, :, ~mine].contiguous().view(torch.uint8).any(), "KV was touched that is said not to be there"
        self.reads += len(self.keys)
        return list(mask.tolist())

    def put(self, index: int, blob: bytes) -> None:
        self.store.put(self.keys[index], [blob])

    def feed(self, damaged: Iterator[Damage], seed: int) -> None:
        """Read each damaged blob, always among some that are whole."""
        rng = random.Random(seed)
        while batch := list(islice(damaged, len(self.keys) - len(self.keys) // 8)):
            places = rng.sample(range(len(self.keys)), len(batch))
            for place, damage in zip(places, batch, strict=True):
                blob = damage(self.blobs[place], self.blobs[place - 1], rng)
                assert blob != self.blobs[place]
                self.put(place, blob)
            came = self.read()
            assert [not here for here in came] == [index in places for index in range(len(came))], (
                "a blob is whole or a miss"
            )
            for place in places:
                self.put(place, self.blobs[place])
            self.damaged += len(batch)
        assert all(self.read()), "what is whole again is served again"
        assert events(self.engine, "corrupt") == self.damaged, "and each was counted"


@pytest.fixture(params=["disk", "shelf"])
def bench(
    request: pytest.FixtureRequest, ram_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[Kind], Bench]]:
    caplog.set_level(logging.ERROR, "kvloom")  # a warning for each damaged blob takes longer than reading it
    opened: list[Bench] = []

    def make(kind: Kind) -> Bench:
        opened.append(Bench(kind, request.param, ram_path))
        return opened[-1]

    yield make
    for one in opened:
        one.engine.close()
    Shelf.shelves.clear()


# -- the damages: (blob, another blob, chance) -> something else -------------------------------------------------------


def flip(bit: int) -> Damage:
    return lambda blob, other, rng: blob[: bit // 8] + bytes([blob[bit // 8] ^ 1 << bit % 8]) + blob[bit // 8 + 1 :]


def every_header_byte(blob: bytes, bits: int, rng: random.Random) -> Iterator[Damage]:
    size = struct.unpack_from("<I", blob, 12)[0]
    for at in range(size):
        for bit in rng.sample(range(8), bits):
            yield flip(8 * at + bit)


def random_payload_bits(blob: bytes, payload_at: int, count: int, rng: random.Random) -> Iterator[Damage]:
    for _ in range(count):
        yield flip(rng.randrange(8 * payload_at, 8 * len(blob)))


def cut(size: int) -> Damage:
    return lambda blob, other, rng: blob[:size]


def extended(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    return blob + rng.choice([b"\0", bytes(PAGE), rng.randbytes(rng.randrange(1, 9000)), blob, other])


def swapped(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    return other


def others_payload(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    size = struct.unpack_from("<I", blob, 12)[0]
    return blob[:size] + other[size:]


def others_header(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    size = struct.unpack_from("<I", blob, 12)[0]
    return other[:size] + blob[size:]


def zeroed(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    """A sector that was never written."""
    first = rng.randrange(0, len(blob), 512)
    size = len(blob[first : first + rng.choice([512, PAGE, 65536])])
    return damaged_somehow(blob[:first] + bytes(size) + blob[first + size :], blob)


def noisy(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    """A sector of something else."""
    first = rng.randrange(0, len(blob), 512)
    size = len(blob[first : first + 512])
    return blob[:first] + rng.randbytes(size) + blob[first + size :]


def shifted(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    """A byte too many or too few on the way, the length right again at the end."""
    at = rng.randrange(len(blob) - 1)
    moved = blob[:at] + b"\x5a" + blob[at:-1] if rng.random() < 0.5 else blob[:at] + blob[at + 1 :] + b"\x5a"
    return damaged_somehow(moved, blob)


def rearranged(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    """Two equally long parts in each other's place."""
    size = rng.choice([64, 512, PAGE, 256 << 10])
    size = min(size, len(blob) // 4)
    one, two = sorted(rng.sample(range(0, len(blob) - size + 1, size), 2))
    moved = blob[:one] + blob[two : two + size] + blob[one + size : two] + blob[one : one + size] + blob[two + size :]
    return damaged_somehow(moved, blob)


def foreign(blob: bytes, other: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"", b"\0", bytes(PAGE), b"%PDF-1.7 " * 999, blob[:8], rng.randbytes(PAGE), bytes(len(blob))])


def damaged_somehow(blob: bytes, whole: bytes) -> bytes:
    """`blob`, or the whole one with its last bit flipped where they turn out to be the same (zeros moved to zeros)."""
    return blob if blob != whole else whole[:-1] + bytes([whole[-1] ^ 1])


RANDOM = (extended, swapped, others_payload, others_header, zeroed, noisy, shifted, rearranged, foreign)


def damages(bench: Bench, *, bits: int, lengths: int | None, others: int) -> Iterator[Damage]:
    """`bits` bits of every header byte; `lengths` lengths (None: every length); `others` of everything else."""
    rng = random.Random(5)
    blob = bench.blobs[0]
    yield from every_header_byte(blob, bits, rng)
    yield from random_payload_bits(blob, bench.payload_at, others, rng)
    sizes = range(len(blob)) if lengths is None else [rng.randrange(len(blob)) for _ in range(lengths)]
    yield from (cut(size) for size in [*sizes, 0, 1, PAGE - 1, PAGE, len(blob) - 1])
    for damage in RANDOM:
        yield from [damage] * others


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_blobs_are_misses(bench: Callable[[Kind], Bench], kind: str, tally: Callable[..., None]) -> None:
    mine = bench(KINDS[kind])
    many = kind == "raw" and isinstance(mine.store, DiskBackend)
    few = 3 if kind == "large" else 20
    some = damages(mine, bits=1, lengths=few, others=few)
    mine.feed((damage for at, damage in enumerate(some) if at >= PAGE or at % (8 if many else 64) == 0), 1)
    tally(reads=mine.reads, damaged_blobs=mine.damaged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_blobs_are_misses(bench: Callable[[Kind], Bench], kind: str, tally: Callable[..., None]) -> None:
    mine = bench(KINDS[kind])
    if kind == "large":
        mine.feed(damages(mine, bits=1, lengths=100, others=100), 2)
    else:
        mine.feed(damages(mine, bits=4 if kind == "raw" else 1, lengths=None, others=500), 2)
    tally(reads=mine.reads, damaged_blobs=mine.damaged)


# -- headers that lie and are signed -----------------------------------------------------------------------------------


def signed(header: bytes, payload: bytes) -> bytes:
    data = bytearray(header)
    data[40:56] = bytes(16)
    data[40:56] = xxhash.xxh3_128_digest(data)
    return bytes(data) + payload


def liars(blob: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    """Headers with other fields, bytes of the table or of the description, and a checksum that is right."""
    size = struct.unpack_from("<I", blob, 12)[0]
    text_bytes, _ = struct.unpack_from("<II", blob, 16)
    fields = [("<H", 10), ("<I", 16), ("<I", 20), ("<Q", 24), ("<Q", 32), ("<Q", 56), ("<Q", 72), ("<Q", 96)]
    for _ in range(count):
        header = bytearray(blob[:size])
        if rng.random() < 0.4:
            form, at = rng.choice(fields)
            bits = 8 * struct.calcsize(form)
            old = struct.unpack_from(form, header, at)[0]
            new = rng.choice([0, 1, old + 1, max(0, old - 1), 2**bits - 1, rng.getrandbits(bits), rng.getrandbits(12)])
            struct.pack_into(form, header, at, new % 2**bits)
        else:
            for _ in range(rng.choice([1, 1, 4])):
                header[rng.randrange(112, min(size, 112 + text_bytes + 64))] = rng.choice(b'\0"}{[]0129,:ae\xff')
        yield signed(bytes(header), blob[size:])


def lies(bench: Bench, count: int) -> None:
    rng = random.Random(6)
    sources = [liars(blob, count, rng) for blob in bench.blobs]
    for _ in range(count):
        for index, source in enumerate(sources):
            if index % 8:
                bench.put(index, next(source))
        came = bench.read()
        assert all(came[::8]), "what is whole among them is served"
        for index, blob in enumerate(bench.blobs):
            bench.put(index, blob)


def test_a_signed_header_that_lies_gives_no_wrong_byte(
    bench: Callable[[Kind], Bench], tally: Callable[..., None]
) -> None:
    mine = bench(RAW)
    lies(mine, 10)
    tally(reads=mine.reads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raw", "torch", "safetensors"])
def test_many_signed_headers_that_lie_give_no_wrong_byte(
    bench: Callable[[Kind], Bench], kind: str, tally: Callable[..., None]
) -> None:
    mine = bench(KINDS[kind])
    lies(mine, 100)
    tally(reads=mine.reads)
