"""Fixtures of several tests here."""

from pathlib import Path

import pytest
from halves_support import pretended

__all__ = ["pretended"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights, of which only the bytes count."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(3 << 20))
    (folder / "config.json").write_text("{}")
    return folder
