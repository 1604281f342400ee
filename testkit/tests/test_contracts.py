"""The pages in docs/contracts say what the kit says."""

from __future__ import annotations

from pathlib import Path

from kvloom_testkit import contracts

PAGES = Path(__file__).parents[2] / "docs/contracts"


def test_the_pages_are_those_of_the_kit() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*")}
    assert there == contracts.pages(), "run `make contracts`"
