"""Every key is a blob of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import count
from typing import Any

from kvloom_testkit.backends.base import BackendRequirements, Open, again, content
from kvloom_testkit.keys import Namespace

ODD_NAMES = (
    "a", "A", "b", "a/b", "a/B", "a/b/c", "a-b", "a_b", "a.b", "a--b", "a__b", "a.", ".a", "..a", "a..", "-", "_",
    "...", "-a", "a/.b", "a/-", "a.tmp", "a.json", "a.lock", "x" * 167, "x" * 166 + "y", "a/" + "z" * 165, "0", "00",
    "1e3",
)  # fmt: skip
"""After a fingerprint and a slash: the longest make keys of 200 characters."""
SAME_CHECKSUM = (
    ("a02552f76dbdf5fd", "670009b22c087272"),  # crc32
    ("1001", "0110"),  # adler32, and sums of all sorts
    ("Aa", "BB"),  # the polynomial with 31 that many languages take for the hash of a text
)
"""Pairs of ends of names: whatever stands before them, that checksum of the one whole name is that of the other."""


class NameRequirements(BackendRequirements):
    """Keys."""

    def test_B08_different_keys_are_different_blobs(self, names: Namespace, opened: Open) -> None:
        """Any two legal keys hold blobs of their own, however alike they look, and deleting one leaves the other.

        Why: a swapped blob fails its checks at best; two tenants' keys differ in their salt's tag alone.

        Usually: `/` becomes a character that keys may have, letter case is folded, long names are cut, only the last
        part of a key counts, or a checksum or the first eight digits of a digest stand for the key: of a million keys
        a hundred pairs have the same 32 bits.
        """
        backend = opened()
        keys = [names.named(name) for name in ODD_NAMES]
        keys += [names.key(number, tag=tag) for number in range(3) for tag in ("-", "0f" * 8, "0e" * 8)]
        keys += [f"{names.key(0)[:-1]}{digit}" for digit in "0123456789abcdef"]
        keys += [f"{names.key(0)[: -len(end)]}{end}" for pair in SAME_CHECKSUM for end in pair]
        keys += [key for digest in (hashlib.sha256, hashlib.md5) for key in _same_beginning(digest, names)]
        keys = sorted(set(keys), key=lambda key: hashlib.sha256(key.encode()).digest())
        names.used.update(keys)
        assert max(map(len, keys)) == 200
        for key in keys:
            backend.put(key, [_blob(key)])
        backend = again(backend, opened)
        assert {key: content(backend.get(key)) for key in keys} == {key: _blob(key) for key in keys}
        gone, kept = keys[::2], keys[1::2]
        for key in gone:
            backend.delete(key)
        assert [key for key in gone if backend.contains(key)] == []
        assert {key: content(backend.get(key)) for key in kept} == {key: _blob(key) for key in kept}


def _same_beginning(digest: Callable[[bytes], Any], names: Namespace) -> tuple[str, str]:
    """Two keys whose digests have the same first 32 bits: among some ten thousands there are two."""
    start, seen = digest(names.prefix.encode()), dict[bytes, int]()
    for number in count():
        one = start.copy()
        one.update(b"%d" % number)
        other = seen.setdefault(one.digest()[:4], number)
        if other != number:
            return f"{names.prefix}{other}", f"{names.prefix}{number}"
    raise AssertionError  # `count` has no end


def _blob(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest() * 4 + key.encode()
