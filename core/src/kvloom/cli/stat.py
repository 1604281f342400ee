"""`kvloom stat`: what the stored tiers hold, by tier, model and tenant. Reads listings, no KV."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.cli import output
from kvloom.cli.config import File, load
from kvloom.plugins import Registry

if TYPE_CHECKING:
    from kvloom.cli.store import Store


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
    blobs: int = 0
    bytes: int = 0
    oldest: float | None = None
    """Seconds since the epoch; None where the store keeps no times."""
    newest: float | None = None
    tenants: dict[str, int] = field(default_factory=dict)
    """Blobs by salt tag; `-` is no salt."""
    fingerprints: dict[str, Held] = field(default_factory=dict)


def add(commands: typer.Typer, registry: Registry) -> None:
    @commands.command("stat")
    def stat(file: File, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """Show what the stored tiers hold."""
        from kvloom.cli.store import stores

        _, resolved = load(file)
        with stores(resolved) as opened:
            summaries = [_summary(store) for store in opened]
        if as_json:
            print(json.dumps([asdict(summary) for summary in summaries], indent=2))
        else:
            _print(summaries)


def _summary(store: Store) -> Summary:
    from kvloom.types import ChunkKey

    summary = Summary(store.name, store.backend.type, store.choice.capacity)
    for fingerprint, record in store.records().items():
        spec = record["spec"]
        summary.fingerprints[fingerprint] = Held(str(spec.get("model", "?")), str(spec.get("revision", "")))
    with store.errors(), output.progress(f"listing {store.name}") as step:
        for entry in store.backend.scan():
            try:
                key = ChunkKey.parse(entry.key)
            except ValueError:
                continue
            step()
            fingerprint, _, tenant = key.namespace.partition("/")
            held = summary.fingerprints.setdefault(fingerprint, Held())
            held.blobs, held.bytes = held.blobs + 1, held.bytes + entry.bytes
            summary.blobs, summary.bytes = summary.blobs + 1, summary.bytes + entry.bytes
            summary.tenants[tenant] = summary.tenants.get(tenant, 0) + 1
            if entry.modified:
                summary.oldest = min(summary.oldest or entry.modified, entry.modified)
                summary.newest = max(summary.newest or entry.modified, entry.modified)
    return summary


def _print(summaries: list[Summary]) -> None:
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
