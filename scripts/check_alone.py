"""Each package with nothing but what it asks for: it must come in and be listed as ok, and its modules be imported.

    python scripts/check_alone.py CONSTRAINTS

Run with the Python of an environment that has kvloom's core and nothing else of kvloom. All packages need what is in
it, torch for one, so each gets an environment of its own that sees that one, and into which only the rest is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

from wheels import wheels

CORE = "kvloom"
LISTING = "from kvloom.cli.main import main; main()"
OPTIONAL = {
    "kvloom-blend": "vllm kvloom_connector_vllm",
    "kvloom-connector-sglang": "sglang kvloom_testkit",
    "kvloom-connector-transformers": "kvloom_testkit",
    "kvloom-connector-vllm": "vllm prometheus_client kvloom_testkit",
    "kvloom-observe": "opentelemetry requests",
    "kvloom-serde-cachegen": "transformers",
    "kvloom-testkit": "sglang transformers vllm",
}
"""Optional imports of a package's modules: an engine and its dependencies, an extra, the kit."""
IMPORTING = """
import importlib, pkgutil, sys

package, *optional = sys.argv[1:]
paths = importlib.import_module(package).__path__
for found in pkgutil.walk_packages(paths, package + ".", onerror=lambda name: None):
    if found.name.endswith(".__main__") or not found.module_finder.find_spec(found.name).origin.endswith(".py"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in optional:
            sys.exit(f"{found.name}: {error}")
"""


def main() -> int:
    packages = wheels()
    there = {found.name for found in distributions() if found.name.startswith(CORE)}
    assert there == {CORE}, f"this environment has {sorted(there)}: what it sees proves nothing about packages alone"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = dict(zip(packages, pool.map(alone, packages, packages.values()), strict=True))
    wrong = [name for name, fault in faults.items() if fault]
    for name in wrong:
        print(f"{name} alone: {faults[name]}", file=sys.stderr)
    print(f"{len(packages) - len(wrong)} of {len(packages)} packages work alone")
    return 1 if wrong else 0


def alone(name: str, wheel: Path) -> str | None:
    """Problems of a package that is installed with its requirements only."""
    with tempfile.TemporaryDirectory() as place:
        if name == CORE:
            return looked_at(sys.executable, name)
        python = environment(Path(place))
        return install(python, wheel, place=Path(place)) or looked_at(python, name)


def environment(place: Path) -> str:
    """A fresh one in which the core and what it needs can be seen, and nothing can be written over."""
    venv.create(place / "venv", symlinks=True)
    (folder,) = (place / "venv" / "lib").glob("python*/site-packages")
    (folder / "core.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return str(place / "venv" / "bin" / "python")


def install(python: str, wheel: Path, *, place: Path) -> str | None:
    siblings = place / "siblings.txt"  # other packages of ours that it needs come from dist/, too, not from an index
    siblings.write_text("".join(f"{name} @ {path.as_uri()}\n" for name, path in wheels().items()), encoding="utf-8")
    options = ["--quiet", "--no-compile", "--constraint", sys.argv[1], "--constraint", str(siblings)]
    return run(pip(python, "install", *options, str(wheel)))


def looked_at(python: str, name: str) -> str | None:
    """Problems of a package in its environment."""
    word = name.replace("-", "_")
    plugin = {CORE: "builtin"}.get(name, word.removeprefix("kvloom_"))
    importing = [python, "-I", "-c", IMPORTING, word, *OPTIONAL.get(name, "").split()]
    if fault := run(importing) or run(pip(python, "check")):
        return fault
    listing = [python, "-I", "-c", LISTING, "plugins", "--check", "--json"]
    listed = subprocess.run(listing, capture_output=True, text=True)
    if listed.returncode:
        return listed.stderr.strip()
    states = {row["name"]: row["state"] for row in json.loads(listed.stdout)}
    if states.get(plugin) != "ok" or set(states.values()) != {"ok"}:
        return f"`kvloom plugins` says {states}"
    return None


def pip(python: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--python", python, *arguments]


def run(command: list[str]) -> str | None:
    """The output of a command that fails; None if it succeeds."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return (done.stdout.strip() or f"exit status {done.returncode}") if done.returncode else None


if __name__ == "__main__":
    sys.exit(main())
