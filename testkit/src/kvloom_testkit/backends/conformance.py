"""Requirements of storage backends. See `BackendConformance`."""

from __future__ import annotations

from kvloom_testkit.backends.batches import BatchRequirements
from kvloom_testkit.backends.concurrency import ConcurrencyRequirements
from kvloom_testkit.backends.deaths import DeathRequirements
from kvloom_testkit.backends.forms import FormRequirements
from kvloom_testkit.backends.lifetime import LifetimeRequirements
from kvloom_testkit.backends.listing import ListingRequirements
from kvloom_testkit.backends.names import NameRequirements
from kvloom_testkit.backends.processes import ProcessRequirements
from kvloom_testkit.backends.refusals import RefusalRequirements
from kvloom_testkit.backends.values import HistoryRequirements, ValueRequirements


class BackendConformance(
    ValueRequirements,
    NameRequirements,
    ConcurrencyRequirements,
    FormRequirements,
    BatchRequirements,
    ListingRequirements,
    LifetimeRequirements,
    ProcessRequirements,
    DeathRequirements,
    RefusalRequirements,
    HistoryRequirements,
):
    """Requirements of a `StorageBackend`.

    `make` is a function that opens a new instance on the same store each time it is called in one test. The store
    need not be empty: the tests use keys of their own, and delete them. A store that evicts on its own (`bounded`)
    must have room for 16 MiB in 200 blobs; no test stores more.

    A second fixture, `raw`, may return an object with `get(key) -> bytes | None` and `set(key, bytes)` that access the
    store without the backend; the backend's reads and writes are then compared with it too.

    A `shared` store is opened several times at once; any other is closed before it is opened again.
    """
