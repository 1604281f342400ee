"""Gathers the pages of the documentation's site: those that are written, as they lie, and those made from the code.

    python scripts/docs/pages.py FOLDER

FOLDER comes to look like the repository, so that links between pages hold. Beside them is what the modules here make,
each a mapping of files and their texts: `reference/`, `performance.md` with its charts, `architecture.md` with its
drawings.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import architecture
import commands
import configuration
import performance

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    everything = tracked()
    pages = [path for path in everything if path.suffix == ".md"]
    pictures = {path for path in everything if path.suffix in (".png", ".svg")}
    for file in {*pages, *pictures, *(linked for page in pages for linked in links(page))}:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target)
    made = {**commands.made(), **configuration.made(), **performance.made(), **architecture.made()}
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    print(f"{len(pages)} pages gathered, {len(made)} pages and drawings made")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines() if (ROOT / line).is_file()]


def links(page: Path) -> Iterator[Path]:
    """The files of the repository that a page refers to, pages aside."""
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target
        if path.is_file() and path.suffix != ".md":
            yield path.resolve().relative_to(ROOT)


if __name__ == "__main__":
    main()
