"""`kvloom stat`: what the tiers hold, which of them answer, and who evicts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import CHUNK, SPEC, Rack, fill, rack_installed, run
from clock_support import Hang

from kvloom import Entry, IncompleteListingError

HOLDER = """
import sys
from kvloom_backend_disk.backend import DiskBackend
backend = DiskBackend(DiskBackend.Config(path=sys.argv[1]))
print(backend.hold("evict"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def racks(tmp_path: Path) -> Iterator[Path]:
    """A configuration of two stores in memory, the first of which does what a test says."""
    path = tmp_path / "racks.yaml"
    path.write_text(
        f"chunk_tokens: {CHUNK}\n"
        "tiers: [{type: rack, deadline: 20s}, {type: rack, name: other, label: two, capacity: 1MiB}]\n"
    )
    with rack_installed(tmp_path):
        fill(path, 3)
        yield path


# -- what they hold ----------------------------------------------------------------------------------------------------


@pytest.fixture
def dated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration of memory and two racks, which date what they hold."""
    scan = Rack.scan

    def dated(rack: Rack, prefix: str = "") -> Iterator[Entry]:
        for index, entry in enumerate(scan(rack, prefix)):
            yield entry._replace(modified=1.75e9 + index)

    monkeypatch.setattr(Rack, "scan", dated)
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"chunk_tokens: {CHUNK}\n"
        "tiers:\n"
        "- {type: memory, capacity: 1MiB}\n"
        "- {type: rack, name: warm, capacity: 64KiB}\n"
        "- {type: rack, name: cold, label: two}\n"
    )
    with rack_installed(tmp_path):
        yield path


def test_blobs_are_counted_by_tier_tenant_and_model(dated: Path) -> None:
    fill(dated, 3)
    fill(dated, 1, salt="tenant")
    fill(dated, 1, replace(SPEC, model="other"))
    Rack.racks["one"]["not a key of ours"] = b"x"
    Rack.racks["one"] |= {"spec/broken.json": b"{", "spec/odd.json": b"[]", "spec/partial.json": b'{"spec": 1}'}
    warm, cold = run("stat", dated, "--json").json
    assert (warm["tier"], warm["type"], warm["capacity"], warm["blobs"]) == ("warm", "rack", 64 << 10, 5)
    assert (cold["tier"], cold["capacity"], cold["blobs"]) == ("cold", None, 5)
    assert warm["bytes"] > 5 * CHUNK * 64
    assert warm["oldest"] < warm["newest"]
    assert sorted(warm["tenants"].values()) == [1, 4]
    assert warm["tenants"]["-"] == 4
    held = {one["model"]: (one["revision"], one["blobs"]) for one in warm["fingerprints"].values()}
    assert held == {"tiny": ("abc", 4), "other": ("abc", 1)}
    table = run("stat", dated).out
    assert re.search(r"warm\s+rack\s+5\s+\S+\s+64KiB\s+2025-\d\d-\d\d", table)
    assert re.search(r"warm\s+[0-9a-f]{32}\s+other\s+abc\s+1", table)


def test_an_empty_store(dated: Path) -> None:
    warm, _ = run("stat", dated, "--json").json
    assert (warm["blobs"], warm["oldest"], warm["fingerprints"]) == (0, None, {})


def test_memory_alone_is_nothing_to_look_into(tmp_path: Path) -> None:
    (config := tmp_path / "engine.yaml").write_text("tiers: [memory]\n")
    refused = run("stat", config, status=2).err
    assert refused.startswith("kvloom: tiers: only a memory tier, which no other process can read")


# -- which of them answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["open", "contains", "scan"])
def test_a_tier_that_hangs_is_said_to_and_the_others_are_shown(racks: Path, hang: Hang, verb: str) -> None:
    Rack.before["one"] = lambda at, key: hang(at, key) if at == verb else None
    done = run("stat", racks, "--json", status=1)
    first, second = done.json
    assert (first["tier"], first["state"], first["blobs"]) == ("rack", "no answer", 0)
    assert (first["answer_seconds"] is None) == (verb != "scan")
    assert done.err.startswith("kvloom: tier rack: DeadlineExceeded: ")
    assert (second["tier"], second["state"], second["reason"], second["blobs"]) == ("other", "ok", "", 3)
    assert second["answer_seconds"] < 10


@pytest.mark.parametrize(("verb", "state"), [("open", "not opened"), ("contains", "failed"), ("scan", "failed")])
def test_a_tier_that_fails_is_said_to(racks: Path, verb: str, state: str) -> None:
    def fail(at: str, key: str) -> None:
        if at == verb:
            raise OSError("Connection refused")

    Rack.before["one"] = fail
    done = run("stat", racks, status=1)
    assert re.search(rf"rack\s+{state}\s", done.out) and re.search(r"other\s+ok\s+\S+ \S+\s+unknown", done.out)
    assert done.err.startswith("kvloom: tier rack: ") and done.err.endswith("Connection refused\n")


def test_a_tier_that_cannot_all_be_listed_is_degraded_and_what_is_listed_counts(
    racks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = Rack.scan

    def incomplete(rack: Rack, prefix: str = "") -> Iterator[Entry]:
        yield from scan(rack, prefix)
        if not prefix:
            raise IncompleteListingError("1 places cannot be read, the first: fp/-")

    monkeypatch.setattr(Rack, "scan", incomplete)
    done = run("stat", racks, "--json", status=1)
    first, _ = done.json
    assert (first["state"], first["blobs"]) == ("degraded", 3) and "fp/-" in first["reason"]
    assert "kvloom: tier rack: IncompleteListingError: 1 places" in done.err


def test_a_tier_that_does_not_close_keeps_nobody(racks: Path, hang: Hang) -> None:
    Rack.before["one"] = lambda at, key: hang(at, key) if at == "close" else None
    first, _ = run("stat", racks, "--json").json
    assert (first["state"], first["blobs"]) == ("ok", 3)


# -- who evicts --------------------------------------------------------------------------------------------------------


def evicts(config: Path) -> str:
    return str(run("stat", config, "--json").json[0]["evicts"])


def test_the_process_that_evicts_is_seen_and_keeps_its_right(tmp_path: Path) -> None:
    config, store = tmp_path / "engine.yaml", tmp_path / "store"
    config.write_text(f"tiers: [{{type: disk, path: {store}, capacity: 1GiB}}]\n")
    failed = run("stat", config, status=1)
    assert not store.exists(), "who only looks makes nothing"
    assert f"tiers.0.path: there is no directory '{store}': nothing was stored there yet" in failed.err
    store.mkdir()
    assert evicts(config) == "no process"
    command = [sys.executable, "-c", HOLDER, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "True\n", "the command has given back what it took to see"
        assert evicts(config) == "a process"
        holder.kill()
        holder.wait()
    assert evicts(config) == "no process"


def test_stores_that_nobody_holds(racks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert evicts(racks) == "unknown", "it has no hold of its own"
    monkeypatch.setattr(Rack, "bounded", True)
    assert evicts(racks) == "store"
    monkeypatch.setattr(Rack, "bounded", False)
    monkeypatch.setattr(Rack, "shared", False)
    assert evicts(racks) == "owner"


@pytest.mark.slow
def test_the_real_command_with_a_store_that_hangs(tmp_path: Path) -> None:
    """Python must be able to exit while a thread of the backend waits for ever."""
    (tmp_path / "hangs.py").write_text(
        "import threading\n"
        "from kvloom import StorageBackend, hookimpl\n"
        "class Hangs(StorageBackend):\n"
        "    type = 'hangs'\n"
        "    shared = True\n"
        "    put = get = delete = lambda self, *rest: None\n"
        "    close = contains = lambda self, *rest: threading.Event().wait()\n"
        "@hookimpl\n"
        "def kvloom_storage_backends():\n"
        "    return [Hangs]\n"
    )
    metadata = tmp_path / "hangs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hangs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvloom.v1]\nhangs = hangs\n")
    config = tmp_path / "engine.yaml"
    config.write_text("plugins: {only: [hangs]}\ntiers: [{type: hangs, deadline: 200ms}]\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvloom.cli.main import main; main()"
    command = [sys.executable, "-c", script, "stat", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
    assert "no answer within the deadline" in done.stderr
