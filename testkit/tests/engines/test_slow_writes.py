"""A file that one process opens to write is empty until the other has looked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloom_testkit.engines import slow_writes
from kvloom_testkit.engines.slow_writes import Meeting, SlowFiles

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(slow_writes, "_WAIT_SECONDS", 60.0)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "file").write_text("of another process")
    return tmp_path / "store"


def process(store: Path, *, both: bool) -> tuple[SlowFiles, Meeting]:
    files = SlowFiles(str(store))
    files.both = both
    return files, Meeting(f"{store}.meeting")


def started(work: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "it waits"
    return thread


def test_an_opened_file_is_empty_until_two_requests_are_answered(store: Path) -> None:
    writer, meeting = process(store, both=False)
    writer.writer = meeting
    for name in ("file", "new"):
        opening = started(writer.on_audit, "open", (str(store / name), "w", WRITE))
        assert (store / name).read_bytes() == b"" and meeting.count("opened")
        meeting.tell("answered")
        opening.join(0.05)
        assert opening.is_alive(), "that one had begun before"
        meeting.tell("answered")
        opening.join(60)
        assert not opening.is_alive()


def test_where_both_write_the_reader_renames_what_the_writer_has_opened(store: Path) -> None:
    writer, meeting = process(store, both=True)
    reader, met = process(store, both=True)
    writer.writer, reader.reader = meeting, met
    opening = started(writer.on_audit, "open", (os.fsencode(store / "file"), "w", WRITE))
    assert (store / "file").read_text() == "of another process", "the reader may not have written it yet"
    reader.on_audit("os.rename", (store / "file", store / "other", -1, -1))
    assert (store / "file").read_bytes() == b"" and opening.is_alive()
    for _ in range(2):
        met.tell("answered")
    opening.join(60)
    assert not opening.is_alive()


def test_other_files_and_those_that_are_new_are_left_alone(store: Path) -> None:
    writer, meeting = process(store, both=False)
    writer.writer = meeting
    for path, flags in (
        (store / "file", os.O_RDONLY), (store / "file", os.O_RDWR), (store / "new", WRITE | os.O_EXCL),
        (store.parent / "new", WRITE),
    ):  # fmt: skip
        writer.on_audit("open", (str(path), None, flags))
    writer.on_audit("open", (3, "w", WRITE))
    writer.on_audit("os.rename", (store / "file", store / "other", -1, -1))
    assert [one.name for one in store.iterdir()] == ["file"] and (store / "file").stat().st_size
    assert not meeting.count("opened") + meeting.count("renaming")


def test_waits_in_vain_come_to_an_end(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_writes, "_WAIT_SECONDS", 0.0)
    _, meeting = process(store, both=False)
    asked: list[int] = []
    for _ in range(2 * slow_writes._MAX_MISSED):
        meeting.wait(lambda: asked.append(1))
    assert meeting._missed == slow_writes._MAX_MISSED == len(asked)
