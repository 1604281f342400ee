"""`kvloom stat`: whether the stored tiers answer, and what they hold, by tier, model and tenant. Reads no KV."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom import BackendError, DeadlineExceeded, IncompleteListingError, output
from kvloom_tools.configuration import File, load
from kvloom_tools.model import say_not_read

if TYPE_CHECKING:
    from kvloom.inspection import Store, TierChoice


@dataclass(slots=True)
class Held:
    """Blobs of one fingerprint."""

    model: str = "?"
    revision: str = ""
    blobs: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Summary:
    """One stored tier."""

    tier: str
    type: str
    capacity: int | None
    state: str = "ok"
    """Or `degraded` (not all could be listed), `no answer`, `failed`, `not opened`."""
    reason: str = ""
    """The reason for a state other than `ok`."""
    answer_seconds: float | None = None
    """Seconds that a question took; None if there was no answer."""
    evicts: str = "unknown"
    """The process that evicts: `store` (it evicts by itself), `owner` (the only process on the store), `a process` (of
    those that share it), `no process` (at the moment), or `unknown`."""
    blobs: int = 0
    bytes: int = 0
    oldest: float | None = None
    """Seconds since the epoch; None where the store keeps no times."""
    newest: float | None = None
    tenants: dict[str, int] = field(default_factory=dict)
    """Blobs by salt tag; `-` is no salt."""
    fingerprints: dict[str, Held] = field(default_factory=dict)
    records_left_out: int = 0
    """Records of models that are not read: they are too long, or there are too many before them."""


def add(commands: typer.Typer) -> None:
    @commands.command("stat", short_help="Show whether the stored tiers answer, and what they hold.")
    def stat(file: File, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """Show whether the stored tiers answer, and what they hold. Exit status 1 if one fails."""
        from kvloom.inspection import stored

        summaries = [_summary(choice) for choice in stored(load(file)[1])]
        if as_json:
            print(json.dumps([asdict(summary) for summary in summaries], indent=2))
        else:
            _print(summaries)
        for summary in summaries:
            say_not_read(summary.tier, summary.records_left_out)
        failed = [summary for summary in summaries if summary.state != "ok"]
        for summary in failed:
            output.say(f"kvloom: tier {summary.tier}: {summary.reason}", stderr=True)
        raise typer.Exit(1 if failed else 0)


def _summary(choice: TierChoice) -> Summary:
    """A tier's summary, as far as it answers."""
    from kvloom.inspection import opened
    from kvloom_tools.stores import said

    assert choice.backend is not None
    summary = Summary(choice.name, choice.backend.type, choice.capacity, state="not opened")
    try:
        with opened(choice, made=False) as store:
            summary.state = "failed"
            _ask(store, summary)
            summary.reason = _unlisted(lambda: _count(store, summary))
            summary.evicts = _evictor(store)
            summary.state = "degraded" if summary.reason else "ok"
    except Exception as error:
        cause = error.__cause__ if isinstance(error, BackendError) and error.__cause__ else error
        summary.state = "no answer" if isinstance(cause, DeadlineExceeded) else summary.state
        summary.reason = said(cause)
    return summary


def _unlisted(count: Callable[[], None]) -> str:
    """The reason why not all could be counted; "" if all was."""
    try:
        count()
    except BackendError as error:
        if not isinstance(error.__cause__, IncompleteListingError):
            raise
        return f"{type(error.__cause__).__name__}: {error.__cause__}"
    return ""


def _ask(store: Store, summary: Summary) -> None:
    from kvloom.inspection import RECORDS

    began = time.monotonic()
    store.ask(lambda: store.backend.contains(f"{RECORDS}0.json"))
    summary.answer_seconds = time.monotonic() - began


def _evictor(store: Store) -> str:
    """The process that evicts. Ask it last: a free right to evict becomes this process's until the store is closed."""
    from kvloom import StorageBackend

    backend = store.backend
    if backend.bounded:
        return "store"
    if not backend.shared:
        return "owner"
    if type(backend).hold is StorageBackend.hold:
        return "unknown"
    try:
        return "no process" if store.ask(lambda: backend.hold("evict")) else "a process"
    except BackendError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        return "unknown"  # who may only read cannot ask


def _count(store: Store, summary: Summary) -> None:
    records = store.records()
    summary.records_left_out = records.left_out
    for fingerprint, record in records.items():
        spec = record["spec"]
        summary.fingerprints[fingerprint] = Held(str(spec.get("model", "?")), str(spec.get("revision", "")))
    with output.progress(f"listing {store.name}") as step:
        for key, entry in store.blobs():
            step()
            fingerprint, _, tenant = key.namespace.partition("/")
            held = summary.fingerprints.setdefault(fingerprint, Held())
            held.blobs, held.bytes = held.blobs + 1, held.bytes + entry.bytes
            summary.blobs, summary.bytes = summary.blobs + 1, summary.bytes + entry.bytes
            summary.tenants[tenant] = summary.tenants.get(tenant, 0) + 1
            if entry.modified:
                summary.oldest = min(summary.oldest or entry.modified, entry.modified)
                summary.newest = max(summary.newest or entry.modified, entry.modified)


def _print(summaries: list[Summary]) -> None:
    output.print_table(
        "now",
        ("tier", "state", "answers in", "evicts"),
        [
            (
                one.tier,
                one.state,
                "-" if one.answer_seconds is None else output.seconds(one.answer_seconds),
                one.evicts,
            )
            for one in summaries
        ],
        right=("answers in",),
    )
    output.print_table(
        "tiers",
        ("tier", "type", "blobs", "bytes", "capacity", "oldest", "newest", "tenants", "models"),
        [
            (
                one.tier,
                one.type,
                str(one.blobs),
                output.size(one.bytes),
                output.size(one.capacity),
                output.moment(one.oldest),
                output.moment(one.newest),
                str(len(one.tenants)),
                str(len(one.fingerprints)),
            )
            for one in summaries
        ],
        right=("blobs", "bytes", "capacity", "tenants", "models"),
    )
    output.print_table(
        "models",
        ("tier", "fingerprint", "model", "revision", "blobs", "bytes"),
        [
            (one.tier, fingerprint, held.model, held.revision, str(held.blobs), output.size(held.bytes))
            for one in summaries
            for fingerprint, held in one.fingerprints.items()
        ],
        right=("blobs", "bytes"),
    )
