"""Signed and encrypted blobs: who has no key can neither make one that is served, nor read what is encrypted."""

from __future__ import annotations

import base64
import contextlib
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from core_support import CHUNK, Shelf, kv_of, matches, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from layers_support import DEEP, MEMORY, SHELF
from layers_support import KV as DEEP_KV

from kvloom import ConfigError, CorruptBlobError, Engine, LaterVersionError, UnreadableBlobError, envelope
from kvloom.format.encryption import Protection

Open = Callable[..., Engine]
KEY = "f" * 32 + "/-/0-" + "a" * 64
ONE, TWO = bytes(range(32)), bytes(range(32, 64))
SIGN, ENCRYPT = Protection("sign", [ONE]), Protection("encrypt", [ONE])
BOTH = pytest.mark.parametrize("protection", [SIGN, ENCRYPT], ids=["sign", "encrypt"])
TOKENS, KV = tokens_of(16), kv_of(16)


def describe(key: str = KEY) -> envelope.Description:
    return envelope.Description(key, "raw", (2, 1, 4, 8), "bfloat16", "kv_blob", 4, "exact")


def framed(protection: Protection | None, *buffers: bytes, key: str = KEY) -> bytearray:
    return bytearray(b"".join(envelope.seal(describe(key), buffers, protection)))


def opened(blob: bytearray, protection: Protection | None, key: str = KEY) -> list[bytes]:
    header, payload = envelope.unseal(bytearray(blob), key=key, protection=protection)
    return [bytes(part) for part in envelope.split(header, payload)]


def summed(blob: bytearray) -> bytearray:
    """With a right checksum of the header: what somebody who knows the format would do."""
    (length,) = struct.unpack_from("<I", blob, 12)
    blob[40:56] = bytes(16)
    blob[40:56] = xxhash.xxh3_128_digest(bytes(blob[:length]))
    return blob


# -- the envelope ------------------------------------------------------------------------------------------------------


@BOTH
@given(st.lists(st.binary(max_size=5000), max_size=5), st.lists(st.integers(0, 40_000), max_size=6))
def test_what_was_sealed_comes_back_however_it_arrives(
    protection: Protection, buffers: list[bytes], steps: list[int]
) -> None:
    blob = framed(protection, *buffers)
    assert opened(blob, protection) == buffers
    verifier = envelope.Verifier(memoryview(blob), key=KEY, protection=protection)
    for step in sorted(step for step in steps if step < len(blob)):
        verifier.filled(step)
    verifier.filled(len(blob))
    header = verifier.finish()
    assert [bytes(part) for part in envelope.split(header, memoryview(blob)[header.header_bytes :])] == buffers
    assert header.description == describe()


def test_only_what_is_encrypted_is_hidden_and_no_two_blobs_are_alike() -> None:
    secret = os.urandom(4096)
    assert secret[:16] in framed(SIGN, secret)
    blobs = [framed(ENCRYPT, secret, secret) for _ in range(2)]
    pieces = [bytes(blob[at : at + 16]) for blob in blobs for at in range(4096, len(blob), 16)]
    assert len(set(pieces)) == len(pieces) and not any(secret[:16] in blob for blob in blobs)


def test_verifying_alone_leaves_the_blob_as_it_is() -> None:
    blob = framed(ENCRYPT, b"a" * 5000)
    envelope.unseal(bytes(blob), key=KEY, protection=ENCRYPT, decrypt=False)
    before = bytes(blob)
    envelope.unseal(blob, key=KEY, protection=ENCRYPT, decrypt=False)
    assert blob == before


@BOTH
@given(st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=4), st.data())
@settings(max_examples=200)
def test_every_flipped_bit_is_noticed_even_with_right_checksums(
    protection: Protection, buffers: list[bytes], data: st.DataObject
) -> None:
    blob = framed(protection, *buffers)
    at = data.draw(st.integers(0, len(blob) - 1) | st.integers(16, 300))
    blob[at] ^= 1 << data.draw(st.integers(0, 7))
    before = bytes(blob)
    if 40 <= at < 56:
        return
    try:
        summed(blob)
    except (struct.error, ValueError):
        blob = bytearray(before)
    with pytest.raises((CorruptBlobError, UnreadableBlobError)):
        opened(blob, protection)


@BOTH
def test_what_others_can_put_together_is_refused(protection: Protection) -> None:
    a, b = os.urandom(3000), os.urandom(3000)
    blob, other = framed(protection, a, b), framed(protection, b, a)
    start = len(blob) - 6000
    swapped = bytearray(blob)
    swapped[start : start + 3000], swapped[start + 3000 :] = blob[start + 3000 :], blob[start : start + 3000]
    with pytest.raises(CorruptBlobError):
        opened(swapped, protection)
    rows = slice(blob.index(struct.pack("<Q", 3000)), blob.index(struct.pack("<Q", 3000)) + 48)
    turned = bytearray(swapped)
    turned[rows] = blob[rows][24:] + blob[rows][:24]
    with pytest.raises(CorruptBlobError, match="not signed with the tier's key"):
        opened(summed(turned), protection)
    with pytest.raises(CorruptBlobError):
        opened(blob[:start] + other[start:], protection)
    with pytest.raises(CorruptBlobError, match="another key"):
        opened(framed(protection, a, key="e" + KEY[1:]), protection)


