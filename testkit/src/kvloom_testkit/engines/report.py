"""`kvloom check engine`: the rows on the terminal, and as JSON and JUnit files."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

from kvloom import ConfigError, output, replace_file
from kvloom_testkit.engines.base import BaseBench
from kvloom_testkit.engines.bench import Bench
from kvloom_testkit.engines.process import Host, RefusedError
from kvloom_testkit.engines.requirements import EngineConformance
from kvloom_testkit.engines.running import Row, check
from kvloom_testkit.engines.sglang.requirements import StorageConformance
from kvloom_testkit.engines.sglang.storages import Storage, StorageBench
from kvloom_testkit.engines.subject import Subject
from kvloom_testkit.engines.transformers.caches import CacheBench, Cached
from kvloom_testkit.engines.transformers.requirements import CacheConformance
from kvloom_testkit.requirements import Requirement, requirements_of


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that subjects are checked in."""

    word: str
    """Its name on the command line."""
    title: str
    tested: Sequence[str]
    """Versions that this kit was tested with."""
    subjects: Mapping[str, Callable[..., Any]]
    """By the option that names a subject, a function that makes it of the option's text."""
    limits: Sequence[str]
    """Further options that say how."""
    conformance: type[Any]
    bench: Callable[..., BaseBench]

    @property
    def requirements(self) -> dict[str, Requirement]:
        """By id."""
        return {one.id: one for one in requirements_of(self.conformance)}


VLLM = Engine(
    "vllm", "vLLM", ("0.32",),
    {"--connector": Subject.named, "--offloading-spec": Subject.of_spec, "--secondary-tier": Subject.of_tier},
    ("--block", "--chunk", "--tolerance", "--settle"), EngineConformance, Bench,
)  # fmt: skip
SGLANG = Engine("sglang", "SGLang", ("0.5.23",), {"--storage": Storage.named}, (), StorageConformance, StorageBench)
TRANSFORMERS = Engine(
    "transformers", "transformers", ("5",), {"--cached": Cached.wrapper, "--cache": Cached.cache},
    ("--chunk", "--tolerance"), CacheConformance, CacheBench,
)  # fmt: skip
ENGINES = {one.word: one for one in (VLLM, SGLANG, TRANSFORMERS)}
_COMMON = ("--extra", "--short", "--junit")
_MARKS = {"met": "ok", "not met": "FAIL", "skipped": "-", "not tried": "?"}
_INTERRUPTED = 130
_WIDTH = 110


def run_options(
    word: str, options: Mapping[str, Any], others: Mapping[str, object], only: Sequence[str], seconds: float, *,
    as_json: bool, repeat: int = 1,
) -> int:  # fmt: skip
    """Check what the options of the command line say; the exit status. others: options that engines do not have.

    Raises ConfigError.
    """
    if word not in ENGINES:
        raise ConfigError("engine", f"no engine {word!r}; there are {', '.join(ENGINES)}")
    engine = ENGINES[word]
    given = [name for name, value in options.items() if value is not None]
    foreign = [name for name in given if name not in (*engine.subjects, *engine.limits, *_COMMON)]
    if wrong := [*foreign, *(name for name, value in others.items() if value)]:
        raise ConfigError(wrong[0], f"`kvloom check engine {word}` does not have this option")
    if repeat < 1:
        raise ConfigError("--repeat", f"expected at least 1, not {repeat}")
    named = [name for name in engine.subjects if name in given]
    if not named:
        first, *rest = engine.subjects
        instead = f"; or {' or '.join(rest)}" if rest else ""
        text = f"missing; write MODULE:CLASS, as {engine.title} imports it, or a name that it knows{instead}"
        raise ConfigError(first, text)
    if len(named) > 1:
        raise ConfigError(named[1], f"something else is checked by {named[0]}; remove one of them")
    if options["--junit"] is not None:
        _expect_writable(options["--junit"])  # the run takes minutes
    more = {name.removeprefix("--"): options[name] for name in engine.limits if options[name] is not None}
    extra = _extra(options["--extra"])
    subject = engine.subjects[named[0]](options[named[0]], extra=extra, seconds=seconds, **more)
    short = bool(options["--short"])
    return run(engine, subject, only=only, repeat=repeat, short=short, as_json=as_json, junit=options["--junit"])


