"""Mutants of engines' references, read and not imported: importing them needs the engine."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import kvloom_testkit


def mutants(folder: str) -> list[Any]:
    """Parameters of each mutant in a folder: its `MODULE:CLASS`, and the id that it breaks."""
    found = []
    for path in sorted((Path(kvloom_testkit.__file__).parent / "mutants" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                name = f"kvloom_testkit.mutants.{folder}.{path.stem}:{node.name}"
                for line in node.body:  # what is legal though odd breaks nothing
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "breaks":
                        breaks = ast.literal_eval(line.value)
                        found.append(pytest.param(name, breaks, id=f"{breaks}-{node.name}"))
    return found
