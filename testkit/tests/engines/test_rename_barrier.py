"""Two processes that rename files of one store do so at the same moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvloom_testkit.engines import rename_barrier


def test_a_rename_waits_for_that_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename_barrier, "_WAIT_SECONDS", 60.0)
    store = tmp_path / "store"
    store.mkdir()
    one, other = rename_barrier.RenameBarrier(str(store)), rename_barrier.RenameBarrier(str(store))
    other._name = "another process"
    rename = ("os.rename", (store / "draft", os.fsencode(store / "file"), -1, -1))
    for _ in range(2):
        waiting = threading.Thread(target=one.on_audit, args=rename)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        other.on_audit(*rename)
        waiting.join()
    assert (one._count, one._missed, other._count, other._missed) == (2, 0, 2, 0)


def test_others_renames_and_those_in_vain_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename_barrier, "_WAIT_SECONDS", 0.0)
    one = rename_barrier.RenameBarrier(str(tmp_path / "store"))
    one.on_audit("os.rename", (tmp_path / "store" / "file", tmp_path / "elsewhere", -1, -1))
    one.on_audit("os.remove", (tmp_path / "store" / "file", -1))
    assert one._count == 0
    for _ in range(2 * rename_barrier._MAX_MISSED):
        one.on_audit("os.rename", (tmp_path / "draft", tmp_path / "store" / "file", -1, -1))
    assert one._count == one._missed == rename_barrier._MAX_MISSED
