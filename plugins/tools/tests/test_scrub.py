"""`kvloom scrub`: what it calls corrupt, what it does about it, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from cli_support import CHUNK, SPEC, Rack, blobs_in, fill, key_of, rack_installed, run
from clock_support import Hang

from kvloom import Engine, envelope

Blobs = list[Path]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def config(tmp_path: Path, root: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"chunk_tokens: {CHUNK}\ntiers:\n- {{type: memory, capacity: 1MiB}}\n- {{type: disk, path: {root}}}\n"
    )
    return path


@pytest.fixture
def blobs(config: Path, root: Path) -> Blobs:
    fill(config, 6)
    assert len(blobs_in(root)) == 6
    return blobs_in(root)


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Path]:
    """A configuration of a store in memory that does what a test says."""
    path = tmp_path / "rack.yaml"
    path.write_text(f"chunk_tokens: {CHUNK}\ntiers: [{{type: rack, deadline: 2s}}]\n")
    with rack_installed(tmp_path):
        yield path


def scrub(*arguments: object, status: int = 0) -> dict[str, Any]:
    (report,) = run("scrub", *arguments, "--json", status=status).json
    return dict(report)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def sign(header: bytearray) -> bytes:
    """A header with its checksum made right."""
    header[40:56] = bytes(16)
    header[40:56] = xxhash.xxh3_128_digest(bytes(header))
    return bytes(header)


# -- what is corrupt ---------------------------------------------------------------------------------------------------


def test_a_clean_store(config: Path, root: Path, blobs: Blobs) -> None:
    before = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    report = scrub(config)
    assert (report["blobs"], report["ok"], report["corrupt"], report["clean"]) == (6, 6, 0, True)
    assert report["bytes"] == sum(file.stat().st_size for file in blobs)
    assert (report["foreign"], report["in_quarantine"], report["problems"]) == (0, 0, [])
    assert {file: file.read_bytes() for file in root.rglob("*") if file.is_file()} == before


def test_every_kind_of_damage_is_found_and_put_aside(config: Path, root: Path, blobs: Blobs) -> None:
    flip(blobs[0], 4200)
    flip(blobs[1], 130)
    os.truncate(blobs[2], blobs[2].stat().st_size - 1)
    blobs[3].write_bytes(b"")
    blobs[4].write_bytes(blobs[5].read_bytes())
    damaged = {key_of(file, root): file.read_bytes() for file in blobs[:5]}
    report = scrub(config, status=1)
    assert (report["blobs"], report["ok"], report["corrupt"], report["in_quarantine"]) == (6, 1, 5, 5)
    assert {one["key"] for one in report["problems"]} == set(damaged)
    assert {(one["verdict"], one["action"]) for one in report["problems"]} == {("corrupt", "quarantined")}
    assert blobs_in(root) == blobs[5:]
    assert {key_of(file, root / "quarantine"): file.read_bytes() for file in blobs_in(root / "quarantine")} == damaged
    again = scrub(config)
    assert (again["blobs"], again["corrupt"], again["in_quarantine"], again["clean"]) == (1, 0, 5, True)


def test_what_is_in_quarantine_is_no_blob_to_an_engine(config: Path, root: Path, blobs: Blobs) -> None:
    flip(blobs[0], 4200)
    scrub(config, status=1)
    (stat,) = run("stat", config, "--json").json
    assert stat["blobs"] == 5
    tokens = fill(config, 6)  # the engine stores again what was put aside
    assert len(blobs_in(root)) == 6 and len(blobs_in(root / "quarantine")) == 1
    assert len(tokens) == 6 * CHUNK and scrub(config)["ok"] == 6


def test_delete_and_keep(config: Path, root: Path, blobs: Blobs) -> None:
    for file in blobs[:2]:
        flip(file, 4200)
    report = scrub(config, "--keep", status=1)
    assert [one["action"] for one in report["problems"]] == ["kept", "kept"]
    assert blobs_in(root) == blobs
    report = scrub(config, "--delete", status=1)
    assert [one["action"] for one in report["problems"]] == ["deleted", "deleted"]
    assert blobs_in(root) == blobs[2:] and not (root / "quarantine").exists()
    assert "choose one of them" in run("scrub", config, "--delete", "--keep", status=2).err


def test_a_directory_of_a_store(root: Path, blobs: Blobs) -> None:
    flip(blobs[0], 4200)
    assert scrub(root, status=1)["corrupt"] == 1
    assert scrub(root)["ok"] == 5


def test_a_directory_that_is_no_store_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert "no store of kvloom" in run("scrub", tmp_path, status=2).err
    assert os.listdir(tmp_path) == ["mine"]


def test_what_lies_there_instead_of_a_file(config: Path, root: Path, blobs: Blobs) -> None:
    blobs[0].unlink()
    blobs[0].mkdir()
    (problem,) = scrub(config, status=1)["problems"]
    assert problem["action"].startswith("kept: BackendError: cannot be moved: not a regular file")
    assert blobs[0].is_dir()
    assert scrub(config, "--delete", status=1)["problems"][0]["action"] == "deleted"
    assert not blobs[0].exists() and scrub(config)["ok"] == 5


def test_the_screen(config: Path, root: Path, blobs: Blobs) -> None:
    flip(blobs[0], 4200)
    printed = run("scrub", config, status=1).out
    assert re.search(r"disk\s+6\s+\S+\s+5\s+1\s+0\s+0\s+0\s*\n", printed)
    assert re.search(r"^disk: \S+/s, [\d,]+ blobs/s; 1 in quarantine$", printed, re.MULTILINE)
    assert f"disk: corrupt: {key_of(blobs[0], root)}: byte 4096: payload checksum, buffer 0: quarantined" in printed


# -- what is left alone ------------------------------------------------------------------------------------------------


def test_a_later_version_is_unreadable_and_stays(config: Path, root: Path, blobs: Blobs) -> None:
    data = bytearray(blobs[0].read_bytes())
    data[8:10] = struct.pack("<H", envelope.VERSION + 1)
    blobs[0].write_bytes(sign(data[:4096]) + bytes(data[4096:]))
    for option in ("--quarantine", "--delete"):
        report = scrub(config, option)
        assert (report["ok"], report["unreadable"], report["clean"]) == (5, 1, True)
        assert f"format version {envelope.VERSION + 1}" in report["problems"][0]["reason"]
    assert blobs_in(root) == blobs


def test_another_serializer_is_unreadable_and_stays(config: Path, root: Path, blobs: Blobs) -> None:
    other = config.with_name("other.yaml")
    other.write_text(config.read_text().replace("disk,", "disk, serializer: safetensors,"))
    fill(other, 2, first=1000)
    report = scrub(config)
    assert (report["ok"], report["unreadable"]) == (6, 2)
    assert scrub(other)["ok"] == 8, "raw is read everywhere"
    assert scrub(root)["ok"] == 8, "a directory does not say whose it is"


def test_other_things_in_a_listing_are_foreign(rack: Path) -> None:
    fill(rack, 2)
    blobs = Rack.racks["one"]
    blobs |= {"README": b"hello", "spec/x.json": b"{", "plan/0": b"x", "quarantine/README": b"x"}
    before = dict(blobs)
    report = scrub(rack)
    assert (report["ok"], report["foreign"], report["in_quarantine"]) == (2, 1, 1)
    assert blobs == before


def test_a_tier_that_is_only_read_is_not_written_to(config: Path, root: Path, blobs: Blobs) -> None:
    config.write_text(config.read_text().replace("disk,", "disk, write: never,"))
    flip(blobs[0], 4200)
    assert scrub(config, "--delete", status=1)["problems"][0]["action"] == "kept"
    assert blobs_in(root) == blobs


# -- beside a running engine -------------------------------------------------------------------------------------------


def damaged(blob: bytes) -> bytes:
    return blob[:-1] + bytes([blob[-1] ^ 1])


def test_a_blob_that_is_replaced_while_it_is_read_is_not_corrupt(rack: Path) -> None:
    fill(rack, 2)
    blobs = Rack.racks["one"]
    key = next(key for key in blobs if "/0-" in key)
    good, blobs[key] = blobs[key], damaged(blobs[key])
    reads = []

    def replaced(verb: str, at: str) -> None:
        if verb == "get" and at == key:
            reads.append(at)
            if len(reads) == 2:
                blobs[key] = good

    Rack.before["one"] = replaced
    assert scrub(rack)["ok"] == 2
    assert blobs[key] == good


def test_a_blob_that_is_deleted_while_it_is_read_is_not_corrupt(rack: Path) -> None:
    fill(rack, 2)
    blobs = Rack.racks["one"]
    first, second = (key for key in blobs if "/-/" in key)
    Rack.before["one"] = lambda verb, at: blobs.pop(first, None) and None if (verb, at) == ("get", first) else None
    report = scrub(rack)
    assert (report["ok"], report["gone"], report["clean"], second in blobs) == (1, 1, True, True)


@pytest.mark.parametrize("moment", [3, 4])
def test_a_new_version_outlives_the_quarantine_of_the_old(rack: Path, moment: int) -> None:
    """It comes after the verdict (two reads), or between the copy into quarantine and the deletion."""
    fill(rack, 1)
    blobs = Rack.racks["one"]
    (key,) = (key for key in blobs if "/-/" in key)
    good, blobs[key] = blobs[key], damaged(blobs[key])
    reads = []

    def replaced(verb: str, at: str) -> None:
        if verb == "get" and at == key:
            reads.append(at)
            if len(reads) == moment:
                blobs[key] = good

    Rack.before["one"] = replaced
    (problem,) = scrub(rack, status=1)["problems"]
    assert (problem["action"], blobs[key]) == ("replaced", good)


def test_beside_an_engine_that_stores_and_evicts(config: Path, root: Path) -> None:
    config.write_text(config.read_text().replace("disk,", "disk, capacity: 96KiB,"))
    fill(config, 1)  # there is a store before it is read
    stop = threading.Event()

    def serve() -> None:
        import torch

        with Engine.open(config, SPEC) as engine:
            for first in range(0, 10**9, 100):
                if stop.is_set():
                    return
                tokens = torch.arange(first % 10000, first % 10000 + 5 * CHUNK)
                engine.store(tokens, kv=torch.zeros(SPEC.blob_shape(len(tokens)), dtype=torch.bfloat16))
                engine.flush(10)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        found = [scrub(config) for _ in range(8)]
    finally:
        stop.set()
        thread.join()
    assert sum(one["ok"] for one in found) > 0 and all(one["clean"] for one in found)


# -- stores that fail --------------------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_read(rack: Path) -> None:
    fill(rack, 3)

    def broken(verb: str, key: str) -> None:
        if verb == "get" and "/1-" in key:
            raise OSError("a bad sector")

    Rack.before["one"] = broken
    report = scrub(rack, status=1)
    assert (report["ok"], report["corrupt"], report["failed"]) == (2, 0, 1)
    assert report["problems"][0]["reason"] == "OSError: a bad sector"
    assert len([key for key in Rack.racks["one"] if "/-/" in key]) == 3


def test_a_quarantine_that_cannot_be_written_keeps_the_blob(rack: Path) -> None:
    fill(rack, 1)
    blobs = Rack.racks["one"]
    (key,) = (key for key in blobs if "/-/" in key)
    blobs[key] = damaged(blobs[key])

    def full(verb: str, at: str) -> None:
        if verb == "put":
            raise OSError("No space left on device")

    Rack.before["one"] = full
    (problem,) = scrub(rack, status=1)["problems"]
    assert problem["action"] == "kept: OSError: No space left on device"
    assert key in blobs


@pytest.mark.parametrize("verb", ["get", "scan", "open", "close"])
def test_a_store_that_hangs_does_not_hang_the_command(rack: Path, hang: Hang, verb: str) -> None:
    fill(rack, 30)
    Rack.before["one"] = lambda at, key: hang(at, key) if at == verb else None
    done = run("scrub", rack, "--threads", "2", status=None)
    if verb == "close":
        assert done.status == 0
    else:
        assert done.status == 1 and ("deadline" in done.out + done.err), done


def test_a_store_that_cannot_be_opened_keeps_no_other_from_being_verified(rack: Path, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    near = {"type": "disk", "path": str(tmp_path / "near")}
    path.write_text(json.dumps({"chunk_tokens": CHUNK, "tiers": [near, {"type": "rack", "deadline": "3s"}]}))
    fill(path, 3)

    def refused(verb: str, key: str) -> None:
        if verb == "open":
            raise OSError("Connection refused")

    Rack.before["one"] = refused
    disk, other = run("scrub", path, "--json", status=1).json
    assert (disk["ok"], disk["clean"]) == (3, True)
    assert not other["clean"] and "Connection refused" in other["error"]


def test_a_directory_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tmp_path / "engine.yaml"
    config.write_text(f"tiers: [{{type: disk, path: {tmp_path}/file}}]\n")
    assert run("scrub", config, status=2).err.startswith("kvloom: tiers.0: path: cannot write to")


def test_a_tier_that_is_not_there_is_said(root: Path, blobs: Blobs) -> None:
    assert "no stored tier is called 'x'; there are: disk" in run("scrub", root, "--tier", "x", status=2).err


@pytest.mark.slow
def test_the_real_command(root: Path, blobs: Blobs) -> None:
    flip(blobs[0], 4200)
    command = [sys.executable, "-c", "from kvloom.cli.main import main; main()", "scrub", str(root), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)[0]["corrupt"] == 1
