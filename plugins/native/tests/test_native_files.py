"""Files are opened and read by two calls, each with an outcome of its own."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvloom import PluginError, native
from kvloom_native import NOT_A_FILE, TOO_SHORT, Files

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler has built the library")


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(b"a" * 5000)
    (tmp_path / "empty").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "b\u00e9").write_bytes(bytes(range(256)) * 8192)
    return tmp_path


NAMES = ("a", "gone", "directory", "link", "fifo", "b\u00e9", "empty")


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_each_has_its_outcome(place: Path, mode: str) -> None:
    before = opened()
    files = Files([str(place / name) for name in NAMES])
    said = [files.error(number) for number in range(len(NAMES))]
    assert said == [0, errno.ENOENT, NOT_A_FILE, errno.ELOOP, NOT_A_FILE, 0, 0]
    assert opened() == before + 3
    steps: list[int] = []
    memory = {number: memoryview(mmap.mmap(-1, files.size(number))) for number in (0, 5)}
    files.place_slowly(0, memory[0], lambda num_bytes: None)
    files.place_slowly(5, memory[5], steps.append)
    files.read(mode)  # type: ignore[arg-type]
    assert opened() == before
    assert bytes(memory[0]) == b"a" * 5000 and bytes(memory[5]) == bytes(range(256)) * 8192
    assert steps == sorted(steps) and steps[-1] == files.size(5) and len(steps) > 1
    assert not files.error(0) and not files.error(5)
    files.close()
    assert opened() == before


def test_a_file_that_became_shorter(place: Path) -> None:
    files = Files([str(place / "a"), str(place / "b\u00e9")])
    for number in (0, 1):
        files.place_slowly(number, memoryview(mmap.mmap(-1, files.size(number))), lambda num_bytes: None)
    os.truncate(place / "a", 100)
    files.read("never")
    assert (files.error(0), files.error(1)) == (TOO_SHORT, 0)


def test_what_a_sink_raises_ends_its_telling_only(place: Path) -> None:
    files = Files([str(place / "a"), str(place / "b\u00e9")])
    memory = memoryview(mmap.mmap(-1, files.size(1)))
    told: list[int] = []

    def refuse(num_bytes: int) -> None:
        told.append(num_bytes)
        raise RuntimeError("no")

    files.place_slowly(1, memory, refuse)
    files.read("never")
    assert len(told) == 1 and str(files.raised[1]) == "no" and not files.error(1)
    assert bytes(memory) == bytes(range(256)) * 8192, "all of it is there all the same"


def test_memory_that_is_too_short_or_read_only_is_refused(place: Path) -> None:
    files = Files([str(place / "a")])
    for memory in (memoryview(bytearray(4999)), memoryview(bytes(5000)), memoryview(bytearray(10_000))[::2]):
        with pytest.raises(ValueError, match="bytes of memory"):
            files.place_slowly(0, memory, lambda num_bytes: None)
    files.close()


def test_a_path_with_a_zero_character_is_none(place: Path) -> None:
    with pytest.raises(ValueError, match="zero character"):
        Files([str(place / "a"), "b\0c"])


def test_a_path_is_named_as_the_system_names_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a locale whose encoding is not UTF-8."""
    path = os.fsencode(place) + b"/caf\xe9"
    Path(os.fsdecode(path)).write_bytes(b"a")
    latin = path.decode("latin-1")
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("latin-1"))
    files = Files([latin])
    files.close()
    assert not files.error(0)


def test_nothing_to_read() -> None:
    files = Files([])
    files.read("auto")
    files.close()


def test_a_library_with_other_functions_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.own_library() is not None and native.own_library(brief=True) is not None
    monkeypatch.setattr(native, "_INTERFACE", "another")
    assert native.own_library() is None and native.own_library(brief=True) is None
    with pytest.raises(PluginError, match=r"other functions .* pip install \S+ --force-reinstall --no-deps"):
        native.load_own()


@pytest.mark.parametrize("changed", ["", "name", "argument", "struct", "code", "body", "comment"])
def test_the_interface_is_that_of_the_sources(tmp_path: Path, changed: str) -> None:
    """A function or a shared struct that changes makes it another; nothing else does."""
    sources = shutil.copytree(Path(__file__).parent.parent / "csrc", tmp_path / "csrc")
    mapping = sources / "mapping.cpp"
    old, new = {
        "": ("", ""),
        "name": ("void kvloom_unmap(", "void kvloom_unmap_it("),
        "argument": ("const uint64_t* most_bytes) {", "const int64_t* most_bytes) {"),
        "struct": ("int32_t slot;", "int64_t slot;"),
        "code": ("NO_SLOT = -3", "NO_SLOT = -9"),
        "body": ("munmap(mapping->at, mapping->size);", "munmap(mapping->at, mapping->size + 0);"),
        "comment": ("// One mapped file.", "// A mapped file; one."),
    }[changed]
    text = mapping.read_text()
    assert old in text
    mapping.write_text(text.replace(old, new))
    done = subprocess.run(["cmake", "-P", sources / "interface.cmake"], capture_output=True, text=True, check=True)
    found = done.stderr.strip()
    if changed in ("", "body", "comment"):
        assert found == native._INTERFACE, f"put {found} into kvloom/native.py, and install kvloom-native anew"
    else:
        assert found != native._INTERFACE
