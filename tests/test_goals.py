"""The table of goals for speed, in bench/results."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts" / "docs"


def test_the_table_of_goals_says_what_was_measured_last() -> None:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import goals
    finally:
        sys.path.remove(str(SCRIPTS))
    assert goals.PAGE.read_text(encoding="utf-8") == goals.page(), "run: python scripts/docs/goals.py"
