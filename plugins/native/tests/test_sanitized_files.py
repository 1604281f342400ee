"""Native code for files and memory under the address and undefined behaviour sanitizers, with hostile input."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from test_native_verifier import DAMAGE, again_with_checksum, all_but_the_description_is_right, sealed
from test_sanitized import built
from test_sanitized import pytestmark as pytestmark

NEVER, AUTO, ALWAYS, SEQUENTIAL = range(4)
NOT_A_FILE, TOO_SHORT, TOO_LONG = -1, -2, -4
UNCHANGED, BETWEEN, DURING = range(3)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("reader") / "files", "fuzz/files.cpp", "csrc/files.cpp", "csrc/verify.cpp")


def said(program: Path, *arguments: str | Path) -> list[str]:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


class Plan:
    """Files to read, and what is expected of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.expected: list[str] = []
        self._rng = random.Random(0)

    def add(self, path: Path, expected: tuple[int, int, bool], when: int = UNCHANGED, length: int = 0) -> None:
        if not self.lines or self._rng.random() < 0.1:
            self._mode = self._rng.choice((NEVER, AUTO, SEQUENTIAL))
            self.lines.append("")
        self.lines.append(f"{self._mode} {self._rng.choice((1, 4096))} {when} {length} {path}")
        self.expected.append("{} {} {:d}".format(*expected))

    def blob(self, content: bytes | bytearray, when: int = UNCHANGED, length: int = 0) -> None:
        """A file, of another length from a moment on. It is right if all that it had is there."""
        path = self.folder / str(len(self.expected))
        path.write_bytes(content)
        size = len(content)
        right = all_but_the_description_is_right(bytearray(content), 4096)
        # What is cut while it is read has its first step, and this one may be all.
        short = when != UNCHANGED and length < (size if when == BETWEEN else size if size > 256 << 10 else 0)
        self.add(path, (TOO_SHORT if short else 0, size, right and not short), when, length)


def special(plan: Plan) -> None:
    place = plan.folder / "special"
    place.mkdir()
    os.mkfifo(place / "fifo")
    (place / "link").symlink_to("fifo")
    (place / "empty").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(place / "socket"))
        for name, outcome in (
            ("fifo", NOT_A_FILE),
            ("", NOT_A_FILE),
            ("link", errno.ELOOP),
            ("empty", 0),
            ("socket", errno.ENXIO),
            ("gone", errno.ENOENT),
            ("empty/below", errno.ENOTDIR),
            ("x" * 300, errno.ENAMETOOLONG),
            ("/dev/null", NOT_A_FILE),
            ("/proc/self/status", 0),  # a file that says that it is empty
        ):
            plan.add(place / name, (outcome, 0, False))


