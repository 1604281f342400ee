"""`kvloom check engine`: the rows on the terminal, and as JSON and JUnit files."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

from kvloom import ConfigError, output
from kvloom_testkit.engines.bench import Bench
from kvloom_testkit.engines.process import Host, RefusedError
from kvloom_testkit.engines.running import REQUIREMENTS, Row, check
from kvloom_testkit.engines.subject import Subject

TESTED = ("0.32",)
"""Versions of vLLM that this kit was tested with."""
_MARKS = {"met": "ok", "not met": "FAIL", "skipped": "-", "not tried": "?"}
_INTERRUPTED = 130
_WIDTH = 110


def run_options(
    engine: str, options: Mapping[str, Any], others: Mapping[str, object], only: Sequence[str], seconds: float, *,
    as_json: bool,
) -> int:  # fmt: skip
    """Check what the options of the command line say; the exit status. others: options that engines do not have.

    Raises ConfigError.
    """
    if engine != "vllm":
        raise ConfigError("engine", f"no engine {engine!r}; there is vllm")
    if given := [name for name, value in others.items() if value]:
        raise ConfigError(given[0], "`kvloom check engine` does not have this option")
    more = {name: options[f"--{name}"] for name in ("block", "chunk", "tolerance") if options[f"--{name}"] is not None}
    connector, spec, extra = options["--connector"], options["--offloading-spec"], _extra(options["--extra"])
    if spec is not None and connector is not None:
        raise ConfigError("--offloading-spec", "it has vLLM's OffloadingConnector checked; remove --connector")
    if spec is not None:
        subject = Subject.of_spec(spec, extra=extra, seconds=seconds, **more)
    elif connector is not None:
        subject = Subject.named(connector, extra=extra, seconds=seconds, **more)
    else:
        text = "missing; write MODULE:CLASS, as vLLM imports it, or a name that vLLM knows; or --offloading-spec"
        raise ConfigError("--connector", text)
    short = bool(options["--short"])
    return run(subject, only=only, short=short, as_json=as_json, junit=options["--junit"])


def run(
    subject: Subject, *, only: Sequence[str] = (), short: bool = False, as_json: bool = False,
    junit: Path | None = None, host: Host | None = None,
) -> int:  # fmt: skip
    """Check a connector and print the rows as they come; the exit status. host: one that runs already.

    as_json: print JSON when all is done; the rows go to standard error.
    """
    wanted = _wanted(only)
    begin = time.monotonic()
    try:
        bench = Bench(subject, short=short, host=host)
    except RefusedError as error:
        raise ConfigError("engine vllm", f"{error}; run this in the environment that vLLM is installed in") from error
    version = str(bench.host.about["version"])
    if not version.startswith(tuple(f"{one}." for one in TESTED)):
        print(f"vLLM {version} is not a version that this kit was tested with: {', '.join(TESTED)}", file=sys.stderr)
    width = max(len(REQUIREMENTS[each].title) for each in wanted)
    out = sys.stderr if as_json else sys.stdout

    def tell(row: Row) -> None:
        why = row.reason if row.outcome == "skipped" else ""
        text = f"{row.id}  {_MARKS[row.outcome]:4}  {row.title:{width}}  {row.seconds:6.1f} s  {why}"
        print(output.plain(text.rstrip()), file=out, flush=True)

    try:
        rows = check(bench, only=wanted, tell=tell)
    except KeyboardInterrupt:
        print(f"{subject}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        bench.close()
    _explain(rows, out)
    print(f"\n{summary(subject, version, rows)}, {time.monotonic() - begin:.0f} s", file=out)
    if as_json:
        print(json.dumps(document(subject, version, rows, short=short), indent=2))
    if junit is not None:
        _write(junit, xml(subject, rows))
    return 1 if any(row.outcome in ("not met", "not tried") for row in rows) else 0


def summary(subject: Subject, version: str, rows: Sequence[Row]) -> str:
    """One line: the connector, the engine, and how many requirements came out how."""
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in _MARKS}
    said = [f"{count} {outcome}" for outcome, count in counts.items() if count]
    return f"{subject} on vLLM {version}: {', '.join(said)}"


def document(subject: Subject, version: str, rows: Sequence[Row], *, short: bool) -> dict[str, Any]:
    """The rows and their subject as JSON has them."""
    about = {"connector": str(subject), "extra": subject.extra, "block": subject.block, "chunk": subject.chunk}
    return {
        **about, "engine": "vllm", "version": version, "short": short,
        "summary": summary(subject, version, rows), "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def xml(subject: Subject, rows: Sequence[Row]) -> str:
    """The rows as JUnit has them: a test case for each."""
    failed = [row for row in rows if row.outcome in ("not met", "not tried")]
    skipped = [row for row in rows if row.outcome == "skipped"]
    suite = ElementTree.Element("testsuite", {
        "name": f"kvloom check engine vllm {subject}", "tests": str(len(rows)), "failures": str(len(failed)),
        "skipped": str(len(skipped)), "errors": "0", "time": f"{sum(row.seconds for row in rows):.3f}",
    })  # fmt: skip
    for row in rows:
        names = {"classname": str(subject), "name": f"{row.id} {row.title}", "time": f"{row.seconds:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", names)
        if row in failed:
            message = _printable(row.reason)
            ElementTree.SubElement(case, "failure", {"message": message[:200]}).text = message
        elif row in skipped:
            ElementTree.SubElement(case, "skipped", {"message": _printable(row.reason)[:200]})
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _wanted(only: Sequence[str]) -> list[str]:
    asked = {each.strip().upper() for text in only for each in text.split(",") if each.strip()}
    if unknown := sorted(asked - set(REQUIREMENTS)):
        raise ConfigError("--only", f"no requirement {', '.join(unknown)}; there are {', '.join(REQUIREMENTS)}")
    return sorted(asked or REQUIREMENTS)


def _extra(text: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError("--extra", f"expected a JSON object: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra", f"expected a JSON object, not {text}")
    return extra


def _explain(rows: Sequence[Row], out: TextIO) -> None:
    for row in rows:
        if row.outcome == "not met":
            one = REQUIREMENTS[row.id]
            print(f"\n{one.id} {one.what}", file=out)
            for name, text in (("Why", one.why), ("Usually", one.usually), ("Here", row.reason)):
                text = f"{name}: {text[:1500]}"
                text = textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
                print(output.plain(text), file=out)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error}") from error


def _printable(text: str) -> str:
    """The text without the control characters that XML cannot have."""
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)