@BOTH
def test_who_reads_what(protection: Protection) -> None:
    blob = framed(protection, b"kv" * 100)
    with pytest.raises(UnreadableBlobError, match="give it `protect`"):
        opened(blob, None)
    with pytest.raises(UnreadableBlobError, match="another key"):
        opened(blob, Protection("sign", [TWO]))
    with pytest.raises(UnreadableBlobError, match="accepts only signed blobs"):
        opened(framed(None, b"kv" * 100), protection)
    for rotated in (Protection("sign", [TWO, ONE]), Protection("encrypt", [TWO, ONE])):
        assert opened(blob, rotated) == [b"kv" * 100]


def test_flags_taken_away_or_added_are_refused() -> None:
    for protection, flags in ((SIGN, 0), (SIGN, 3), (ENCRYPT, 1), (ENCRYPT, 0), (ENCRYPT, 2)):
        blob = framed(protection, b"kv" * 100)
        struct.pack_into("<H", blob, 10, flags)
        with pytest.raises((CorruptBlobError, UnreadableBlobError)):
            opened(summed(blob), protection)


# -- a tier ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., str]:
    def write(*some: bytes) -> str:
        file = tmp_path / f"keys{len(list(tmp_path.iterdir()))}"
        file.write_text("# ours\n" + "\n".join(base64.b64encode(key).decode() for key in some) + "\n")
        file.chmod(0o600)
        return str(file)

    return write


def count(engine: Engine, name: str) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == name)


def retrieved(engine: Engine) -> int:
    """Tokens; what came is right."""
    got = torch.zeros_like(KV)
    mask = engine.retrieve(TOKENS, kv=got)
    assert matches(got, KV, mask)
    return int(mask.sum())


@pytest.mark.parametrize("mode", ["sign", "encrypt"])
@pytest.mark.parametrize("serializer", ["raw", "padded", "streams"])
def test_a_protected_tier_serves_its_own_and_nobody_elses(
    open_engine: Open, keys: Callable[..., str], mode: str, serializer: str
) -> None:
    ours = SHELF | {"protect": {"mode": mode, "keys": keys(ONE)}, "serializer": serializer}
    with open_engine(ours) as engine:
        engine.store(TOKENS, kv=KV)
    shelf = Shelf.shelves["default"]
    assert retrieved(open_engine(ours)) == 16
    names = [name for name in shelf._blobs if not name.startswith("spec")]
    assert all(shelf._blobs[name][8] == 2 for name in names)

    engine = open_engine(SHELF | {"serializer": serializer})
    assert retrieved(engine) == 0 and count(engine, "missed") and len(shelf._blobs) == 5, "a plain miss, left alone"

    # Somebody who can write to the store, and knows the format, puts KV of their own in the place of ours.
    for name in names:
        blob = bytearray(shelf._blobs[name])
        header, payload = envelope.unseal(blob, key=name, protection=Protection("sign", [ONE]))
        poison = [bytes(len(part)) for part in envelope.split(header, payload)]
        shelf._blobs[name] = b"".join(envelope.seal(header.description, poison))
    engine = open_engine(ours)
    assert retrieved(engine) == 0 and count(engine, "missed") and not count(engine, "corrupt")
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    assert retrieved(open_engine(ours)) == 16, "what was refused was written again"


@pytest.mark.parametrize("mode", ["sign", "encrypt"])
def test_keys_are_rotated_without_a_miss(open_engine: Open, keys: Callable[..., str], mode: str) -> None:
    with open_engine(SHELF | {"protect": {"mode": mode, "keys": keys(ONE)}}) as engine:
        engine.store(TOKENS[:8], kv=KV[:, :, :8])
    rotated = SHELF | {"protect": {"mode": mode, "keys": keys(TWO, ONE)}}
    with open_engine(rotated) as engine:
        assert retrieved(engine) == 8
        engine.store(TOKENS, kv=KV)
    assert retrieved(open_engine(rotated)) == 16
    engine = open_engine(SHELF | {"protect": {"mode": mode, "keys": keys(TWO)}})
    assert engine.retrieve(TOKENS, torch.arange(16) >= 8, kv=torch.zeros_like(KV)).sum() == 8
    assert retrieved(engine) == 0, "what only the old key can open is a miss"


