"""Deletes blobs for an operator: by their keys, or all below a prefix, with those put into quarantine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, IncompleteListingError
from kvloom.telemetry.events import EventBus
from kvloom.tiers.index.ledger import Ledger
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.stored.maintenance import Maintenance
from kvloom.types import ChunkKey

_QUARANTINE = "quarantine/"
"""Prefix under which `kvloom scrub` puts corrupt blobs."""
_MOST_SECONDS = 60.0
"""Longest time of an order, in seconds, if the deadline is shorter: it may delete many blobs."""


class Removal:
    """Deletes blobs of one store, which are gone on return, and from its index. Raises BackendError if that cannot be
    said."""

    def __init__(
        self, name: str, backend: StorageBackend, ledger: Ledger, maintenance: Maintenance, calls: Calls,
        events: EventBus,
    ) -> None:  # fmt: skip
        self._name = name
        self._backend = backend
        self._ledger = ledger
        self._maintenance = maintenance
        self._calls = calls
        self._events = events

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        names = [str(key) for key in keys]
        self._order("remove", lambda: self._delete([*names, *(_QUARANTINE + name for name in names)], keys))

    def clear(self, prefix: str) -> None:
        def delete() -> None:
            found, unread = self._names_below(prefix)
            names = dict.fromkeys([*found, *map(str, self._ledger.names(prefix))])
            self._delete([*names], [*_keys_of(names)])
            if unread is not None:
                raise unread

        self._order("clear", delete)

    def _order(self, verb: str, delete: Callable[[], None]) -> None:
        try:
            self._calls.order(verb, delete, seconds=max(_MOST_SECONDS, self._calls.deadline)).result()
        except Exception as error:
            raise BackendError(f"{self._name}: {verb} failed, blobs may be left: {error}") from error

    def _delete(self, names: Sequence[str], keys: Sequence[ChunkKey]) -> None:
        """keys: those of the names that are in the index."""
        try:
            self._backend.delete_many(names)
        except BaseException:
            since = self._ledger.mark()
            for key, here in zip(keys, self._maintenance.still_there(keys), strict=True):
                if not here:
                    self._ledger.forget_absent(key, since=since)
            raise
        self._ledger.forget(keys)
        self._events.left(self._name, keys)

    def _names_below(self, prefix: str) -> tuple[list[str], IncompleteListingError | None]:
        found: list[str] = []
        unread = None
        for place in (prefix, _QUARANTINE + prefix):
            try:
                found.extend(entry.key for entry in self._backend.scan(place))
            except IncompleteListingError as error:
                unread = error
        return found, unread


def _keys_of(names: Iterable[str]) -> Iterator[ChunkKey]:
    """Those of these names in a store that are names of chunks."""
    for name in names:
        with suppress(ValueError):
            yield ChunkKey.parse(name)
