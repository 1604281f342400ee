"""What a storage backend must do. See `BackendConformance`."""

from __future__ import annotations

from kvloom import StorageBackend
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.requirements import needs

SIZES = (1, 4095, 4096, 4097, 1 << 20)
"""Bytes of blobs: around a page, and more than one call of an operating system may move."""


class BackendConformance(Conformance):
    """Requirements of a `StorageBackend`.

    `make` is a function that opens a new instance on the same store, each time it is called in one test. The store
    need not be empty: the tests keep to keys of their own, and delete them.
    """

    kind = "backend"
    contract = StorageBackend

    def test_B01_gives_back_what_was_put(self, opened) -> None:
        """`get` returns the bytes that `put` was given, however many, in one buffer or several.

        Why: everything else rests on it.

        Usually: only the first buffer is written, or a short write or read is taken for all of it.
        """
        backend, names = opened(), Namespace()
        for number, size in enumerate(SIZES):
            blob = blob_of(size)
            for parts in ([blob], [blob[: size // 3], blob[size // 3 : size // 2], memoryview(blob)[size // 2 :]]):
                backend.put(names.key(number), parts)
                assert bytes(backend.get(names.key(number))) == blob, f"of {size} bytes in {len(parts)} buffers"

    def test_B02_what_is_not_there_is_none(self, opened) -> None:
        """`get` of a key that was never put, or was deleted, is None.

        Why: a miss is the most frequent answer there is, and an exception would count as a failure of the tier.

        Usually: the client's "not found" exception is not caught, or something empty is returned.
        """
        backend, names = opened(), Namespace()
        assert backend.get(names.key()) is None
        backend.put(names.key(), [b"blob"])
        backend.delete(names.key())
        assert backend.get(names.key()) is None

    @needs("persistent")
    def test_B21_what_was_put_survives_reopening(self, opened) -> None:
        """After `close`, a new instance on the same store finds what was put, and not what was deleted.

        Why: `persistent` is claimed, so that a restart counts on it.

        Usually: something is written at exit, or kept in a table that is not saved.
        """
        backend, names, blob = opened(), Namespace(), blob_of(10_000)
        backend.put(names.key(1), [blob])
        backend.put(names.key(2), [blob])
        backend.delete(names.key(2))
        backend.close()
        again = opened()
        assert bytes(again.get(names.key(1))) == blob and again.get(names.key(2)) is None
