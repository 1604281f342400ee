"""A client's timeout and a tier's deadline: the page, the defaults and the warning say the same."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvloom import Engine, KVSpec, Registry
from kvloom.config import StoredBlock
from kvloom.engine.builder import _opened

PAGE = Path(__file__).parents[1] / "docs/extend/threads-and-forks.md"
SPEC = KVSpec(model="tiny", num_layers=1, num_kv_heads=1, head_size=4, dtype="float32")


def test_no_plugin_is_warned_of_by_its_own_default() -> None:
    timeouts = {
        word: cls.Config.model_fields["timeout"].default
        for word, cls in Registry.discover().types("backend").items()
        if "timeout" in cls.Config.model_fields
    }
    assert {"redis", "fsspec", "mooncake"} <= set(timeouts)
    assert all(seconds <= StoredBlock(type="any").deadline for seconds in timeouts.values())


@pytest.mark.parametrize(("timeout", "warned"), [("3s", False), ("4s", False), ("5s", True)])
def test_the_page_advises_what_is_not_warned_of(timeout: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert "a timeout no longer than the deadline" in " ".join(PAGE.read_text().split())
    tier = {"type": "fsspec", "url": "memory://timeouts", "timeout": timeout, "deadline": "4s"}
    with caplog.at_level(logging.WARNING, "kvloom"):
        Engine.open({"tiers": [tier]}, SPEC).close()
    assert ("calls outlive it" in caplog.text) is warned


def test_whole_seconds_are_seconds_too(caplog: pytest.LogCaptureFixture) -> None:
    def blamed() -> None:
        raise InterruptedError  # what is opened is of no matter here

    backend = SimpleNamespace(config=SimpleNamespace(timeout=60), make=lambda spec: SimpleNamespace(close=str))
    backend.blamed = blamed
    with caplog.at_level(logging.WARNING, "kvloom"), pytest.raises(InterruptedError):
        _opened(SimpleNamespace(name="one", deadline=4.0, backend=backend), SPEC, {}, None)  # type: ignore[arg-type]
    assert "calls outlive it" in caplog.text
