"""The settings of stores that live in a directory."""

from __future__ import annotations

from pathlib import Path

from kvloom import Config


class AtPath(Config):
    path: Path
