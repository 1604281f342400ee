"""The tools that requirements use: they wait without spinning, and restore only what was changed."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvloom_testkit import effort, running, subjects
from kvloom_testkit.process_state import put_back
from kvloom_testkit.reference.observer import CountingObserver
from kvloom_testkit.running import in_fresh_process, with_torch
from kvloom_testkit.subjects import Subject


def test_what_takes_long_to_put_back_is_left_alone_where_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call imports torch's compiler."""
    mode, put = [False], list[bool]()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: mode[0])
    monkeypatch.setattr(torch, "use_deterministic_algorithms", put.append)
    with put_back():
        pass
    assert put == []
    with put_back():
        mode[0] = True
    assert put == [False]


@pytest.mark.parametrize("name", ["", "kvloom"])
def test_loggers_are_put_back(name: str) -> None:
    """Else a component that changes one would not be seen to do so a second time."""
    log = logging.getLogger(name)
    before = log.level, log.handlers[:], log.propagate, log.disabled
    with put_back():
        log.setLevel(logging.CRITICAL)
        log.addHandler(logging.NullHandler())
        log.propagate, log.disabled = not log.propagate, True
    assert (log.level, log.handlers, log.propagate, log.disabled) == before


def test_what_takes_long_to_come_true_is_asked_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(running, "time", clock)
    asked: list[float] = []
    assert not running.comes_true(lambda: asked.append(now[0]), 5.0)  # type: ignore[func-returns-value]
    assert len(asked) < 20 and asked[0] == 0.0 and asked[-1] == 5.0
    assert running.comes_true(lambda: now[0] >= 6.0, 5.0)


def test_a_slow_store_is_given_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(effort, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert [*effort.turns(40)] == [*range(10)]
    monkeypatch.setattr(effort, "thorough", True)
    assert [*effort.turns(40)] == [*range(200)]
    monkeypatch.setattr(effort, "thorough", False)
    monkeypatch.setattr(effort, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert [*effort.turns(40)] == [*range(40)]


def test_harnesses_are_looked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(subjects.metadata, "entry_points", lambda *, group, name: asked.append(name) or [])
    subject = Subject("observer", "kit_counting", CountingObserver)
    subject.tests()
    assert subject.make(tmp_path) is not subject.make(tmp_path)
    assert asked == ["observer.kit_counting"]


def test_a_fresh_process_imports_nothing_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yaml.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    assert str(tmp_path) not in in_fresh_process("import yaml; print(yaml.__file__)")


def test_threads_begin_restless_also_where_a_program_is_audited() -> None:
    """A hook lets another thread in while a profile function is being set, which Python 3.11 refuses."""
    in_fresh_process(
        "import sys, time\n"
        "from kvloom_testkit.running import together\n"
        "sys.addaudithook(lambda event, _: time.sleep(0.01) if event == 'sys.setprofile' else None)\n"
        "together(*[lambda: None] * 4, restless=True)\n"
    )


def test_processes_with_torch_share_an_interpreter_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys, torch; print(hash('x'), sys.argv[1:], os.environ['HERE'], os.getcwd(), torch.mine)"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", "now")
    said = [with_torch(f"import torch; torch.mine = {one}\n{code}", str(one), environment={}) for one in (1, 2)]
    ends = [f"['{one}'] now {tmp_path} {one}\n" for one in (1, 2)]
    assert [line.partition(" ")[2] for line in said] == ends
    assert len({line.partition(" ")[0] for line in said} | {str(hash("x"))}) == 2, "one hash seed, which is another"
    with pytest.raises(AssertionError, match=r"failed \(1\):[\s\S]*AttributeError"):
        with_torch("import torch; torch.mine", environment={})
    with pytest.raises(AssertionError, match=r"failed \(-9\)"):
        with_torch("import os; os.kill(os.getpid(), 9)", environment={})
    with pytest.raises(AssertionError, match=r"failed \(\)"):
        with_torch("import os; os.kill(os.getppid(), 9)", environment={})
    assert with_torch("print(1)", environment={}) == "1\n"
