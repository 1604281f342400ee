"""What the verbs that look into tiers share: the backends of a configuration, and the records of what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvloom.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from kvloom.config import Resolved, TierChoice
    from kvloom.contracts.storage import StorageBackend
    from kvloom.types import KVSpec

RECORDS = "spec/"
"""Where a tier keeps, for each fingerprint, what it is a digest of."""


@dataclass(frozen=True, slots=True)
class Store:
    """A stored tier, open."""

    choice: TierChoice
    backend: StorageBackend

    @property
    def name(self) -> str:
        return self.choice.name

    def records(self) -> dict[str, dict[str, Any]]:
        """`{"identity": ..., "spec": ...}` for each fingerprint; what is no such record is left out."""
        found = {}
        with self.errors():
            for entry in self.backend.scan(RECORDS):
                blob = self.backend.get(entry.key)
                record = _parsed(bytes(blob)) if blob is not None else None
                if record is not None:
                    found[entry.key.removeprefix(RECORDS).removesuffix(".json")] = record
        return found

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A backend may raise anything; here that is one line."""
        try:
            yield
        except Exception as error:
            raise BackendError(f"tier {self.name}: {type(error).__name__}: {error}") from error


@contextmanager
def stores(resolved: Resolved, spec: KVSpec | None = None) -> Iterator[list[Store]]:
    """The stored tiers, in order. ConfigError if there is none to look into."""
    choices = [choice for choice in resolved.tiers if choice.backend is not None]
    if not choices:
        raise ConfigError("tiers", "only memory, which no other process can see; there is nothing to look into")
    with ExitStack() as opened:
        found = []
        for choice in choices:
            assert choice.backend is not None
            backend = choice.backend.make(spec)
            opened.callback(backend.close)
            found.append(Store(choice, backend))
        yield found


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    whole = isinstance(record, dict) and all(isinstance(record.get(part), dict) for part in ("identity", "spec"))
    return record if whole else None
