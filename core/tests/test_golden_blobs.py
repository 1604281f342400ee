"""Blobs as the first release writes them are read, by native code too, and no byte of them may be another."""

from __future__ import annotations

import base64
import ctypes
import random
import shutil
import zlib
from typing import Any

import pytest

from kvloom.errors import CorruptBlobError, LaterVersionError, UnreadableBlobError
from kvloom.format import envelope, native_verifier
from kvloom.format.encryption import Protection

DESCRIPTION = envelope.Description(
    key=f"0123456789abcdef0123456789abcdef/-/7-{'3f' * 32}",
    serializer="raw",
    shape=(2, 4, 16, 8),
    dtype="bfloat16",
    format="kv_blob",
    num_tokens=16,
    fidelity="exact",
    params={"note": ["\u00e9", 1, None]},
    written=1764000000,
    start=112,
)
BUFFERS = [bytes(range(256)), b"", b"end"]
BLOBS = {  # deflated, in base64
    "plain": (
        "eNrzDvPx9/fl5WJkAAIBBgZlIIMZyGQGCyBA34RfHKkLFG//WHtN48CFomIGMkG1UkpJZUGqkpVSUlpOfmKJoZmSjlJaZkpqTmZJJVA0"
        "tSIxuQQklF+Um1gCFMgui0/KyU8CCmWnghQYGBoZm5iamVtYJiYlp6SmofP1dfXNdY3TKINA2/JKc+NL8rNT84qVrAzNdJQKEosSc4Hs"
        "aqW8/BKg+6OVYkoNDFItlXQMdfJKc3Jia3WUilOLMhNzMqtSi4AOLUosBxpTnJEI8m20kY6JDtAYi1igUEliEdBnhoZGOkrlRZklJal5"
        "QJ65mYkBGNQyQIP+44+V9gEtsw5P4VjibD1VtxAWhDNXsV1mdJ9xI4HxsIpbr2c9M1Rc1Mdid8ehexO/5fYcvVT6RYxhFIyCUTAKRsEo"
        "GAWjYBSMglEwCkbBKIADRiZmFlY2dg5OLm4eXj5+AUEhYRFRMXEJSSlpGVk5eQVFJWUVVTV1DU0tbR1dPX1Ed9vK2sbWzt7B0cnZxdXN"
        "3cPTy9vH188/IDAoOCQ0LDwiMio6JjYuPgHSK0/PyMzKzsnNyy8oLCouKS0rr6isqq6pratvaGxqbmlta+/o7Oru6e3rnzBx0uQpU6dN"
        "nzFz1uw5c+fNX7Bw0eIlS5ctX7Fy1eo1a9et37Bx0+YtW7dt37Fz1+49e/ftP3Dw0OEjR48dP3Hy1OkzZ8+dv3Dx0uUrV69dv3Hz1u07"
        "d+/df/Dw0eMnT589f/Hy1es3b9+9//Dx0+cvX799//Hz1+8/f//9T81LAQClu/uY"
    ),
    "sign": (
        "eNrzDvPx9/fl5WJiYGRgEGBgUAZSzAxADKSRgZbV0xT/14LfJ9mvsvZnK1Hp222THvyoIO2oYvSkSDP3yV8uyIenfpFSfvy4eM0Uk6Tn"
        "J4PdpCbzftLcKSPPFxrBWCLh/H6Z6/RmvmqllJLKglQlK6WktJz8xBJDMyUdpbTMlNSczJJKoGhqRWJyCUgovyg3sQQokF0Wn5STnwQU"
        "yk4FKTAwNDI2MTUzt7BMTEpOSU1D5+vr6pvrGqdRBoG25ZXmxpfkZ6fmFStZGZrpKBUkFiXmAtnVSnn5JUD3RyvFlBoYpFoq6Rjq5JXm"
        "5MTW6igVpxZlJuZkVqUWAR1alFgONKY4IxHk22gjHRMdoDEWsUChksQioM8MDY10lMqLMktKUvOAPHMzEwMwqGWABv3Wi5NVMxfZn1Ms"
        "mNGXHtiTA4uKc7urlr3Qt1n1xFA8ZRvz1mfMUHGNvMk1cqJ8WXX7NJhO3fpcyTAKRsEoGAWjYBSMglEwCkbBKBgFo2AUwAEjEzMLKxs7"
        "BycXNw8vH7+AoJCwiKiYuISklLSMrJy8gqKSsoqqmrqGppa2jq6ePqK7bWVtY2tn7+Do5Ozi6ubu4enl7ePr5x8QGBQcEhoWHhEZFR0T"
        "GxefAOmVp2dkZmXn5OblFxQWFZeUlpVXVFZV19TW1Tc0NjW3tLa1d3R2dff09vVPmDhp8pSp06bPmDlr9py58+YvWLho8ZKly5avWLlq"
        "9Zq169Zv2Lhp85at27bv2Llr9569+/YfOHjo8JGjx46fOHnq9Jmz585fuHjp8pWr167fuHnr9p279+4/ePjo8ZOnz56/ePnq9Zu3795/"
        "+Pjp85ev377/+Pnr95+///6n5qUAACJXEQQ="
    ),
    "encrypt": (
        "eNrzDvPx9/fl5WJiYGZgEGBgUGZkALEYmIE0MuhorSmW9dvwyDSxqv2L+CHHvt026cGPCtKOKkZPijRzn/z8RNTOb9ozP35MN9j0PWzF"
        "wYlbbjl6ST3k+dXFtWteY82h4oK/rAE/dQSqlVJKKgtSlayUktJy8hNLDM2UdJTSMlNSczJLKoGiqRWJySUgofyi3MQSoEB2WXxSTn4S"
        "UCg7FaTAwNDI2MTUzNzCMjEpOSU1DZ2vr6tvrmucRhkE2pZXmhtfkp+dmlesZGVopqNUkFiUmAtkVyvl5ZcA3R+tFFNqYJBqqaRjqJNX"
        "mpMTW6ujVJxalJmYk1mVWgR0aFFiOdCY4oxEkG+jjXRMdIDGWMQChUoSi4A+MzQ00lEqL8osKUnNA/LMzUwMwKCWARr0lqfXPlr/btHh"
        "1Q5aUumfgrxgUcFt0V3q4RfkrLIw455D0BMPZqi42pzbXKLcjBWHPT5rs4btlGIYBaNgFIyCUTAKRsEoGAWjYBSMglEwCmDg1vWkhZ9W"
        "HbxWrp3ePOvN575jW/WMuKvXn7fZ8nKn9Dqf7d0+uzJslganKcZ1fH67/f3j5yf0N4o/+c0wuf3gzkl/8oNnT3j93Hd2cfiRY7Kn2gtO"
        "aAR/692uG9rxrUtffl/gBpW5PEr3+5UlnI8tVd8VZxT9ZbXezIOlJfLZfku17PSP3v2sXGRpFn5q5ekFc4vm1eVMVGI0VAioX+VW31I1"
        "tSlYJfn4y9+5C6db/pd8I7B1/t+q0ohnq8InP/Lpnm1//FvLD6tZaUZhF3RmPivrWbdzt6N7elOGTpC/4PxlnUX6c+PDPj3xePepR7si"
        "IODH3K/ztFYbxkxfkfQttyH5uCMv6yo1i3teGc+OP+HlAQBpfxl9"
    ),
}
GOLDEN = {name: zlib.decompress(base64.b64decode(text)) for name, text in BLOBS.items()}
PROTECTION: dict[str, Any] = {
    "plain": None,
    **{mode: Protection(mode, [bytes(range(32))]) for mode in ("sign", "encrypt")},
}
REFUSED = (CorruptBlobError, UnreadableBlobError, LaterVersionError)


