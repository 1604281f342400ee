"""The envelope: whatever happens to a blob's bytes, it is noticed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import CorruptBlobError, UnreadableBlobError, envelope

KEY = "f" * 32 + "/-/0-" + "a" * 64


def describe(**change: object) -> envelope.Description:
    fields = {
        "key": KEY, "serializer": "raw", "shape": (2, 1, 4, 8), "dtype": "bfloat16", "format": "kv_blob",
        "num_tokens": 4, "fidelity": "exact", "params": {"a": 1},
    }  # fmt: skip
    return envelope.Description(**{**fields, **change})  # type: ignore[arg-type]


def framed(*buffers: bytes) -> bytearray:
    return bytearray(b"".join(envelope.seal(describe(), buffers)))


@given(st.lists(st.binary(max_size=5000), max_size=6))
def test_what_was_sealed_comes_back(buffers: list[bytes]) -> None:
    blob = framed(*buffers)
    header, payload = envelope.unseal(blob, key=KEY)
    assert header.description == describe()
    assert [bytes(part) for part in envelope.split(header, payload)] == buffers
    assert header.header_bytes % 4096 == 0


@given(st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=4), st.data())
@settings(max_examples=200)
def test_every_flipped_bit_is_noticed(buffers: list[bytes], data: st.DataObject) -> None:
    blob = framed(*buffers)
    # The zeros behind the table are covered too: the checksum is over the whole header.
    at = data.draw(st.integers(0, len(blob) - 1) | st.integers(0, 111))
    blob[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptBlobError):
        envelope.unseal(blob, key=KEY)


TEXTS = st.text(max_size=6) | st.sampled_from(["raw", "exact", '","start":3,"written":4}', '"key":"k"'])
KEYS = st.sampled_from(["k", KEY, 'a"b', "\\", "\n", "\u00e9", "\ud800", 'k","num_tokens":9,"x":"'])
NUMBERS = st.integers(0, 9) | st.sampled_from([(1 << 37) - 1, 1 << 37, 10**14, 10**15, (1 << 53) - 1, 1 << 53])
DESCRIPTIONS = st.builds(
    envelope.Description, KEYS, TEXTS, st.sampled_from([(), (2, 1, 4)]), TEXTS, st.just("kv_blob"), NUMBERS,
    st.just("exact"), st.just({}) | st.just({"key": "k", "start": 3}), NUMBERS, st.none() | NUMBERS,
)  # fmt: skip
EDITS = st.sampled_from([
    (b'"start":', b'"start":0'), (b'"start":', b'"start":-'), (b'"written":', b'"written": '), (b"}", b',"later":1}'),
    (b'"start":null', b'"start":true'), (b'"key":', b'"key":"z","key":'), (b'"written":', b'"start":7,"written":'),
    (b'"num_tokens":', b'"key":"z","num_tokens":'), (b"{", b" {"), (b"}", b"} "), (b"exact", b"\xff"), (b",", b",,"),
    (b'"params":{}', b'"params":{"key":"k","start":1,"written":2}'), (b'"written":', b'"written":1e'),
])  # fmt: skip


@given(st.lists(st.tuples(DESCRIPTIONS, st.lists(EDITS, max_size=2)), min_size=1, max_size=4), KEYS, st.none() | KEYS)
@settings(max_examples=150)
def test_a_description_like_one_before_reads_as_if_it_were_the_first(
    several: list[tuple[envelope.Description, list[tuple[bytes, bytes]]]], key: str, same: str | None
) -> None:
    def outcome(read: Callable[[bytes], envelope.Description], text: bytes) -> envelope.Description | str:
        try:
            return read(text)
        except UnreadableBlobError as error:
            return str(error)

    first, edits = several[0]
    for description, others in [*several, (first._replace(key=key, start=5, written=6), edits)]:
        text = envelope._canonical(description)
        for old, new in others:
            text = text.replace(old, new, 1)
        wanted = description.key if same is None else same
        expected = outcome(envelope._parsed, text)
        for _ in range(2):
            assert outcome(partial(envelope._describe, key=wanted), text) == expected


def test_a_key_stands_in_a_description_as_json_has_it() -> None:
    text, key = envelope._canonical(describe(params={})), 'k","x":"'
    assert envelope._describe(text, KEY).key == KEY
    assert envelope._describe(text.replace(KEY.encode(), key.encode()), key).key == "k"


def test_of_descriptions_without_end_few_are_remembered() -> None:
    for number in range(1000):
        about = describe(num_tokens=number, params={})
        assert envelope._describe(envelope._canonical(about), KEY) == about
        assert len(envelope._alike) <= envelope._MOST_ALIKE


@given(st.binary(min_size=1, max_size=9000), st.data())
def test_cut_short_or_extended_is_noticed(payload: bytes, data: st.DataObject) -> None:
    blob = framed(payload)
    cut = data.draw(st.integers(0, len(blob) - 1))
    with pytest.raises(CorruptBlobError):
        envelope.unseal(blob[:cut], key=KEY)
    with pytest.raises(CorruptBlobError):
        envelope.unseal(blob + b"\0", key=KEY)


@pytest.mark.parametrize(
    ("at", "said"),
    [(0, "byte 0: "), (13, "byte 12: "), (26, "byte 40: "), (120, "byte 40: "), (4095, "byte 40: "),
     (4096, "byte 4096: .*buffer 0"), (4100, "byte 4099: .*buffer 1"), (4106, "byte 4099: .*buffer 1")],
)  # fmt: skip
def test_it_says_which_byte_or_where_what_is_wrong_begins(at: int, said: str) -> None:
    blob = framed(b"abc", b"12345678", b"")
    blob[at] ^= 1
    with pytest.raises(CorruptBlobError, match=f"^{said}"):
        envelope.unseal(blob, key=KEY)
    blob[at] ^= 1
    for length in (50, 4096, len(blob) - 1):
        with pytest.raises(CorruptBlobError, match=f"^byte {length}: .*cut short"):
            envelope.unseal(blob[:length], key=KEY)
    with pytest.raises(CorruptBlobError, match=f"^byte {len(blob)}: .*behind"):
        envelope.unseal(blob + b"x", key=KEY)


@given(st.binary(max_size=6000))
def test_foreign_bytes_are_no_blob(data: bytes) -> None:
    with pytest.raises(CorruptBlobError):
        envelope.unseal(data, key=KEY)


def test_the_blob_of_another_key_is_corrupt() -> None:
    with pytest.raises(CorruptBlobError, match="another key"):
        envelope.unseal(framed(b"x"), key=KEY[:-1] + "b")


def test_a_later_version_is_unreadable_not_corrupt_if_its_checksum_holds() -> None:
    blob = framed(b"x")
    struct.pack_into("<H", blob, 8, 3)
    with pytest.raises(CorruptBlobError):
        envelope.unseal(blob, key=KEY)
    size = struct.unpack_from("<I", blob, 12)[0]
    blob[40:56] = bytes(16)
    blob[40:56] = xxhash.xxh3_128_digest(blob[:size])
    with pytest.raises(UnreadableBlobError, match="version 3"):
        envelope.unseal(blob, key=KEY)


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"key":1}', b"nope"])
def test_a_description_in_other_words_is_somebody_elses_blob_and_no_damage(text: bytes) -> None:
    header = bytearray(4096)
    struct.pack_into("<8sHHIIIQ", header, 0, b"KVLOOM\r\n", 1, 0, 4096, len(text), 0, 0)
    header[112 : 112 + len(text)] = text
    header[40:56] = xxhash.xxh3_128_digest(header)
    with pytest.raises(UnreadableBlobError, match="description"):
        envelope.unseal(header, key=KEY)


def test_a_later_release_may_say_more_than_this_one_knows() -> None:
    header, payload = envelope.unseal(told(b',"zeal":11}', instead_of=b"}"), key=KEY)
    assert payload == b"x" and header.description == envelope.unseal(framed(b"x"), key=KEY)[0].description


def test_an_earlier_release_does_not_say_where_a_chunk_starts() -> None:
    header, payload = envelope.unseal(told(b"", instead_of=b',"start":null'), key=KEY)
    assert payload == b"x" and header.description.start is None


def told(words: bytes, *, instead_of: bytes) -> bytearray:
    """A blob whose description ends, or goes on, in other words."""
    blob = framed(b"x")
    (length,) = struct.unpack_from("<I", blob, 16)
    before, _, after = bytes(blob[112 : 112 + length]).rpartition(instead_of)
    text = before + words + after
    blob[112:4096] = (text + bytes(blob[112 + length : 4096]) + bytes(16))[: 4096 - 112]
    struct.pack_into("<I", blob, 16, len(text))
    blob[40:56] = bytes(16)
    blob[40:56] = xxhash.xxh3_128_digest(blob[:4096])
    return blob


@given(st.lists(st.integers(0, 20000), max_size=12))
def test_a_blob_that_arrives_in_pieces_is_verified_all_the_same(steps: list[int]) -> None:
    blob = framed(b"a" * 5000, b"", b"b" * 3000)
    verifier = envelope.Verifier(memoryview(blob), key=KEY)
    for step in sorted(min(step, len(blob)) for step in steps):
        verifier.filled(step)
    verifier.filled(len(blob))
    assert verifier.finish().lengths == (5000, 0, 3000)


def test_a_blob_that_stops_arriving_is_cut_short() -> None:
    blob = framed(b"a" * 5000, b"b" * 3000)
    verifier = envelope.Verifier(memoryview(blob), key=KEY)
    verifier.filled(len(blob) - 1)
    with pytest.raises(CorruptBlobError, match="cut short"):
        verifier.finish()


def test_the_payload_is_not_copied() -> None:
    payload = bytearray(100)
    parts = envelope.seal(describe(), [payload])
    payload[0] = 7
    assert memoryview(parts[1])[0] == 7
