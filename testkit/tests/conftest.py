"""Fixtures of the kit's own tests."""

from __future__ import annotations

import pytest
from sessions import Sessions


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sessions:
    """Sessions of pytest in this process."""
    return Sessions(monkeypatch, capsys)