def read(blob: bytes, name: str) -> tuple[envelope.Header, list[bytes]]:
    header, payload = envelope.unseal(bytearray(blob), key=DESCRIPTION.key, protection=PROTECTION[name])
    return header, [bytes(part) for part in envelope.split(header, payload)]


def right_for_native_code(blob: bytes) -> bool:
    library = native_verifier.library()
    if library is None and shutil.which("c++") is None:
        pytest.skip("kvloom-native has no library: there is no C++ compiler that could have built it")
    assert library is not None
    verifier = native_verifier.NativeVerifier(library, memoryview(blob), envelope.MAX_BUFFERS)
    function, state = verifier.filled
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(function)(state, len(blob))
    return verifier.right


def damaged(blob: bytes) -> list[bytes]:
    """Copies with one byte changed, for each byte, and copies cut short at each byte."""
    rng = random.Random(0)
    copies = []
    for at in range(len(blob)):
        copy = bytearray(blob)
        copy[at] ^= rng.randrange(1, 256)
        copies.append(bytes(copy))
    return [*copies, *(blob[:at] for at in range(len(blob))), blob + b"\0"]


@pytest.mark.parametrize("name", BLOBS)
def test_they_are_read(name: str) -> None:
    header, buffers = read(GOLDEN[name], name)
    assert (header.description, buffers) == (DESCRIPTION, BUFFERS)


def test_they_are_written_so() -> None:
    assert b"".join(map(bytes, envelope.seal(DESCRIPTION, BUFFERS))) == GOLDEN["plain"]


def test_native_code_reads_what_is_not_signed() -> None:
    assert [right_for_native_code(blob) for blob in GOLDEN.values()] == [True, False, False]


@pytest.mark.parametrize("name", BLOBS)
def test_a_blob_with_another_byte_or_length_is_refused(name: str) -> None:
    for blob in damaged(GOLDEN[name]):
        with pytest.raises(REFUSED):
            read(blob, name)


@pytest.mark.parametrize("name", BLOBS)
def test_native_code_refuses_it_too(name: str) -> None:
    assert not any(map(right_for_native_code, damaged(GOLDEN[name])))
