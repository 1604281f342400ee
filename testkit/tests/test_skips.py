"""Places where a requirement may be skipped: the kit, `make`, and functions that `make` uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvloom_testkit.pytest_plugin import _asked_for_by_make


def test_what_make_uses_may_say_that_there_is_nothing_to_open() -> None:
    def fixture(*argnames: str) -> list[Any]:
        return [SimpleNamespace(argnames=argnames)]

    fixtures = {
        "make": fixture("server", "tmp_path"), "server": fixture("installed"), "installed": fixture(),
        "later": fixture("tmp_path"),
    }  # fmt: skip
    item: Any = SimpleNamespace(_fixtureinfo=SimpleNamespace(name2fixturedefs=fixtures))
    assert _asked_for_by_make(item) == {"make", "server", "installed", "tmp_path"}
