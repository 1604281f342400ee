"""Sessions of pytest in this process: a fresh one takes seconds to import what is here already."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

_WITHOUT = ("cacheprovider", "xdist", "unraisableexception")  # the last one collects garbage twice


@dataclass(frozen=True)
class Done:
    """What a command said, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Sessions:
    """Runs them in one directory. Not by `pytester`, which makes each session import anew what was imported."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def run(self, place: Path, *arguments: str, forget: tuple[str, ...] = ()) -> Done:
        """forget: modules that are others there than in earlier sessions."""
        self.monkeypatch.chdir(place)
        for name in ("kvloom_testkit.installed", *forget):
            self.monkeypatch.delitem(sys.modules, name, raising=False)
        quiet = ["-q", *(f"-pno:{name}" for name in _WITHOUT), "--import-mode=importlib", "--basetemp=tmp"]
        status = pytest.main([*quiet, *arguments])
        return Done(int(status), *self.capsys.readouterr())
