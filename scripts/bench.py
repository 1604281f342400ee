"""Run benchmarks one after the other; skip those whose modules are not installed, by name: bench.py SCRIPT ...

A script says itself which of its rows need more, such as fio or root, and leaves them out.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def imported(script: Path) -> Iterator[str]:
    """The top-level packages that the script imports when it starts."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def missing(script: Path) -> list[str]:
    """The packages that the script imports and that are not installed."""
    beside = {path.stem for path in script.parent.iterdir()}
    return sorted({name for name in imported(script) if name not in beside and importlib.util.find_spec(name) is None})


def main(scripts: list[Path]) -> int:
    """Return 1 if a script failed, else 0."""
    failed, skipped = [], []
    for script in scripts:
        print(f"== {script}", flush=True)
        if lacking := missing(script):
            skipped.append(f"{script} (needs {', '.join(lacking)})")
        elif subprocess.run([sys.executable, script]).returncode:
            failed.append(str(script))
    for what, names in (("skipped", skipped), ("failed", failed)):
        for name in names:
            print(f"{what}: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