@pytest.mark.parametrize("mode", ["sign", "encrypt"])
@pytest.mark.parametrize("serializer", ["raw", "streams"])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.usefixtures("ranges")
def test_layer_by_layer(open_engine: Open, keys: Callable[..., str], mode: str, serializer: str, damaged: bool) -> None:
    ours = SHELF | {"protect": {"mode": mode, "keys": keys(ONE)}, "serializer": serializer}
    with open_engine(ours, spec=DEEP) as engine:
        engine.store(TOKENS, kv=DEEP_KV)
    shelf = Shelf.shelves["default"]
    if damaged:
        name = next(name for name in shelf._blobs if "/1-" in name)
        blob = bytearray(shelf._blobs[name])
        blob[-5] ^= 1
        shelf._blobs[name] = bytes(blob)
    engine = open_engine(MEMORY, ours, spec=DEEP)
    got = torch.zeros_like(DEEP_KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        masks = [loading.wait(layer) for layer in range(DEEP.num_layers)]
    assert int(masks[-1].sum()) == (CHUNK if damaged else 16)
    for layer, mask in enumerate(masks):
        assert torch.equal(got[:, layer, mask], DEEP_KV[:, layer, mask])


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no key found"),
        ("# nothing\n", "no key found"),
        ("not base64!\n", "line 1: not 32 bytes in base64"),
        (base64.b64encode(ONE[:16]).decode(), "line 1: not 32 bytes"),
        ("# old\n" + base64.b64encode(ONE).decode() + "\nSECRETSECRET\n", "line 3: not 32 bytes"),
        (None, "cannot read"),
    ],
)
@pytest.mark.parametrize("way", ["file", "env"])
def test_bad_keys_are_told_at_the_start_and_never_quoted(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, said: str, way: str
) -> None:
    source = str(tmp_path / "keys") if way == "file" else "env:KEYS_OF_A_TEST"
    if content is not None:
        (tmp_path / "keys").write_text(content)
        monkeypatch.setenv("KEYS_OF_A_TEST", content)
    elif way == "env":
        said = "KEYS_OF_A_TEST is not set"
    with pytest.raises(ConfigError, match=said) as caught:
        open_engine(SHELF | {"protect": {"keys": source}})
    assert caught.value.path == "tiers.0.protect.keys" and "SECRET" not in str(caught.value)


def test_keys_in_a_fifo_keep_nobody_waiting(open_engine: Open, tmp_path: Path) -> None:
    fifo = tmp_path / "keys"
    os.mkfifo(fifo)

    def write() -> None:
        with contextlib.suppress(OSError):
            fifo.write_bytes(base64.b64encode(ONE))  # else an engine that waits for it would hang this test

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(ConfigError, match="not a regular file"):
        open_engine(SHELF | {"protect": {"keys": str(fifo)}})
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer.join(20)
    os.close(reader)


@pytest.mark.parametrize(
    ("protect", "path"),
    [
        ({"keys": ""}, "keys"),
        ({"keys": "a\0b"}, "keys"),
        ({}, "keys"),
        ({"mode": "hide", "keys": "x"}, "mode"),
        ({"keys": "x", "key": 1}, "key"),
    ],
)
def test_bad_settings(open_engine: Open, protect: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine(SHELF | {"protect": protect})
    assert f"tiers.0.protect.{path}" in str(caught.value)


def test_no_key_in_a_repr() -> None:
    blob_key = ENCRYPT.begin()
    for text in (
        repr(ENCRYPT),
        repr(blob_key),
        repr(envelope.parse(memoryview(framed(SIGN)), key=KEY, protection=SIGN)),
    ):
        assert ONE.hex() not in text and repr(ONE)[2:20] not in text and base64.b64encode(ONE).decode() not in text


@pytest.mark.parametrize(("version", "flags"), [(1, 0), (3, 0), (1, 4), (3, 1), (2, 0x101), (65535, 65535)])
def test_what_nobody_signed_has_no_say(open_engine: Open, keys: Callable[..., str], version: int, flags: int) -> None:
    """An unsigned blob with an unknown version or flags is overwritten like any other."""
    ours = SHELF | {"protect": {"mode": "sign", "keys": keys(ONE)}}
    with open_engine(ours) as engine:
        engine.store(TOKENS, kv=KV)
    blobs = Shelf.shelves["default"]._blobs
    for name in [name for name in blobs if not name.startswith("spec")]:
        forged = bytearray(b"".join(envelope.seal(envelope.Description("", "", (), "", "", 0, ""), [])))
        struct.pack_into("<HH", forged, 8, version, flags)
        forged[40:56] = bytes(16)
        forged[40:56] = xxhash.xxh3_128_digest(forged)
        blobs[name] = bytes(forged)
    engine = open_engine(ours)
    assert retrieved(engine) == 0 and not count(engine, "corrupt") and not count(engine, "tier_error")
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20) and retrieved(open_engine(ours)) == 16


def test_a_later_version_that_was_signed_with_our_key_is_left_alone() -> None:
    about = envelope.Description("k", "raw", (1,), "uint8", "kv_blob", 1, "exact")
    protection = Protection("sign", [ONE])
    blob = bytearray(b"".join(envelope.seal(about, [b"x"], protection)))
    struct.pack_into("<H", blob, 8, 3)
    blob[40:56] = blob[96:112] = bytes(16)
    *_, key_id, nonce, _ = envelope._FIXED.unpack_from(blob)
    blob[96:112] = protection.open(1, key_id, nonce).header_tag(bytes(blob[:4096]))
    blob[40:56] = xxhash.xxh3_128_digest(blob[:4096])
    with pytest.raises(LaterVersionError):
        envelope.unseal(blob, key="k", protection=protection)
