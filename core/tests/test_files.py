"""Files of users: after a failure they are as they were, and nothing lies beside them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvloom import check_folder, replace_file

FullDisk = Callable[[], AbstractContextManager[None]]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, full_disk: FullDisk) -> None:
    file = tmp_path / "kv.yaml"
    for content in ("first", b"second \xff", "third, ä"):
        replace_file(file, content)
        before = file.read_bytes()
        assert before == (content.encode() if isinstance(content, str) else content)
        with full_disk(), pytest.raises(OSError) as raised:
            replace_file(file, "new")
        assert raised.value.filename == str(file)
        assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]
    with full_disk(), pytest.raises(OSError):
        replace_file(tmp_path / "other", "new")
    assert [*tmp_path.iterdir()] == [file]


def test_what_is_interrupted_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_file(file, "new")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


def test_links_stay_and_their_targets_are_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "there" / "kv.yaml", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to("there/kv.yaml")
    for content in ("new", "newer"):  # it leads nowhere at first
        replace_file(link, content)
        assert link.is_symlink() and target.read_text() == content
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        replace_file(tmp_path / "loop", "new")


def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    replace_file(tmp_path / "new", "new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode
    for mode in (0o600, 0o664, 0o755):
        (tmp_path / "new").chmod(mode)
        replace_file(tmp_path / "new", "newer")
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("old")
    os.chown(file, 1234, 1234)
    replace_file(file, "new")
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 1234)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
def test_a_file_that_is_not_to_be_written_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("old")
    file.chmod(0o444)
    with pytest.raises(PermissionError):
        replace_file(file, "new")
    assert file.read_text() == "old"


def test_pipes_and_directories_stay(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    replace_file(pipe, "new")
    reader.join()
    assert read == ["new"] and pipe.is_fifo()
    replace_file(Path(os.devnull), "new")
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, "new")
    assert [*tmp_path.iterdir()] == [pipe]


def test_standard_output_is_written_to_also_where_it_is_a_file(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvloom import replace_file\n"
        "replace_file(Path('/dev/stdout'), 'a'); print('b', end='')"
    )
    piped = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    with (tmp_path / "out").open("ab") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True)
    assert piped.stdout == (tmp_path / "out").read_bytes() == b"ab"


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path, full_disk: FullDisk) -> None:
    for folder in (tmp_path, tmp_path / "new" / "newer"):
        check_folder(folder)
        with full_disk(), pytest.raises(OSError):
            check_folder(folder)
        assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError):
            check_folder(folder)
    assert (tmp_path / "file").read_text() == "mine"
