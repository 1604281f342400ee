"""Users' files are replaced as a whole, by `kvloom.replace_file`: a full disk costs nobody what was there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITES = re.compile(r"\.write_(?:text|bytes)\(|\bopen\((?:[^()]*, )?\"[wx]b?\"|\.savefig\((?!drawn\b)|tofile\(")
ALLOWED = {
    "core/src/kvloom/cli/main.py": "/dev/null",
    "core/src/kvloom/files.py": "the draft",
    "plugins/connector_transformers/src/kvloom_connector_transformers/demo/command.py": "logs, which grow",
    "plugins/connector_vllm/src/kvloom_connector_vllm/adapter/footprint.py": "in a temporary folder",
}


def writing(folder: Path) -> set[str]:
    """The modules that write files in place. What serves tests, in `testing`, writes in folders of its own."""
    files = [one for name in ("core", "plugins") for one in (folder / name).glob("**/src/**/*.py")]
    found = [one for one in files if WRITES.search(one.read_text(encoding="utf-8"))]
    return {str(one.relative_to(folder)) for one in found if "testing" not in str(one)}


def test_no_module_writes_a_file_in_place() -> None:
    assert writing(ROOT) == set(ALLOWED)


def test_a_write_is_seen(tmp_path: Path) -> None:
    lines = ("path.write_text(a)", 'with path.open("w") as f:', 'open(path, "wb")', "figure.savefig(path, dpi=90)")
    for number, line in enumerate(lines):
        file = tmp_path / "core" / "src" / f"m{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{line}\n")
    assert len(writing(tmp_path)) == len(lines)
    file.write_text('figure.savefig(drawn, format="png")\nreplace_file(path, a)\nopen(path, "rb")\n')
    assert len(writing(tmp_path)) == len(lines) - 1
