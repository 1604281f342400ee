"""Fixtures of the kit's own tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from places import in_memory
from sessions import Sessions


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory: stores of the kit's tests wait for a disk hundreds of times."""
    with in_memory(tmp_path) as place:
        yield place


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sessions:
    """Sessions of pytest in this process."""
    return Sessions(monkeypatch, capsys)
