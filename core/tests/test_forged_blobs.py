"""Blobs forged on purpose, with valid checksums."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import pytest
import torch
import xxhash
from core_support import CHUNK, Shelf, kv_of, tokens_of
from faults_support import SHELF, later_version

from kvloom import Buffers, Chunk, CorruptBlobError, Engine, LaterVersionError, UnreadableBlobError, envelope
from kvloom.builtin.raw import RawSerializer

TOKENS, KV = tokens_of(2 * CHUNK), kv_of(2 * CHUNK)


@pytest.mark.parametrize("text", [b"[" * 9_000, b'{"shape":' * 1_000, b"[]", b"3", b"{}"])
def test_a_description_that_is_none_is_not_for_this_process(text: bytes) -> None:
    with pytest.raises(UnreadableBlobError) as caught:
        envelope._describe(text, "k")
    assert not isinstance(caught.value, LaterVersionError), "so that it is written over"


def with_checksum(header: bytearray) -> bytes:
    header[40:56] = bytes(16)
    header[40:56] = xxhash.xxh3_128_digest(bytes(header))
    return bytes(header)


def forged(blob: bytes, **fields: object) -> bytes:
    """`blob` with other fields in its description, under a right checksum."""
    header_bytes, text_bytes, count = struct.unpack_from("<III", blob, 12)
    described = {**json.loads(blob[112 : 112 + text_bytes]), **fields}
    text = json.dumps(described, separators=(",", ":")).encode()
    table = blob[112 + text_bytes : 112 + text_bytes + 24 * count]
    size = -(-(112 + len(text) + len(table)) // 4096) * 4096
    header = bytearray((blob[:112] + text + table).ljust(size, b"\0"))
    struct.pack_into("<II", header, 12, size, len(text))
    return with_checksum(header) + blob[header_bytes:]


WRONG: dict[str, object] = {
    "serializer": [], "written": "x", "fidelity": {}, "shape": [2, "2"], "num_tokens": 4.0, "dtype": None,
    "format": 3, "params": [], "start": True, "key": 0,
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_another_type_is_a_miss_fails_no_store_and_is_written_over(
    open_engine: Callable[..., Engine], field: str
) -> None:
    engine = open_engine(SHELF)
    head = str(engine.segments(TOKENS)[0].key)
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    blobs = Shelf.shelves["default"]._blobs
    blobs[head] = forged(blobs[head], **{field: WRONG[field]})
    engine = open_engine(SHELF)
    for _ in range(4):
        assert retrieved(engine) == 0
    (tier,) = engine.health().tiers
    assert tier.ok and not tier.failures
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    assert retrieved(open_engine(SHELF)) == 2 * CHUNK


@pytest.mark.parametrize("number", [-1, 1 << 40, 1 << 60, 10**30])
def test_numbers_that_nothing_has_are_refused(number: int) -> None:
    about = envelope.Description("k", "raw", (2, 2, 4, 8), "bfloat16", "kv_blob", 4, "exact", written=number)
    blob = b"".join(envelope.seal(about, [b"x"]))
    with pytest.raises(UnreadableBlobError):
        envelope.unseal(blob, key="k")


def test_a_header_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than one of a blob can be, in its description, its table, or as a whole."""
    monkeypatch.setattr(envelope, "json", None)
    blob = b"".join(envelope.seal(envelope.Description("k", "raw", (1,), "uint8", "kv_blob", 1, "exact"), [b"x"]))
    most = envelope.MAX_HEADER_BYTES
    assert most <= 128 << 10
    for size, text_bytes, count in (
        (most + 4096, 300, 1),
        (most, envelope.MAX_DESCRIPTION_BYTES + 1, 1),
        (most, 300, envelope.MAX_BUFFERS + 1),
    ):
        header = bytearray(blob[:4096].ljust(size, b" "))
        struct.pack_into("<III", header, 12, size, text_bytes, count)
        data = memoryview(with_checksum(header))
        with pytest.raises(CorruptBlobError, match="impossible header sizes"):
            envelope.parse(data[:4096], key="k")
    with pytest.raises(CorruptBlobError):
        envelope.header_bytes(data[:4096] if size > most else memoryview(_long_header(blob, most + 4096)))


def _long_header(blob: bytes, size: int) -> bytes:
    header = bytearray(blob[:4096])
    struct.pack_into("<I", header, 12, size)
    return bytes(header)


@pytest.mark.parametrize("params", [{"x": "y" * 20_000}, {"x": [[]] * 300}])
def test_what_no_reader_would_take_is_not_written(params: dict[str, object]) -> None:
    about = envelope.Description("k", "raw", (1,), "uint8", "kv_blob", 1, "exact", params)
    with pytest.raises(ValueError, match="serializer raw"):
        envelope.seal(about, [b"x"])
    with pytest.raises(ValueError, match="4097 buffers"):
        envelope.seal(envelope.Description("k", "raw", (1,), "uint8", "kv_blob", 1, "exact"), [b"x"] * 4097)


class Panic(BaseException):
    """A panic like that of native code."""


@pytest.mark.parametrize("error", [RuntimeError("bad\nline" + "x" * 9_000), MemoryError(), Panic("unwrap")])
def test_a_serializer_that_breaks_off_at_a_blob_is_no_failure_of_the_store(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, error: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine = open_engine(SHELF | {"serializer": "padded"})
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    engine = open_engine(SHELF | {"serializer": "padded"})

    def decode(self: RawSerializer, blob: Buffers, into: Chunk) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(RawSerializer, "decode", decode)
        for _ in range(4):
            assert retrieved(engine) == 0
    assert engine.health().ok
    reasons = {key.reason for key in engine.counters() if key.name in ("missed", "tier_error")}
    assert "unreadable" in reasons and any(reason.startswith("decode: ") for reason in reasons)
    assert all(len(line) < 600 and "\n" not in line for line in caplog.messages)
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20) and retrieved(engine) == 2 * CHUNK


