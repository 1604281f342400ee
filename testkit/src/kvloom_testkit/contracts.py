"""docs/contracts, written from the kit: `python -m kvloom_testkit.contracts DIRECTORY`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path

from kvloom_testkit.engines.requirements import EngineConformance
from kvloom_testkit.engines.sglang.requirements import StorageConformance
from kvloom_testkit.engines.transformers.requirements import CacheConformance
from kvloom_testkit.kinds import CLASSES, conformance_of
from kvloom_testkit.requirements import requirements_of

_INDEX = """# Requirements of plugins

Generated from the conformance kit by `make contracts`; the tests decide. An id never changes its meaning. How to run
the tests: [testkit](../../testkit/README.md). The methods are in `core/src/kvloom/contracts`.

| kind | requirements | |
|---|---|---|
"""


def pages() -> Mapping[str, str]:
    """The text of every page, by file name."""
    found, index = {}, _INDEX
    for kind, cls in {
        **{kind: conformance_of(kind) for kind in CLASSES},
        "engine connector": EngineConformance,
        "engine storage": StorageConformance,
        "engine cache": CacheConformance,
    }.items():
        name = f"{kind.replace(' ', '-')}.md"
        found[name] = _page(kind, cls)
        index += f"| [{kind}]({name}) | {len(requirements_of(cls))} | `{cls.__name__}` |\n"
    return {"README.md": index, **found}


def _page(kind: str, cls: type) -> str:
    parts = [f"# {kind.capitalize()} requirements", inspect.getdoc(cls) or ""]
    for one in requirements_of(cls):
        scope = f" Only for those that claim `{one.needs}`." if one.needs else ""
        parts.append(f"## {one.id} {one.title}\n\n{one.what}{scope}")
        parts.append(f"- **Why**: {one.why}\n- **Usual mistake**: {one.usually}")
    return "\n\n".join(parts) + "\n"


def main(directory: str) -> None:
    """Write all pages into a directory, and remove other pages."""
    into = Path(directory)
    into.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for path in into.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (into / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
