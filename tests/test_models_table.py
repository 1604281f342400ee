"""The table of models in docs/use/vllm.md says what the tests with real vLLM run."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KIT = "test_engine_conformance.py::test_it_meets_the_requirements_of_connectors"
"""Runs the kit's models, whose dense one is a tiny Llama, too."""


def script() -> Any:
    folder = str(ROOT / "scripts" / "docs")
    sys.path.insert(0, folder)
    try:
        import models
    finally:
        sys.path.remove(folder)
    return models


def test_the_table_is_made_from_what_is_declared() -> None:
    models = script()
    assert models.PAGE.read_text(encoding="utf-8") == models.page(), "run: python scripts/docs/models.py"


def test_every_claim_names_a_test_that_runs_its_model() -> None:
    models = script()
    tests: dict[str, ast.FunctionDef] = {}
    sources: dict[str, str] = {}
    for file in models.TESTS.glob("test_*.py"):
        sources[file.name] = file.read_text(encoding="utf-8")
        found = (node for node in ast.parse(sources[file.name]).body if isinstance(node, ast.FunctionDef))
        tests |= {f"{file.name}::{node.name}": node for node in found if node.name.startswith("test_")}
    claims = [
        (model, test) for kind in models.kinds() for model in kind.models for test in (model.test, *model.also.values())
    ]
    assert len(claims) > 20
    for model, test in claims:
        assert test in tests, f"{model.name}: there is no {test}"
        declared = f"run_by({'WINDOWS' if 'windows' in test else 'STATES'})" in sources[test.partition("::")[0]]
        of_kit = model.name == "run" and test == KIT
        assert model.name in words_of(tests[test]) or (declared and test == model.test) or of_kit, (
            f"{test} does not run {model.name}"
        )


def words_of(test: ast.FunctionDef) -> set[str]:
    """The arguments of a test, and every string in it."""
    constants = (node.value for node in ast.walk(test) if isinstance(node, ast.Constant))
    return {argument.arg for argument in test.args.args} | {value for value in constants if isinstance(value, str)}