def run(
    engine: Engine, subject: Any, *, only: Sequence[str] = (), repeat: int = 1, short: bool = False,
    as_json: bool = False, junit: Path | None = None, host: Host | None = None,
) -> int:  # fmt: skip
    """Check a subject and print the rows as they come; the exit status. host: one that runs already.

    as_json: print JSON when all is done; the rows go to standard error.
    """
    requirements = engine.requirements
    wanted = _wanted(only, requirements)
    begin = time.monotonic()
    try:
        bench = engine.bench(subject, short=short, host=host)
    except RefusedError as error:
        text = f"{error}; run this in the environment that {engine.title} is installed in"
        raise ConfigError(f"engine {engine.word}", text) from error
    version = f"{engine.title} {bench.host.about['version']}"
    if not f"{version}.".startswith(tuple(f"{engine.title} {one}." for one in engine.tested)):
        print(f"{version} is not a version that this kit was tested with: {', '.join(engine.tested)}", file=sys.stderr)
    width = max(len(requirements[each].title) for each in wanted)
    out = sys.stderr if as_json else sys.stdout

    def tell(row: Row) -> None:
        why = "" if row.outcome == "not met" else row.reason  # that is told at the end
        text = f"{row.id}  {_MARKS[row.outcome]:4}  {row.title:{width}}  {row.seconds:6.1f} s  {why}"
        print(output.plain(text.rstrip()), file=out, flush=True)

    try:
        rows = check(bench, engine.conformance, only=wanted, repeat=repeat, tell=tell)
    except KeyboardInterrupt:
        print(f"{subject}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        bench.close()
    _explain(rows, requirements, out)
    took = time.monotonic() - begin
    print(f"\n{summary(subject, version, rows, took)}", file=out)
    if as_json:
        print(json.dumps(document(engine, subject, version, rows, took, short=short), indent=2))
    if junit is not None:
        _write(junit, xml(engine, subject, rows, took))
    return 1 if any(row.outcome in ("not met", "not tried") for row in rows) else 0


def summary(subject: Any, version: str, rows: Sequence[Row], seconds: float) -> str:
    """One line: the subject, the engine, how many requirements came out how, and how long all took."""
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in _MARKS}
    said = [f"{count} {outcome}" for outcome, count in counts.items() if count]
    return f"{subject} on {version}: {', '.join(said)}, {seconds:.0f} s"


def document(
    engine: Engine, subject: Any, version: str, rows: Sequence[Row], seconds: float, *, short: bool
) -> dict[str, Any]:
    """The rows and their subject as JSON has them. seconds: of the whole run, starts of engines included."""
    return {
        "connector": str(subject), **subject.settings, "engine": engine.word,
        "version": version.partition(" ")[2], "short": short, "seconds": round(seconds, 3),
        "summary": summary(subject, version, rows, seconds), "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def xml(engine: Engine, subject: Any, rows: Sequence[Row], seconds: float) -> str:
    """The rows as JUnit has them: a test case for each. Those that were not tried count as skipped.

    seconds: of the whole run, starts of engines included.
    """
    failed = [row for row in rows if row.outcome == "not met"]
    skipped = [row for row in rows if row.outcome in ("skipped", "not tried")]
    suite = ElementTree.Element("testsuite", {
        "name": f"kvloom check engine {engine.word} {subject}", "tests": str(len(rows)), "failures": str(len(failed)),
        "skipped": str(len(skipped)), "errors": "0", "time": f"{seconds:.3f}",
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


def _wanted(only: Sequence[str], requirements: Mapping[str, Requirement]) -> list[str]:
    asked = {each.strip().upper() for text in only for each in text.split(",") if each.strip()}
    if unknown := sorted(asked - set(requirements)):
        raise ConfigError("--only", f"no requirement {', '.join(unknown)}; there are {', '.join(requirements)}")
    return sorted(asked or requirements)


def _extra(text: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError("--extra", f"expected a JSON object: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra", f"expected a JSON object, not {text}")
    return extra


def _explain(rows: Sequence[Row], requirements: Mapping[str, Requirement], out: TextIO) -> None:
    for row in rows:
        if row.outcome == "not met":
            one = requirements[row.id]
            print(f"\n{one.id} {one.what}", file=out)
            for name, text in (("Why", one.why), ("Usually", one.usually), ("Here", row.reason)):
                text = f"{name}: {text[:1500]}"
                text = textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
                print(output.plain(text), file=out)


def _expect_writable(path: Path) -> None:
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError("--junit", f"{path} cannot be written: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError("--junit", f"{path} cannot be written: {error}") from error


def _printable(text: str) -> str:
    """The text without the control characters that XML cannot have."""
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)
