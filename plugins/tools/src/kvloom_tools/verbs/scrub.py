"""`kvloom scrub`: read every blob of every stored tier, verify it, and put the corrupt ones aside."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom import BackendError, ConfigError, output
from kvloom_tools.configuration import load
from kvloom_tools.progress import byte_progress

if TYPE_CHECKING:
    from kvloom.inspection import Resolved, Store, TierChoice
    from kvloom_tools.verify import Examiner, Finding

_HOLES_BYTES = 64 << 10
"""Bytes of a file with holes that are copied to quarantine, beyond twice its size on disk."""
_CALLS = 6
"""Calls of the backend for one blob, at most; each may take the tier's deadline."""
_SHOWN = 20
"""Blobs that are named on the screen."""
_NAMED = 10_000
"""Blobs that --json names, for each tier."""


@dataclass(slots=True)
class Report:
    """The findings in one tier."""

    tier: str
    type: str
    blobs: int = 0
    bytes: int = 0
    """Read and checked."""
    ok: int = 0
    corrupt: int = 0
    unreadable: int = 0
    failed: int = 0
    gone: int = 0
    foreign: int = 0
    """Entries of the listing that are neither a chunk nor kvloom's own record."""
    in_quarantine: int = 0
    """Blobs that lie in quarantine now."""
    seconds: float = 0.0
    error: str = ""
    """The reason why the tier was not read to its end."""
    problems: list[dict[str, str]] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.corrupt or self.failed or self.error)


