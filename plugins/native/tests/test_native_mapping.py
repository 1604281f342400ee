"""Files of a memory file system as memory; whatever becomes of them, the process goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom_native import MappedFile, are_current, is_memory, map_files

SHM = "/dev/shm"
pytestmark = pytest.mark.skipif(not is_memory(SHM), reason="no tmpfs at /dev/shm, or no library")

SIZE = 300_000


def mapped(path: Path, most_bytes: int = SIZE) -> MappedFile:
    """Raises OSError if it cannot be mapped."""
    file = map_files([(str(path), most_bytes)])[0]
    if isinstance(file, OSError):
        raise file
    return file


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        path = Path(directory, "b\u00e9")
        path.write_bytes(b"x" * SIZE)
        yield path


def test_a_file_is_memory_until_it_is_closed(path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    file = mapped(path)
    assert file.view == b"x" * SIZE and file.current()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    file.view[0] = 0
    assert path.read_bytes() == b"x" * SIZE, "what is written to it stays this process's own"
    assert file.current()
    file.close()
    file.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_each_of_many_is_as_it_is_alone(path: Path) -> None:
    kinds = ["same", "written", "replaced", "deleted", "shorter", "same too"]
    paths = [path.with_name(kind) for kind in kinds]
    for one in paths:
        one.write_bytes(b"x" * SIZE)
    files = [mapped(one) for one in paths]
    rewritten(paths[1])
    path.replace(paths[2])
    paths[3].unlink()
    os.truncate(paths[4], 5000)
    expected = [True, False, False, False, False, True]
    assert are_current([*files, files[0]]) == [*expected, True]
    assert [file.current() for file in files] == expected
    assert are_current([]) == []
    for file in files:
        file.close()


def test_a_file_that_is_not_memory_says_so(tmp_path: Path) -> None:
    assert not is_memory("/proc") and not is_memory(str(tmp_path / "absent"))


@pytest.mark.parametrize("kind", ["absent", "directory", "link", "fifo", "empty"])
def test_what_cannot_be_mapped_is_an_error(path: Path, kind: str) -> None:
    other = path.with_name(kind)
    if kind == "directory":
        other.mkdir()
    elif kind == "link":
        other.symlink_to(path)
    elif kind == "fifo":
        os.mkfifo(other)
    elif kind == "empty":
        other.touch()
    with pytest.raises(OSError):
        mapped(other)


def test_many_are_mapped_as_each_is_alone(path: Path) -> None:
    names = ["first", "absent", "fifo", "empty", "longer", "last"]
    paths = [path.with_name(name) for name in names]
    for one in (paths[0], paths[4], paths[5]):
        one.write_bytes(one.name.encode() * 1000)
    os.mkfifo(paths[2])
    paths[3].touch()
    descriptors = len(os.listdir("/proc/self/fd"))
    found = map_files([(str(one), 5000 if one.name != "longer" else 5999) for one in paths])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    views = [one if isinstance(one, OSError) else bytes(one.view) for one in found]
    assert views[0] == b"first" * 1000 and views[5] == b"last" * 1000
    codes = [one.errno for one in views if isinstance(one, OSError)]
    assert codes == [errno.ENOENT, 0, 0, 0] and str(paths[1]) in str(views[1])
    for one in found:
        if isinstance(one, MappedFile):
            assert one.current()
            one.close()
    assert map_files([]) == []
    with pytest.raises(ValueError, match="zero"):
        map_files([(str(path), SIZE), (f"{path}\0", SIZE)])


def test_nothing_of_a_file_that_is_too_long_is_touched(path: Path) -> None:
    """A page of a hole takes memory of the file system once it is read."""
    for most_bytes in (0, SIZE - 1):
        with pytest.raises(OSError):
            mapped(path, most_bytes)
    hole = path.with_name("hole")
    hole.touch()
    os.truncate(hole, 64 << 20)
    with pytest.raises(OSError):
        mapped(hole, (64 << 20) - 1)
    assert hole.stat().st_blocks == 0


def shortened(path: Path) -> None:
    os.truncate(path, SIZE - 1)


def rewritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"y")


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    os.replace(other, path)


def lengthened(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("change", [shortened, rewritten, replaced, lengthened, os.unlink])
def test_a_file_that_has_changed_is_not_current(path: Path, change: object) -> None:
    file = mapped(path)
    assert callable(change)
    change(path)
    assert not file.current()
    assert file.gone() == (change in (replaced, os.unlink))
    file.close()


def test_being_used_is_no_change(path: Path) -> None:
    file = mapped(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns))
    path.read_bytes()
    assert file.current()
    file.close()


def test_what_is_missing_reads_as_zeros(path: Path) -> None:
    """Without the handler the kernel would end the process."""
    files = [mapped(path) for _ in range(3)]
    os.truncate(path, 5000)
    for file in files:
        assert bytes(file.view) == b"x" * 5000 + bytes(SIZE - 5000)
    with path.open("r+b") as whole:
        whole.write(b"x" * SIZE)
    assert not any(file.current() for file in files), "even if the file is the same again"
    for file in files:
        file.close()
    again = mapped(path)
    assert again.current(), "where another was damaged"
    again.close()


def test_threads_read_while_the_file_becomes_shorter(path: Path) -> None:
    for _ in range(20):
        path.write_bytes(b"x" * SIZE)
        file = mapped(path)
        threads = [threading.Thread(target=lambda file=file: bytes(file.view)) for _ in range(4)]
        for thread in threads:
            thread.start()
        os.truncate(path, 100)
        for thread in threads:
            thread.join()
        assert not file.current()
        file.close()


def test_mappings_are_used_again(path: Path) -> None:
    for _ in range((1 << 14) + 100):
        mapped(path).close()
    files = [mapped(path) for _ in range(100)]
    assert all(file.current() for file in files)
    for file in files:
        file.close()


CHILD = """
import os, sys, threading, time
from kvloom_native import map_files
path = sys.argv[1]
file = map_files([(path, 1 << 20)])[0]
"""
FORGETS = (
    CHILD
    + """