def test_what_cannot_be_deleted_is_no_failure_of_reading(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(SHELF)
    damaged(engine)

    def stuck(verb: str, key: str) -> None:
        if verb == "delete":
            raise PermissionError(13, "Permission denied")

    Shelf.shelves["default"].before = stuck
    for _ in range(4):
        assert retrieved(engine) == 0
    assert engine.health().ok and engine.lookup(TOKENS).tokens == 0


def test_an_expired_blob_that_cannot_be_deleted_is_no_failure_of_reading(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(SHELF | {"ttl": "1h"})
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    shelf = Shelf.shelves["default"]
    for name, blob in shelf.blobs.items():  # the ledger takes them for young: it has seen them written just now
        shelf._blobs[name] = forged(blob, written=1)

    def stuck(verb: str, key: str) -> None:
        if verb == "delete":
            raise PermissionError(13, "Permission denied")

    shelf.before = stuck
    for segment in engine.segments(TOKENS) * 4:
        assert not engine.load([segment], kv=torch.zeros_like(KV)).result(20).any()
    assert engine.health().ok and engine.lookup(TOKENS).tokens == 0


def test_the_shape_that_a_blob_says_takes_no_memory(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(SHELF)
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    key = engine.segments(TOKENS)[0].key
    blobs = Shelf.shelves["default"]._blobs
    for shape in ([1 << 40] * 4, [1] * 5_000, [2, 2, 1 << 30, 8]):
        blobs[str(key)] = forged(blobs[str(key)], shape=shape)
        (tier,) = open_engine(SHELF)._stack.stored
        assert tier.get(key) is None and tier.health().ok


def damaged(engine: Engine) -> dict[str, bytes]:
    """Store a prompt, and flip a bit of each of its blobs."""
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    shelf = Shelf.shelves["default"]
    for name, blob in shelf.blobs.items():
        shelf._blobs[name] = blob[:-1] + bytes([blob[-1] ^ 1])
    return shelf.blobs


def retrieved(engine: Engine) -> int:
    return int(engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).sum())


@pytest.mark.parametrize("claim", ["bounded", "one_by_one"])
def test_far_away_a_corrupt_blob_is_a_miss_and_stays_until_it_is_stored_anew(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    monkeypatch.setattr(Shelf, claim, True)
    engine = open_engine({"type": "shelf"})
    blobs = damaged(engine)
    assert retrieved(engine) == 0
    assert Shelf.shelves["default"].blobs == blobs, "it may be good for everybody else"
    assert engine.lookup(TOKENS).tokens == 0, "it is not promised"
    for _ in range(2):  # each is found out when it is read
        engine.store(TOKENS, kv=KV)
        assert engine.flush()
        there = retrieved(engine)
    assert there == 2 * CHUNK


def test_nearby_a_corrupt_blob_is_deleted(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine({"type": "shelf"})
    damaged(engine)
    assert retrieved(engine) == 0
    head = engine.segments(TOKENS)[0].key
    assert str(head) not in Shelf.shelves["default"].blobs


def test_no_text_of_a_blob_is_counted_by(open_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    """Nor any number: what is counted together is the same however many blobs say something else each."""
    caplog.set_level("INFO", logger="kvloom")
    engine = open_engine(SHELF)
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    key = str(engine.segments(TOKENS)[0].key)
    blobs = Shelf.shelves["default"]._blobs
    good = blobs[key]

    def reasons(number: int) -> set[tuple[str, str]]:
        for bad in (
            forged(good, serializer=f"strange\n{number}"),
            forged(good, fidelity=f"strange/{number}"),
            good[: 4100 + number],
            good[:100],
            good + bytes((number + 1) << 17),
            good[:-1] + b"?",
            later_version(good),
        ):
            blobs[key] = bad
            engine = open_engine(SHELF, exact=True)
            retrieved(engine)
            found.update((one.name, one.reason) for one in engine.counters())
        return set(found)

    found: set[tuple[str, str]] = set()
    assert reasons(0) == reasons(1)
    assert not [reason for _, reason in found if "strange" in reason or any(map(str.isdigit, reason))]
    said = [line for line in caplog.messages if "strange" in line]
    assert said and not [line for line in said if "\n" in line], "it is said in the log, escaped"


@pytest.mark.parametrize("claimed", [1 << 40, 1 << 52, (1 << 63) + 1])
def test_a_small_blob_that_says_it_is_large_has_nothing_evicted(
    open_engine: Callable[..., Engine], claimed: int
) -> None:
    tier = SHELF | {"capacity": "1MiB"}
    engine = open_engine(tier)
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    head, tail = (str(segment.key) for segment in engine.segments(TOKENS))
    blobs = Shelf.shelves["default"]._blobs
    header = bytearray(blobs[head])
    text_bytes, _, _ = struct.unpack_from("<IIQ", header, 16)
    struct.pack_into("<Q", header, 24, claimed)
    struct.pack_into("<Q", header, 112 + text_bytes, claimed)
    blobs[head] = with_checksum(header[:4096]) + bytes(header[4096:])
    engine = open_engine(tier)
    engine.store(TOKENS, kv=KV)  # looks at what is there, and writes over what is of no use
    assert engine.flush() and tail in blobs
    (health,) = engine.health().tiers
    assert health.ok and health.bytes < 1 << 20 and retrieved(engine) == 2 * CHUNK
    assert not [key for key in engine.counters() if key.name in ("evicted", "tier_error") and key.tier == "shelf"]
