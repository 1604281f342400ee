"""The verifier under the address and undefined behaviour sanitizers, with damaged blobs."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from test_native_verifier import DAMAGE, again_with_checksum, all_but_the_description_is_right, sealed

SOURCES = Path(__file__).parents[1]
BLOBS = 4000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_nothing_is_read_outside_a_damaged_blob(tmp_path: Path) -> None:
    program = tmp_path / "damage"
    build = ["g++", "-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [SOURCES / "fuzz/damage.cpp", SOURCES / "csrc/verify.cpp"]
    subprocess.run([*build, *sources, "-o", program], check=True, timeout=300)
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