if os.fork() == 0:
    inherited = path in open("/proc/self/maps").read()
    before = file.current()
    file.close()
    mine = map_files([(path, 1 << 20)])[0]
    os._exit(int(inherited or before or not mine.current() or bytes(mine.view[:1]) != b"x"))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert file.current() and bytes(file.view[:1]) == b"x"
"""
)
HELD = """
#include "%s"
#include <chrono>
#include <sys/wait.h>
#include <thread>
int main(int, char** arguments) {
    std::atomic<bool> held{false};
    std::thread holder([&] {
        const std::lock_guard<std::mutex> lock(changing);
        held = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    });
    while (!held) std::this_thread::yield();
    const pid_t child = fork();
    if (!child) {
        alarm(20);
        Mapping mapping;
        const uint64_t most = 1 << 20;
        kvloom_map(&mapping, 1, arguments[1], &most);
        _exit(mapping.error);
    }
    holder.join();
    int status;
    waitpid(child, &status, 0);
    return status;
}
"""


def test_a_forked_child_has_no_mappings(path: Path) -> None:
    """They would keep evicted files in memory for as long as it lives."""
    other = path.rename(path.with_name("blob"))
    command = [sys.executable, "-c", FORGETS, str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_child_that_is_forked_while_the_lock_is_held_goes_on(path: Path, tmp_path: Path) -> None:
    source = tmp_path / "held.cpp"
    source.write_text(HELD % (Path(__file__).parents[1] / "csrc/mapping.cpp"))
    compiled = ["c++", "-std=c++17", "-pthread", str(source), "-o", str(tmp_path / "held")]
    subprocess.run(compiled, check=True, timeout=120)
    assert subprocess.run([tmp_path / "held", path], timeout=60, check=False).returncode == 0


OWN = """
os.truncate(path, 100)
assert bytes(file.view) == b"x" * 100 + bytes(len(file.view) - 100)
"""
FOREIGN = """
import mmap
with open(path, "rb") as other:
    memory = mmap.mmap(other.fileno(), 0, prot=mmap.PROT_READ)
os.truncate(path, 100)
memory[200_000]
"""
FAULTHANDLER = "import faulthandler; faulthandler.enable()\n"
OPEN = """
import os, sys
from kvloom_native import map_files
path = sys.argv[1]
file = map_files([(path, 1 << 20)])[0]
"""


@pytest.mark.parametrize("handled", ["", "before", "after"])
@pytest.mark.parametrize("fault", [OWN, FOREIGN], ids=["own", "foreign"])
def test_only_our_own_faults_are_mended(path: Path, fault: str, handled: str) -> None:
    """Another bus error ends the process, which says so where it would have."""
    before = FAULTHANDLER if handled == "before" else ""
    after = FAULTHANDLER + "assert file.current()\n" if handled == "after" else ""
    program = [sys.executable, "-c", before + OPEN + after + fault, str(path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if fault == OWN else -signal.SIGBUS), done.stderr
    assert ("Bus error" in done.stderr) == (fault == FOREIGN and handled != "")
