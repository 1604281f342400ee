"""The native verifier and the Python one agree about every unsigned blob."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.errors import CorruptBlobError, UnreadableBlobError
from kvloom.format import envelope, native_verifier
from kvloom.format.native_verifier import NativeVerifier

KEY = "f/-/0-00"

library = native_verifier.library()
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler has built the library")


def sealed(lengths: list[int], seed: int = 0) -> bytearray:
    about = envelope.Description(KEY, "raw", (1,), "uint8", "kv_blob", 1, "exact")
    buffers = [bytes((seed + at * 7 + number) % 251 for at in range(length)) for number, length in enumerate(lengths)]
    return bytearray(b"".join(bytes(part) for part in envelope.seal(about, buffers)))


def natively(blob: bytearray, steps: list[int], max_buffers: int = envelope.MAX_BUFFERS) -> bool:
    """Return whether native code finds the blob right, when it arrives in these steps."""
    assert library is not None
    before = bytes(blob)
    verifier = NativeVerifier(library, memoryview(blob), max_buffers)
    function, state = verifier.filled
    filled = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(function)
    for step in [*sorted(step for step in steps if step < len(blob)), len(blob)]:
        said = filled(state, step)
        assert said == 0 or not verifier.right
    assert bytes(blob) == before, "it changes nothing"
    return verifier.right


def in_python(blob: bytearray, max_buffers: int = envelope.MAX_BUFFERS) -> bool:
    """Return whether the Python verifier finds header and payload right."""
    verifier = envelope.Verifier(memoryview(blob), key=KEY, max_buffers=max_buffers)
    try:
        verifier.filled(len(blob))
        verifier.finish()
    except (CorruptBlobError, UnreadableBlobError):
        return False
    return True


lengths = st.lists(
    st.one_of(st.integers(0, 600), st.sampled_from([0, 1, 64, 240, 241, 1024, 5000, 70_000])), max_size=6
)


@given(lengths=lengths, steps=st.lists(st.integers(0, 90_000), max_size=6), seed=st.integers(0, 250))
@settings(deadline=None)
def test_what_was_sealed_is_right_in_whatever_steps_it_arrives(lengths: list[int], steps: list[int], seed: int) -> None:
    blob = sealed(lengths, seed)
    assert in_python(blob)
    assert natively(blob, steps)


def again_with_checksum(blob: bytearray) -> bytearray:
    """The blob with a header checksum that fits, as somebody may have who writes to the store."""
    if len(blob) >= 56:
        size = min(max(56, struct.unpack_from("<I", blob, 12)[0]), len(blob))
        blob[40:56] = bytes(16)
        blob[40:56] = xxhash.xxh3_128_digest(blob[:size])
    return blob


def flipped(blob: bytearray, at: int, value: int) -> bytearray:
    blob[at % len(blob)] ^= value or 1
    return blob


def overwritten(blob: bytearray, at: int, value: int) -> bytearray:
    """A number of the header becomes another."""
    offset, form = [(8, "<H"), (10, "<H"), (12, "<I"), (16, "<I"), (20, "<I"), (24, "<Q")][at % 6]
    struct.pack_into(form, blob, offset, value * (1 << at % 40) % (1 << 8 * struct.calcsize(form)))
    return blob


def other_length(blob: bytearray, at: int, value: int) -> bytearray:
    """A buffer has another length in the table."""
    (text_bytes,) = struct.unpack_from("<I", blob, 16)
    struct.pack_into("<Q", blob, 112 + text_bytes + 24 * (at % 4), (value << (at % 60)) % (1 << 64))
    return blob


def longer_header(blob: bytearray, at: int, value: int) -> bytearray:
    """The header has more pages of zeros than it needs, and says so."""
    (size,) = struct.unpack_from("<I", blob, 12)
    more = 4096 * (value % 40)
    struct.pack_into("<I", blob, 12, size + more)
    return blob[:size] + bytes(more) + blob[size:]


DAMAGE: dict[str, Callable[[bytearray, int, int], bytearray]] = {
    "flipped": flipped,
    "overwritten": overwritten,
    "other length": other_length,
    "longer header": longer_header,
    "cut": lambda blob, at, value: blob[: at % len(blob)],
    "longer": lambda blob, at, value: blob + bytes([value]) * (at % 5000 + 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("fitting", [False, True], ids=["as it is", "with a checksum that fits"])
@given(
    lengths=lengths, at=st.integers(0, 1 << 17), value=st.integers(0, 255),
    steps=st.lists(st.integers(0, 90_000), max_size=4), max_buffers=st.sampled_from([2, envelope.MAX_BUFFERS]),
)  # fmt: skip
@settings(deadline=None, max_examples=30)
def test_a_damaged_blob_is_right_for_both_or_for_neither(
    kind: str, fitting: bool, lengths: list[int], at: int, value: int, steps: list[int], max_buffers: int
) -> None:
    blob = DAMAGE[kind](sealed(lengths), at, value)
    if fitting:
        blob = again_with_checksum(blob)
    right = natively(blob, steps, max_buffers)
    whole, other = sealed(lengths, 1), bytearray(5)
    assert native_verifier.right([*map(memoryview, (whole, blob, other, blob))], max_buffers) == [
        natively(whole, [], max_buffers), right, False, right,
    ]  # fmt: skip
    assert right is all_but_the_description_is_right(blob, max_buffers)
    if not right:
        # Of other versions Python alone decides.
        assert not in_python(blob, max_buffers) or blob[8:10] != struct.pack("<H", envelope.PLAIN_VERSION)
    elif not in_python(blob, max_buffers):
        with pytest.raises((CorruptBlobError, UnreadableBlobError), match=r"description|of another key"):
            envelope.parse(memoryview(blob), key=KEY)


@pytest.mark.parametrize("length", [1 << 20, (1 << 64) - 4096, (1 << 64) - 1])
def test_shared_memory_that_changes_behind_its_header_is_not_right(length: int) -> None:
    """Lengths that were right when the header was verified do not lead out of the blob later."""
    assert library is not None
    blob = sealed([5000, 5000])
    verifier = NativeVerifier(library, memoryview(blob), envelope.MAX_BUFFERS)
    function, state = verifier.filled
    filled = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(function)
    header, text = struct.unpack_from("<II", blob, 12)
    assert filled(state, header + 10) == 0
    struct.pack_into("<Q", blob, 112 + text + 24, length)
    assert filled(state, len(blob)) == 1 and not verifier.right


def all_but_the_description_is_right(blob: bytearray, max_buffers: int) -> bool:
    if len(blob) < 112:
        return False
    magic, version, flags, size, text_bytes, rows, payload_bytes = struct.unpack_from("<8sHHIIIQ", blob)
    if (magic, version, flags) != (envelope.MAGIC, envelope.PLAIN_VERSION, 0):
        return False
    table_at = 112 + text_bytes
    if size % 4096 or not table_at + 24 * rows <= size <= envelope.longest_header(max_buffers):
        return False
    if rows > max_buffers or text_bytes > envelope.MAX_DESCRIPTION_BYTES:
        return False
    if size + payload_bytes != len(blob):
        return False
    if xxhash.xxh3_128_digest(bytes(blob[:40]) + bytes(16) + bytes(blob[56:size])) != blob[40:56]:
        return False
    at = size
    for row in range(rows):
        length, digest = struct.unpack_from("<Q16s", blob, table_at + 24 * row)
        if xxhash.xxh3_128_digest(bytes(blob[at : at + length])) != digest:
            return False
        at += length
    return at == len(blob)


def test_python_decides_about_what_is_signed_or_later() -> None:
    for offset, value in ((8, 2), (10, 1)):
        blob = sealed([100])
        struct.pack_into("<H", blob, offset, value)
        assert not natively(again_with_checksum(blob), [])


@pytest.mark.parametrize("native", [True, False])
def test_the_verifier_of_the_core_takes_what_native_code_found(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(native_verifier, "library", lambda: None)
    blob = sealed([70_000, 0, 5])
    hashed: list[int] = []
    monkeypatch.setattr(envelope._Checksum, "update", lambda self, part: hashed.append(len(part)))
    monkeypatch.setattr(envelope._Checksum, "right", lambda self, digest: True)
    verifier = envelope.Verifier(memoryview(blob), key=KEY)
    told = verifier.native_filled()
    assert (told is not None) is native
    if told is not None:
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(told[0])(told[1], len(blob))
    verifier.filled(len(blob))
    assert verifier.finish().lengths == (70_000, 0, 5)
    assert sum(hashed) == (0 if native else 70_005), "each byte is hashed once"


def test_what_native_code_did_not_find_right_is_looked_at_in_python() -> None:
    blob = sealed([5000])
    blob[-1] ^= 1
    verifier = envelope.Verifier(memoryview(blob), key=KEY)
    told = verifier.native_filled()
    assert told is not None
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(told[0])(told[1], len(blob)) != 0
    with pytest.raises(CorruptBlobError, match="payload checksum, buffer 0"):
        verifier.filled(len(blob))


def test_memory_that_can_only_be_read_is_verified(tmp_path: Path) -> None:
    blob = sealed([5000])
    (tmp_path / "blob").write_bytes(blob)
    with (tmp_path / "blob").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        verifier = envelope.Verifier(memoryview(mapped), key=KEY)
        told = verifier.native_filled()
        assert told is not None
        assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(told[0])(told[1], len(blob)) == 0
        del verifier


def test_it_says_nothing_of_bytes_that_have_not_arrived() -> None:
    blob = sealed([5000])
    assert library is not None
    verifier = NativeVerifier(library, memoryview(blob), 8)
    filled = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(verifier.filled[0])
    assert filled(verifier.filled[1], len(blob) - 1) == 0 and not verifier.right
    assert filled(verifier.filled[1], len(blob) + 1) != 0 and not verifier.right, "and not more than all of them"
