"""Native code under the address and undefined behaviour sanitizers: damaged blobs, chains, replies."""

from __future__ import annotations

import hashlib
import random
import shutil
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from test_native_verifier import DAMAGE, again_with_checksum, all_but_the_description_is_right, sealed

from kvloom import keys
from kvloom_native import resp

SOURCES = Path(__file__).parents[1]
BLOBS = 4000


pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")]


def built(program: Path, *sources: str) -> Path:
    build = ["g++", "-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([*build, *(SOURCES / source for source in sources), "-o", program], check=True, timeout=300)
    return program


def test_nothing_is_read_outside_a_damaged_blob(tmp_path: Path) -> None:
    program = built(tmp_path / "damage", "fuzz/damage.cpp", "csrc/verify.cpp")
    rng = random.Random(0)
    right = 0
    with (tmp_path / "blobs").open("wb") as file:
        for _ in range(BLOBS):
            blob = sealed([rng.choice((0, 1, 100, 240, 241, 5000, 40_000)) for _ in range(rng.randrange(5))])
            for _ in range(rng.randrange(3)):
                with suppress(struct.error):  # too short for that
                    damage = rng.choice(list(DAMAGE.values()))
                    blob = damage(blob or bytearray(1), rng.randrange(1 << 17), rng.randrange(256))
                blob = again_with_checksum(blob) if rng.random() < 0.7 else blob
            most = rng.choice((2, 4096))
            right += all_but_the_description_is_right(blob, most)
            file.write(struct.pack("<III", len(blob), most, rng.choice((1000, 4096, 1 << 20))) + blob)
    done = subprocess.run([program, tmp_path / "blobs"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{right} of {BLOBS} right\n" and 0.1 * BLOBS < right < 0.9 * BLOBS


@pytest.mark.skipif(keys._native_chain() is None, reason="a processor without SHA-256 instructions")
def test_nothing_is_read_or_written_outside_a_chain(tmp_path: Path) -> None:
    program = built(tmp_path / "chain", "fuzz/chain.cpp", "csrc/chain.cpp")
    rng, expected = random.Random(0), []
    with (tmp_path / "chains").open("wb") as file:
        for _ in range(1000):
            count, chunk_tokens, width = rng.randrange(700), rng.randrange(1, 300), rng.choice((4, 8))
            tokens = [rng.randrange(-(2**31), 2**31) for _ in range(count)]
            if width == 8 and tokens and rng.random() < 0.2:
                tokens[rng.randrange(count)] = rng.choice((2**31, -(2**31) - 1, 2**63 - 1, -(2**63)))
            file.write(struct.pack(f"<III{count}{'q' if width == 8 else 'i'}", count, width, chunk_tokens, *tokens))
            expected.append(last_digest(tokens, chunk_tokens))
    done = subprocess.run([program, tmp_path / "chains"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == expected and expected.count("refused") > 50


def last_digest(tokens: list[int], chunk_tokens: int) -> str:
    if not all(-(2**31) <= token < 2**31 for token in tokens):
        return "refused"
    digest = bytes([7] * 32)
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        these = struct.pack(f"<{chunk_tokens}i", *tokens[start : start + chunk_tokens])
        digest = hashlib.sha256(digest + these).digest()
    return digest.hex() if len(tokens) >= chunk_tokens else ""


CLOSED, WRONG_END, ENDLESS = (str(code) for code in (resp.CLOSED, resp.WRONG_END, resp.ENDLESS))


def test_nothing_is_read_or_written_outside_a_reply(tmp_path: Path) -> None:
    program = built(tmp_path / "resp", "fuzz/resp.cpp")
    rng, expected = random.Random(0), []
    with (tmp_path / "replies").open("wb") as file:
        for _ in range(3000):
            replies = [rng.choice(REPLIES)(rng) for _ in range(rng.randrange(1, 5))]
            data = bytearray(b"".join(replies))
            if rng.random() < 0.5:
                at = rng.randrange(len(data))
                data[at : at + rng.choice((1, 1, 1, 2, 1 << 20))] = rng.choice(
                    (b"", b"", b"9", b"\r", b"\n", b"$", b"-")
                )
            largest, step = rng.choice((700, 1 << 20)), rng.choice((1, 7, 100, 1 << 12, 1 << 20))
            file.write(struct.pack("<IIII", len(data), len(replies) + 1, largest, step) + data)
            expected.append(outcomes(bytes(data), len(replies) + 1, largest))
    done = subprocess.run([program, tmp_path / "replies"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split() for line in done.stdout.splitlines()] == expected
    for outcome in (CLOSED, WRONG_END, ENDLESS, "blob", "line"):
        assert sum(outcome in one for one in expected) > 50, outcome


def announced(rng: random.Random) -> bytes:
    blob = rng.randbytes(rng.choice((0, 1, 2, 21, 22, 23, 700, 16_384, 40_000)))
    return b"$%d\r\n%b\r\n" % (len(blob), blob)


REPLIES = (
    announced, announced, announced,
    lambda rng: rng.choice((b"$-1\r\n", b"+OK\r\n", b"-ERR no\r\n", b":7\r\n", b"$\r\n", b"\r\r\n", b"\r\n")),
    lambda rng: b"$%d\r\n" % rng.choice((701, 2**31, 2**32, 10**17, 10**18 - 1, 10**18, 2**64, 10**40)),
    lambda rng: b"x" * rng.choice((3, 20_000)),
)  # fmt: skip


def outcomes(data: bytes, replies: int, largest: int) -> list[str]:
    """The outcomes of `replies` replies of which only `data` comes. Lines are short, or far too long."""
    said: list[str] = []
    for _ in range(replies):
        line, found, rest = data.partition(b"\r\n")
        if not found or len(line) > 8 << 10:
            return [*said, ENDLESS if len(line) > 8 << 10 else CLOSED]
        data = rest
        if not (line[:1] == b"$" and line[1:].isdigit() and len(line) <= 19):
            said += ["line", str(len(line))]
            continue
        size = int(line[1:])
        if size > largest:
            return [*said, str(size)]
        if len(data) < size + 2:
            return [*said, CLOSED]
        if data[size : size + 2] != b"\r\n":
            return [*said, WRONG_END]
        total = 0
        for byte in data[:size]:
            total = (total * 31 + byte) % 2**64
        said += ["blob", str(size), str(total)]
        data = data[size + 2 :]
    return said
