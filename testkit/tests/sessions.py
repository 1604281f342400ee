"""Sessions of pytest in this process: a fresh one takes seconds to import what is here already."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

_WITHOUT = ("cacheprovider", "xdist", "unraisableexception")  # the last one collects garbage twice


@dataclass(frozen=True)
class Done:
    """The output of a command, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Sessions:
    """Runs them in one directory. Not by `pytester`, which makes each session import anew what was imported."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def run(self, place: Path, *arguments: str) -> Done:
        """Forgets the modules of the place, before and afterwards: others have the same names."""
        self.monkeypatch.chdir(place)
        self.monkeypatch.delitem(sys.modules, "kvloom_testkit.installed", raising=False)
        packages = {path.stem for path in (place / "src").glob("*")}
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            self.monkeypatch.delitem(sys.modules, name)
        before = {*sys.modules}
        quiet = ["-q", *(f"-pno:{name}" for name in _WITHOUT), "--import-mode=importlib", "--basetemp=tmp"]
        status = pytest.main([*quiet, *arguments])
        for name in {*sys.modules} - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(place)):
                del sys.modules[name]
        return Done(int(status), *self.capsys.readouterr())
