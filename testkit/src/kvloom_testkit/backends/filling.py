"""Fill a store with many blobs. Imports no pytest: programs for fresh processes use it too."""

from __future__ import annotations

from collections.abc import Iterable

from kvloom import Buffers, StorageBackend


def put_all(backend: StorageBackend, items: Iterable[tuple[str, Buffers]]) -> None:
    """`put_many`; raises the first failure, once all are reported."""
    failures: list[Exception] = []

    def done(number: int, outcome: Exception | None) -> None:
        if outcome is not None:
            failures.append(outcome)

    backend.put_many(list(items), done)
    if failures:
        raise failures[0]
