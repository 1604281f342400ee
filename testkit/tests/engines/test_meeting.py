"""Two processes that rename files of one store do so at the same moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvloom_testkit.engines import meeting


def test_a_rename_waits_for_that_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_WAIT_SECONDS", 60.0)
    store = tmp_path / "store"
    store.mkdir()
    one, other = meeting.Meeting(str(store)), meeting.Meeting(str(store))
    other._name = "another process"
    rename = ("os.rename", (store / "draft", os.fsencode(store / "file"), -1, -1))
    waiting = threading.Thread(target=one.hear, args=rename)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    other.hear(*rename)
    waiting.join()
    assert (one._count, one._missed, other._count, other._missed) == (1, 0, 1, 0)


def test_others_renames_and_those_in_vain_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_WAIT_SECONDS", 0.0)
    one = meeting.Meeting(str(tmp_path / "store"))
    one.hear("os.rename", (tmp_path / "store" / "file", tmp_path / "elsewhere", -1, -1))
    one.hear("os.remove", (tmp_path / "store" / "file", -1))
    assert one._count == 0
    for _ in range(2 * meeting._MOST_MISSED):
        one.hear("os.rename", (tmp_path / "draft", tmp_path / "store" / "file", -1, -1))
    assert one._count == one._missed == meeting._MOST_MISSED
