"""Under which licences the packages are that kvloom's packages and extras bring along, and whether we accept them.

    python scripts/licences.py [--write]

Run with the Python of an environment that has every package with every extra. Exit status 1 if a package has a licence
that `licences.toml` does not accept, or says none, or if docs/licences.md says something else. --write writes that.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheels import EXCLUDED, extras_of

PAGE = Path(__file__).parents[1] / "docs" / "licences.md"
RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OURS = "kvloom"
ABOUT = """# Licences of what comes along

kvloom is under the [Apache License 2.0](../LICENSE). This is what its packages bring with them on Linux and Python
3.11, directly or not, as those say it themselves. `make licences` writes this page; `make check-licences` fails when it
is not what is installed, or when a licence is none of those in [`scripts/licences.toml`](../scripts/licences.toml).

Not in the table are vLLM, SGLang and models, which kvloom works with and does not install, and what another build of
torch brings: the one for CUDA has NVIDIA's libraries with it, under NVIDIA's licence.
"""


def main() -> int:
    comes_with = brought()
    licences = {name: licence(distribution(name)) for name in comes_with}
    wrong = [fault for name, said in licences.items() for fault in faults(name, said)]
    wrong += [
        f"{name} is excepted in licences.toml and comes with nothing"
        for name in RULES["excepted"]
        if name not in licences
    ]
    text = page(comes_with, licences)
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        wrong.append(f"docs/{PAGE.name} is not what is installed: `make licences` writes it")
    print("\n".join(wrong) or f"{len(licences)} packages come along, each under a licence that is accepted")
    return 1 if wrong else 0


def brought() -> dict[str, list[str]]:
    """Each package of other people that comes along, and with what: the core, else packages, else extras."""
    ours = sorted(found.name for found in distributions() if found.name.startswith(OURS))
    core = closure(OURS)
    plain = {name: closure(name) for name in ours}
    extras = {(name, extra): closure(name, extra) for name in ours for extra in extras_of(distribution(name).metadata)}
    found = {}
    for name in sorted(set().union(*plain.values(), *extras.values())):
        with_ours = [package for package in ours if name in plain[package]]
        with_extras = [
            f"{package}[{','.join(extra)}]"
            for package in ours
            if (extra := [one for one in extras_of(distribution(package).metadata) if name in extras[package, one]])
        ]
        found[name] = [OURS] if name in core else with_ours or with_extras
    return found


def closure(package: str, extra: str = "") -> set[str]:
    """All packages that installing a package brings, without ours."""
    seen: set[tuple[str, str]] = set()
    waiting = [(package, ""), (package, extra)]
    while waiting:
        name, asked = waiting.pop()
        if (name, asked) in seen:
            continue
        seen.add((name, asked))
        for need in map(Requirement, installed(name).requires or []):
            if need.marker is None or need.marker.evaluate({"extra": asked}):
                needed = canonicalize_name(need.name)
                waiting += [(needed, ""), *((needed, wanted) for wanted in need.extras)]
    return {name for name, _ in seen if not name.startswith(OURS)}


def installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        sys.exit(f"{name} is not installed: this wants an environment with every package and every extra")


def licence(package: Distribution) -> str:
    """A package's licence: an SPDX expression, else `License` if we accept that, else classifiers; "" if it states
    none."""
    about = package.metadata
    if expression := about.get("License-Expression"):
        return expression
    field = spelled(about.get("License") or "")
    if field and all(one in RULES["accepted"] for one in named(field)):
        return field
    classifiers = [one.split(" :: ")[-1] for one in about.get_all("Classifier") or [] if one.startswith("License :: ")]
    return ", ".join(sorted({spelled(one) for one in classifiers if one != "OSI Approved"}))


def spelled(text: str) -> str:
    return RULES["spelled"].get(text.strip(), text.strip())


def named(expression: str) -> list[str]:
    """The licences in an expression. All must be accepted, also where there is a choice: an exception says which."""
    return [one.strip() for one in re.split(r"\bAND\b|\bOR\b|[(),]", expression) if one.strip()]


def faults(name: str, said: str) -> Iterator[str]:
    excepted = RULES["excepted"].get(name)
    if not said:
        yield f"{name} does not say what licence it is under"
    elif excepted and excepted["licence"] != said:
        yield f"{name} is excepted in licences.toml as {excepted['licence']} and says {said}"
    elif not excepted:
        refused = [one for one in named(said) if one not in RULES["accepted"]]
        yield from (f"{name} is under {one}, which licences.toml does not accept" for one in refused)


def page(comes_with: dict[str, list[str]], licences: dict[str, str]) -> str:
    lines = [ABOUT, "| package | licence | comes with |", "|---|---|---|"]
    lines += [
        f"| {name} | {licences[name]} | {', '.join(f'`{one}`' for one in by)} |" for name, by in comes_with.items()
    ]
    lines += ["", "Accepted in spite of its licence:", ""]
    lines += [f"- {name}, {one['licence']}: {one['reason']}." for name, one in RULES["excepted"].items()]
    if EXCLUDED:
        lines += ["", "Extras that are not in the table:", ""]
        lines += [f"- `{name}[{extra}]`: {why}." for name, one in EXCLUDED.items() for extra, why in one.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
