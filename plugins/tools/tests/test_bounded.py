"""Files in a store that are longer than they should be, or have holes: no verb reads more than its bound."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from cli_support import CHUNK, SPEC, blobs_in, fill, run

from kvloom import Config
from kvloom.builtin.dict_backend import DictBackend
from kvloom_tools.verify import MAX_BLOB_BYTES, Examiner

HOLE_BYTES = 1 << 43
"""More than there is memory."""


def hollow(file: Path, nbytes: int = HOLE_BYTES) -> None:
    os.truncate(file, 0)
    os.truncate(file, nbytes)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"chunk_tokens: {CHUNK}\ntiers: [{{type: memory, capacity: 1MiB}}, {{type: disk, path: {tmp_path}/store}}]\n"
    )
    return path


def test_stat_and_why_pass_over_a_record_with_holes(config: Path, tmp_path: Path) -> None:
    fill(config, 2)
    os.utime(blobs_in(tmp_path / "store")[0], (1 << 40, 1 << 40))  # in the year 36812
    (file,) = tmp_path.glob("store/spec/+*/*.json")
    hollow(file)
    (tier,) = (one for one in run("stat", config, "--json").json if one["type"] == "disk")
    assert tier["blobs"] == 2 and tier["state"] == "ok"
    assert "ok" in run("stat", config).out


def test_scrub_makes_no_file_dense(config: Path, tmp_path: Path) -> None:
    fill(config, 1)
    (file,) = blobs_in(tmp_path / "store")
    head = file.read_bytes()[:4096]
    hollow(file, 8 << 20)
    run("scrub", config, status=1)
    (copy,) = (tmp_path / "store/quarantine").rglob(f"{file.name}")
    assert not file.exists() and copy.stat().st_blocks * 512 <= 128 << 10

    copy.rename(file.parent.mkdir(parents=True, exist_ok=True) or file)  # and what has content goes there whole
    file.write_bytes(head + torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).numpy().tobytes())
    run("scrub", config, status=1)
    assert copy.stat().st_size == 4096 + (1 << 20)


def test_scrub_holds_a_blob_in_memory_once() -> None:
    backend = DictBackend(Config())
    backend.put("key", [bytes(8 << 20)])
    examiner = Examiner(backend, None, None)
    tracemalloc.start()
    try:
        assert examiner.put_aside("key", copy=False, most=8 << 20) == "deleted"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert [len(buffer) for buffer in examiner._buffers] == [8 << 20]


def test_scrub_and_warm_read_nothing_that_is_longer_than_they_say(config: Path, tmp_path: Path) -> None:
    fill(config, 1)
    (file,) = blobs_in(tmp_path / "store")
    hollow(file)
    (report,) = run("scrub", config, "--json").json
    assert report["unreadable"] == 1 and str(MAX_BLOB_BYTES) in report["problems"][0]["reason"]


@pytest.mark.parametrize("kind", ["device", "holes"])
def test_a_file_that_never_ends_is_refused_where_one_is_named(config: Path, tmp_path: Path, kind: str) -> None:
    endless = Path("/dev/zero")
    if kind == "holes":
        (endless := tmp_path / "holes").touch()
        hollow(endless)
    (spec := tmp_path / "spec.json").write_text(SPEC.to_json())
    for arguments in (["config", "import", endless], ["why", config, "--spec", spec, "--tokens", endless]):
        assert "it has more than" in run(*arguments, status=2).err