def add(commands: typer.Typer) -> None:
    @commands.command("scrub", short_help="Verify every blob of the stored tiers.")
    def scrub(
        path: Annotated[Path, typer.Argument(metavar="PATH", help="A YAML configuration, or a disk tier's directory.")],
        quarantine: Annotated[
            bool, typer.Option("--quarantine", help="Move corrupt blobs to quarantine/ in the same store (default).")
        ] = False,
        delete: Annotated[bool, typer.Option("--delete", help="Delete corrupt blobs.")] = False,
        keep: Annotated[bool, typer.Option("--keep", help="Only report corrupt blobs.")] = False,
        tier: Annotated[str | None, typer.Option(help="Only the tier of this name.")] = None,
        threads: Annotated[int, typer.Option(min=1, max=64, help="Blobs to read at a time, in each tier.")] = 4,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Verify every blob of the stored tiers. Exit status 1 if one is corrupt or could not be read."""
        from kvloom.inspection import opened, stored

        if quarantine + delete + keep > 1:
            raise ConfigError("--quarantine, --delete, --keep", "choose one of them")
        action = "delete" if delete else "keep" if keep else "quarantine"
        resolved, known = _resolved(path)
        reports = []
        choices = stored(resolved, tier)
        for choice in choices:
            try:
                with opened(choice, made=False) as store:
                    reader = Reader(store, _serializers(choice) if known else None, action, threads)
                    reports.append(_scrubbed(reader))
            except (BackendError, ConfigError) as error:
                if len(choices) == 1 or choice.backend is None:
                    raise
                reports.append(Report(choice.name, choice.backend.type, error=str(error)))
        if as_json:
            print(json.dumps([asdict(report) | {"clean": report.clean} for report in reports], indent=2))
        else:
            _print(reports)
        raise typer.Exit(0 if all(report.clean for report in reports) else 1)


_PARTS = ("spec", "+tmp", "+hold-evict")
"""Entries of a directory of the disk backend: it has at least one of them."""


def _resolved(path: Path) -> tuple[Resolved, bool]:
    """The configuration, and whether it says which serializers are whose."""
    if not path.is_dir():
        return load(path)[1], True
    from kvloom import EngineConfig, check_config

    if not any((path / part).exists() for part in _PARTS):
        raise ConfigError(
            str(path), f"no store of kvloom: it has none of {', '.join(_PARTS)}; name the tier's directory"
        )
    config = EngineConfig.load({"tiers": [{"type": "disk", "path": str(path.absolute())}]})
    return check_config(config), False


def _serializers(choice: TierChoice) -> set[str]:
    assert choice.serializer is not None
    return {choice.serializer.type, "raw"}


@dataclass(frozen=True, slots=True)
class Reader:
    """A walk through one tier."""

    store: Store
    serializers: set[str] | None
    """Those whose blobs belong here; None for any."""
    action: str
    threads: int

    @property
    def keeps(self) -> bool:
        """Corrupt blobs stay: so it was asked, or the configuration says that this tier is only read."""
        return self.action == "keep" or self.store.choice.write == "never"


def _scrubbed(reader: Reader) -> Report:
    from kvloom_tools.stores import QUARANTINE

    store = reader.store
    report = Report(store.name, store.backend.type)
    began = time.monotonic()
    try:
        total = sum(entry.bytes for _, entry in store.blobs()) if output.watched() else None
        began = time.monotonic()
        with byte_progress(f"verifying {store.name}", total) as step:
            for finding in _findings(reader, report):
                _count(report, finding)
                step(finding.bytes)
        report.in_quarantine = sum(1 for _ in store.entries(QUARANTINE))
    except BackendError as error:
        report.error = str(error)
    report.seconds = time.monotonic() - began
    return report


def _findings(reader: Reader, report: Report) -> Iterator[Finding]:
    """The verdicts on all blobs, in the order of the listing; what else is listed is counted in `report`."""
    from kvloom.inspection import at_once
    from kvloom_tools.stores import said
    from kvloom_tools.verify import Examiner, Finding, Verdict

    store = reader.store
    examiner = Examiner(store.backend, reader.serializers, store.choice.protection)
    calls = ((key, partial(_treated, reader, examiner, key, most)) for key, most in _keys(store, report))
    for key, finding in at_once(calls, seconds=_CALLS * store.choice.deadline, threads=reader.threads):
        yield Finding(key, Verdict.FAILED, reason=said(finding)) if isinstance(finding, Exception) else finding


def _keys(store: Store, report: Report) -> Iterator[tuple[str, int]]:
    """The keys of blobs, each with how much of it a copy may take up."""
    from kvloom.inspection import RECORDS, chunk_key
    from kvloom_tools.stores import PROBES, QUARANTINE

    for entry in store.entries():
        if chunk_key(entry.key) is not None:
            yield entry.key, 2 * entry.bytes + _HOLES_BYTES
        elif not entry.key.startswith((RECORDS, QUARANTINE, PROBES)):
            report.foreign += 1


def _treated(reader: Reader, examiner: Examiner, key: str, most: int) -> Finding:
    from kvloom_tools.stores import said
    from kvloom_tools.verify import Verdict

    finding = examiner.examine(key)
    if finding.verdict is not Verdict.CORRUPT:
        return finding
    if reader.keeps:
        return replace(finding, action="kept")
    try:
        done = examiner.put_aside(key, copy=reader.action == "quarantine", most=most)
        return replace(finding, action=done)
    except Exception as error:
        return replace(finding, action=f"kept: {said(error)}")


def _count(report: Report, finding: Finding) -> None:
    word = finding.verdict.value
    setattr(report, word, getattr(report, word) + 1)
    report.blobs += 1
    report.bytes += finding.bytes
    if word in ("corrupt", "failed", "unreadable") and len(report.problems) < _NAMED:
        report.problems.append(
            {"key": finding.key, "verdict": word, "reason": finding.reason, "action": finding.action}
        )


def _print(reports: list[Report]) -> None:
    columns = ("blobs", "bytes", "ok", "corrupt", "unreadable", "failed", "foreign")
    rows = []
    for one in reports:
        counts = (one.ok, one.corrupt, one.unreadable, one.failed, one.foreign)
        rows.append((one.tier, str(one.blobs), output.size(one.bytes), *map(str, counts)))
    output.print_table("", ("tier", *columns), rows, right=columns)
    for one in reports:
        seconds = max(one.seconds, 1e-3)
        line = f"{one.tier}: {output.rate(one.bytes / seconds)}, {one.blobs / seconds:,.0f} blobs/s"
        line += f"; {one.gone} deleted before they were read" if one.gone else ""
        output.say(line + (f"; {one.in_quarantine} in quarantine" if one.in_quarantine else ""))
    for one in reports:
        shown = [problem for problem in one.problems if problem["verdict"] != "unreadable"]
        for problem in shown[:_SHOWN]:
            end = f": {problem['action']}" if problem["action"] else ""
            output.say(f"{one.tier}: {problem['verdict']}: {problem['key']}: {problem['reason']}{end}")
        more = one.corrupt + one.failed - _SHOWN
        if more > 0:
            output.say(f"{one.tier}: and {more} more; --json names up to {_NAMED}")
        if one.error:
            output.say(f"{one.tier}: not read to the end: {one.error}")
