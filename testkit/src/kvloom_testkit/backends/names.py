"""Every key is a blob of its own."""

from __future__ import annotations

import hashlib

from kvloom_testkit.backends.base import BackendRequirements, Open, again, content
from kvloom_testkit.keys import Namespace

ODD_NAMES = (
    "a", "A", "b", "a/b", "a/B", "a/b/c", "a-b", "a_b", "a.b", "a--b", "a__b", "a.", ".a", "..a", "a..", "-", "_",
    "...", "-a", "a/.b", "a/-", "a.tmp", "a.json", "a.lock", "x" * 167, "x" * 166 + "y", "a/" + "z" * 165, "0", "00",
    "1e3",
)  # fmt: skip
"""After a fingerprint and a slash: the longest make keys of 200 characters."""


class NameRequirements(BackendRequirements):
    """Keys."""

    def test_B08_different_keys_are_different_blobs(self, names: Namespace, opened: Open) -> None:
        """Any two legal keys hold blobs of their own, however alike they look, and deleting one leaves the other.

        Why: a swapped blob fails its checks at best; two tenants' keys differ in their salt's tag alone.

        Usually: `/` becomes a character that keys may have, letter case is folded, long names are cut or hashed to
        too few bits, or only the last part of a key counts.
        """
        backend = opened()
        keys = [names.named(name) for name in ODD_NAMES]
        keys += [names.key(number, tag=tag) for number in range(3) for tag in ("-", "0f" * 8, "0e" * 8)]
        keys += [f"{names.key(0)[:-1]}{digit}" for digit in "0123456789abcdef"]
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


def _blob(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest() * 4 + key.encode()