def test_files_of_any_kind_are_read_within_their_memory(
    reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    plan, rng = Plan(tmp_path / "blobs"), random.Random(0)
    plan.folder.mkdir()
    special(plan)
    whole = sealed([10, 5000])
    for length in range(4096 + 11):
        plan.blob(whole[:length])
    header = len(sealed([0]))
    for pages in (1, 64, 256, 257):  # a step of a read, a small blob
        for more in (-1, 0, 1):
            content = sealed([pages * 4096 - header + more] if pages > 1 else [max(0, more)])
            plan.blob(content)
            for length in (0, 1, 4095, 4096, len(content) - 1, len(content), len(content) + 5000):
                plan.blob(content, BETWEEN, length)
    for length in (0, 4096, 300 << 10, 700 << 10):
        plan.blob(sealed([1 << 20]), DURING, length)
    plan.blob(sealed([1 << 20]), DURING, 3 << 20)
    for _ in range(1000):
        content = sealed([rng.choice((0, 1, 100, 240, 241, 5000, 40_000)) for _ in range(rng.randrange(5))])
        with suppress(struct.error):
            content = rng.choice(list(DAMAGE.values()))(content, rng.randrange(1 << 17), rng.randrange(256))
        plan.blob(again_with_checksum(content) if rng.random() < 0.7 else content)
    (tmp_path / "plan").write_text("\n".join(plan.lines) + "\n")
    assert said(reader, tmp_path / "plan") == plan.expected
    right = sum(text.endswith(" 1") for text in plan.expected)
    assert 100 < right < len(plan.expected) - 4096


def test_direct_reads_stay_within_their_memory(reader: Path, tmp_path: Path) -> None:
    lines = []
    for number, size in enumerate((1, 4095, 4096, 4097, 8192, (1 << 20) - 1, 1 << 20, (1 << 20) + 1)):
        for when, length in ((UNCHANGED, 0), (BETWEEN, 0), (BETWEEN, 4096), (BETWEEN, size // 2), (DURING, 100)):
            path = tmp_path / f"{number}-{len(lines)}"
            path.write_bytes(bytes(size))
            lines += [f"{ALWAYS} {alignment} {when} {length} {path}\n" for alignment in (1, 4096)]
    (tmp_path / "plan").write_text("\n".join(lines))
    found = [int(line.split()[0]) for line in said(reader, tmp_path / "plan")]
    assert len(found) == len(lines) and set(found) <= {0, TOO_SHORT, errno.EINVAL}, "EINVAL: a file system without it"


def test_mapped_files_that_change_end_nothing(tmp_path: Path) -> None:
    program = built(tmp_path / "mapping", "fuzz/mapping.cpp", "csrc/mapping.cpp")
    lines, expected = [], []
    for size in (1, 4095, 4096, 4097, 5 * 4096, 300_000):
        for length in (-4, -3, -2, -1, 0, size - 1, size + 1, 4096 * (size // 8192), 2 * size):
            path = tmp_path / str(len(lines))
            path.write_bytes(b"x" * size)
            lines.append(f"{length} {path}\n")
            expected.append(f"{TOO_LONG} 0 0 0" if length == -4 else f"0 {size} 1 {int(length == -1)}")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    for name, outcome in (("fifo", NOT_A_FILE), ("empty", NOT_A_FILE), ("", NOT_A_FILE), ("gone", errno.ENOENT)):
        lines.append(f"-1 {tmp_path / name}\n")
        expected.append(f"{outcome} 0 0 0")
    (tmp_path / "plan").write_text("".join(lines))
    (tmp_path / "other").write_bytes(b"x" * 50_000)
    found = said(program, tmp_path / "plan", tmp_path / "other", "50000")
    assert found == [*expected, "1 refused", "1 refused", "child 0, parent 1", "alive"]


def test_copies_stay_within_their_memory(tmp_path: Path) -> None:
    program = built(tmp_path / "copy", "fuzz/copy.cpp", "csrc/copy.cpp")
    rng, lines, expected = random.Random(0), [], []
    far = (2**63, 2**64 - 1, 2**64 - 5)
    for _ in range(600):
        rows, kv_tokens = rng.choice((0, 1, 2, 7)), rng.choice((0, 1, 17, 256))
        token_bytes = rng.choice((0, 1, 2, 15, 16, 63, 64, 65, 100, 4095, 4097))
        chunks = []
        for _ in range(rng.randrange(5)):
            start = rng.randrange(kv_tokens + 1)
            chunks.append((start, rng.randrange(kv_tokens - start + 1)))
        if rng.random() < 0.2:
            chunks.insert(
                rng.randrange(len(chunks) + 1), (rng.choice((0, kv_tokens, *far)), rng.choice((kv_tokens + 1, *far)))
            )
        lines.append(
            " ".join(map(str, (rows, kv_tokens, token_bytes, *(number for chunk in chunks for number in chunk))))
        )
        fits = all(start + tokens <= kv_tokens for start, tokens in chunks)
        expected.append("copied copied" if fits else "refused refused")
    # More than a cache holds, at odd places, and with it rows that are shorter than what is moved at once.
    lines += ["3 1000 4099 1 998 0 1000 7 993", "3 500000 3 1 499998 7 1 0 2 11 5 499999 1"]
    expected += ["copied copied"] * 2
    (tmp_path / "plan").write_text("\n".join(lines) + "\n")
    assert said(program, tmp_path / "plan") == expected and expected.count("refused refused") > 50
