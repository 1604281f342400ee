"""`kvloom doctor`: each finding has its cause, and what fails keeps nothing else from being looked at."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvloom import ConfigError, Registry, inspection, native
from kvloom.cli.main import app
from kvloom_tools import stores
from kvloom_tools.checkup import installed, machine, parts, tiers
from kvloom_tools.checkup.finding import Finding

REPOSITORY = Path(__file__).parents[3]


def doctor(*arguments: str) -> tuple[int, list[Finding]]:
    said = CliRunner().invoke(app(), ["doctor", *arguments, "--json"])
    assert said.exception is None or isinstance(said.exception, SystemExit), said.exception
    return said.exit_code, [Finding(**one) for one in json.loads(said.stdout)]


def of(found: list[Finding], topic: str, subject: str = "") -> list[Finding]:
    return [one for one in found if one.topic == topic and subject in one.subject]


def written(folder: Path, *blocks: str) -> str:
    file = folder / "kv.yaml"
    file.write_text("connector: plain\ntiers:\n" + "".join(f"  - {block}\n" for block in blocks))
    return str(file)


def test_without_a_configuration() -> None:
    code, found = doctor()
    assert code == 0 and not [one for one in found if one.verdict == "problem"]
    assert {"python", "plugin", "library", "gpu", "machine"} <= {one.topic for one in found}
    assert {one.subject for one in of(found, "plugin")} >= {"builtin", "backend_disk"}
    assert of(found, "library", "torch")[0].verdict == "ok"


def test_a_table_for_people() -> None:
    said = CliRunner().invoke(app(), ["doctor"])
    assert said.exit_code == 0 and said.stdout.splitlines()[-1].endswith(" 0 problems")
    assert "  ok       builtin: " in said.stdout


def test_a_directory_for_a_try_is_removed_whenever_one_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(tmp_path, f"{{type: disk, path: {tmp_path}/kv/store}}")
    monkeypatch.setattr(stores, "_PAUSES", (0.0, 0.0))
    removals = []

    def removed(path: str, **_: object) -> None:
        removals.append(path)
        if len(removals) % 2 == 0:  # the first time, a call that was given up writes there
            remove(path)

    remove = shutil.rmtree
    monkeypatch.setattr(stores.shutil, "rmtree", removed)
    assert doctor(config)[0] == 0 and len(removals) == 2
    assert os.listdir(tmp_path) == ["kv.yaml"]

    def interrupted(choice: object, function: Callable[[], object]) -> None:
        function()
        if len(removals) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(inspection, "in_time", interrupted)
    assert CliRunner().invoke(app(), ["doctor", config]).exit_code == 130
    assert os.listdir(tmp_path) == ["kv.yaml"] and len(removals) == 4


def test_observers_are_made_and_engines_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "kv.yaml"

    def found(observer: str, connector: str = "plain") -> tuple[int, Finding]:
        config.write_text(
            f"connector: {connector}\ntiers: [{{type: memory, capacity: 1MiB}}]\nobservers: [{observer}]\n"
        )
        code, findings = doctor(str(config))
        return code, of(findings, "observer")[0]

    trace = tmp_path / "trace.jsonl"
    code, ours = found(f"{{type: trace, path: {trace}}}")
    assert (code, ours.verdict) == (0, "ok") and not trace.exists()
    code, ours = found(f"{{type: trace, path: {tmp_path}}}")
    assert (code, ours.verdict) == (1, "problem") and "observers.0: path: " in ours.text and "directory" in ours.text
    pytest.importorskip("kvloom_observe")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, ours = found(f"{{type: prometheus, port: {taken.getsockname()[1]}}}")
    assert (code, ours.verdict) == (0, "note") and "unless it is the engine" in ours.text
    code, ours = found(f"{{type: live, path: {tmp_path}/no/s}}")
    assert (code, ours.verdict) == (1, "problem") and f"there is no directory {tmp_path}/no" in ours.text
    monkeypatch.setattr(parts, "find_spec", lambda name: None)
    config.write_text("connector: transformers\ntiers: [{type: memory, capacity: 1MiB}]\n")
    (said,) = of(doctor(str(config))[1], "connector")
    assert said.verdict == "note" and "transformers is not installed here" in said.text


def test_each_tier_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    config = written(
        tmp_path, "{type: memory, capacity: 1MiB}", f"{{type: disk, path: {tmp_path / 'kv'}, capacity: 1MiB}}"
    )
    code, found = doctor(config)
    assert code == 0
    assert any("written in" in one.text and "read in" in one.text for one in of(found, "tier", "disk"))
    assert not (tmp_path / "kv").exists() and [path.name for path in tmp_path.iterdir()] == ["kv.yaml"]
    (tmp_path / "kv").mkdir()
    assert doctor(config)[0] == 0 and not (tmp_path / "kv" / "doctor").exists()
    (tmp_path / "kv" / "a").mkdir()
    assert doctor(written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv' / 'b' / 'c'}}}"))[0] == 0
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["+tmp", "a"]


def test_what_a_killed_doctor_left_goes_after_an_hour(tmp_path: Path) -> None:
    cls = Registry.discover().get("backend", "disk")
    backend = cls(cls.Config(path=tmp_path / "kv"))
    for key in ("doctor/1-1", "doctor/2-2"):
        backend.put(key, [b"x"])
    (old,) = (tmp_path / "kv").glob("doctor/*/1-1")
    os.utime(old, (1, time.time() - 4000))
    assert doctor(written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv'}}}"))[0] == 0
    assert [entry.key for entry in backend.scan()] == ["doctor/2-2"]
    backend.close()


def test_only_what_uses_it_is_told_of_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvloom_backend_disk.backend import DiskBackend

    config = written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv'}}}")
    assert any("O_DIRECT" in one.text for one in of(doctor(config)[1], "tier"))
    monkeypatch.setattr(tiers, "_DIRECT_TYPE", "another")
    assert not any("O_DIRECT" in one.text for one in of(doctor(config)[1], "tier")), "as of a store in one file"
    monkeypatch.undo()
    never = written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv'}, direct: never}}")
    assert DiskBackend.type == tiers._DIRECT_TYPE
    assert not any("O_DIRECT" in one.text for one in of(doctor(never)[1], "tier"))


@pytest.mark.parametrize("bad", ["file", "x" * 300], ids=["file", "impossible"])
def test_a_tier_that_fails_or_hangs_keeps_no_other_from_being_tried(tmp_path: Path, bad: str) -> None:
    """A name that is too long cannot be looked at, by anybody: as for a directory that only others may enter."""
    blocks = [
        f"{{type: disk, name: bad, path: {tmp_path / bad}, capacity: 1GiB}}",
        f"{{type: disk, name: good, path: {tmp_path / 'kv'}}}",
    ]
    (tmp_path / "file").write_text("no directory")
    code, found = doctor(written(tmp_path, *blocks))
    assert code == 1
    assert [one.verdict for one in of(found, "tier", "bad")].count("problem") == 1
    assert any("written in" in one.text for one in of(found, "tier", "good"))


def test_a_tier_that_is_never_written_is_only_asked(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    code, found = doctor(written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv'}, write: never}}"))
    assert code == 0 and any("never written" in one.text for one in of(found, "tier", "disk"))


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(
        tmp_path, "{type: memory, capacity: 100TiB}", f"{{type: disk, path: {tmp_path / 'kv'}, capacity: 100TiB}}"
    )
    code, found = doctor(config)
    assert code == 1
    for name in ("memory", "disk"):
        assert any(one.verdict == "problem" and "lower it" in one.text for one in of(found, "tier", name))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    config = written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv'}, capacity: 1MiB}}")
    assert any("lower it" in one.text for one in doctor(config)[1])
    (tmp_path / "kv" / "chunks").mkdir(parents=True, exist_ok=True)
    (tmp_path / "kv" / "chunks" / "old").write_bytes(bytes(2 << 20))  # what the tier has already is room
    assert not any("lower it" in one.text for one in doctor(config)[1])


def test_a_file_system_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: answers.wait(60))
    monkeypatch.setattr(tiers, "DIRECTORY_SECONDS", 0.05)
    try:
        code, found = doctor(written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv'}, capacity: 1MiB}}"))
    finally:
        answers.set()
    assert code == 1 and any("did not answer in 0.05 s" in one.text for one in of(found, "tier", "disk"))


def test_where_a_directory_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("/dev/a / ext4", "tmpfs /mem tmpfs", "host:/x /mem/far nfs4", "/dev/b /with\\040space xfs")
    mounts = "".join(f"{line} rw 0 0\n" for line in lines)
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **more: mounts if str(self) == "/proc/mounts" else read(self, **more)
    )
    kinds = {
        "/": "ext4",
        "/memory": "ext4",
        "/mem": "tmpfs",
        "/mem/x": "tmpfs",
        "/mem/far/y": "nfs4",
        "/with space/z": "xfs",
    }
    assert {path: tiers.file_system(Path(path)) for path in kinds} == kinds


@pytest.mark.parametrize("below", ["", "/kv"])
@pytest.mark.parametrize("target", ["gone", "link"])
def test_a_link_that_leads_nowhere_is_not_tried_beside_it(tmp_path: Path, target: str, below: str) -> None:
    """As that to a disk that is not mounted: the engine does not start there."""
    (tmp_path / "link").symlink_to(tmp_path / target)
    code, found = doctor(written(tmp_path, f"{{type: disk, path: {tmp_path}/link{below}, capacity: 1MiB}}"))
    (said,) = of(found, "tier")
    assert code == 1 and said.verdict == "problem" and "cannot write to" in said.text


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir()
    shut.chmod(stat.S_IRUSR | stat.S_IXUSR)
    code, found = doctor(written(tmp_path, f"{{type: disk, path: {shut}}}"))
    assert code == 1 and any("owner" in one.text for one in of(found, "tier", "disk"))


def test_a_broken_plugin_is_a_problem_and_a_blocked_one_is_not() -> None:
    broken = EntryPoint("mine", "no_such_module_at_all", "kvloom.v1")
    found = list(installed.looked_at(Registry.discover(entry_points=[broken])))
    (mine,) = of(found, "plugin", "mine")
    assert mine.verdict == "problem" and mine.text.startswith("broken: ")
    found = list(installed.looked_at(Registry.discover(entry_points=[broken], block=["mine"])))
    assert of(found, "plugin", "mine")[0].verdict == "note"


@pytest.mark.parametrize(
    ("here", "verdict"), [("2.10.9", "problem"), ("2.11.0", "ok"), ("2.13.9+cu130", "ok"), ("2.14.0rc1", "note")]
)
def test_versions(monkeypatch: pytest.MonkeyPatch, here: str, verdict: str) -> None:
    monkeypatch.setattr(installed, "version", lambda name: here)
    monkeypatch.setattr(installed, "TESTED", {"torch": ("2.11", "2.13")})
    (found,) = installed._libraries()
    assert found.verdict == verdict


def test_what_counts_as_tested_is_what_is_pinned() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    pinned = {name.lower().replace("_", "-"): installed.parts(here)[:2] for name, here in pins.items()}
    for name, (_, newest) in installed.TESTED.items():
        if name in pinned:
            assert pinned[name] == installed.parts(newest), name


def test_a_compiled_part_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libkv.so").write_bytes(b"not a library")
    spec: Any = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(installed, "find_spec", lambda name: spec)
    found = [one for one in installed.looked_at(Registry.discover()) if one.topic == "compiled"]
    assert found and all(one.verdict == "problem" and "--force-reinstall" in one.text for one in found)


def test_a_native_library_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_INTERFACE", "another")
    (found,) = of(list(installed.looked_at(Registry.discover())), "library", "kvloom-native")
    assert found.verdict == "note" and "--force-reinstall" in found.text


def test_memory_that_a_container_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4096 kB\n"}

    def read(self: Path, **more: Any) -> str:
        if str(self) not in files:
            raise FileNotFoundError(self)
        return files[str(self)]

    monkeypatch.setattr(Path, "read_text", read)
    assert machine.available_bytes() == 4 << 20
    files |= {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory.current": "5"}
    assert machine.available_bytes() == 4 << 20
    files |= {"/sys/fs/cgroup/memory.max": str(3 << 20), "/sys/fs/cgroup/memory.current": str(2 << 20)}
    assert machine.available_bytes() == 1 << 20


def test_a_configuration_that_is_wrong_is_one_line(tmp_path: Path) -> None:
    error = CliRunner().invoke(app(), ["doctor", written(tmp_path, "{type: dsik}")]).exception
    assert isinstance(error, ConfigError) and "\n" not in str(error)


def test_a_hang_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvloom_backend_disk.backend import DiskBackend

    monkeypatch.setattr(DiskBackend, "put", lambda *_: time.sleep(5))
    code, found = doctor(written(tmp_path, f"{{type: disk, path: {tmp_path / 'kv'}, deadline: 200ms}}"))
    assert code == 1 and of(found, "tier", "disk")[-1].verdict == "problem"


def test_a_bounded_tier_that_cannot_all_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    (store / "fp" / "+00").mkdir(parents=True)
    file = written(tmp_path, f"{{type: disk, path: {store}, capacity: 1MiB}}")
    assert not [one for one in of(doctor(file)[1], "tier") if "cannot be read" in one.text]
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("/fp/"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    code, found = doctor(file)
    (one,) = [one for one in of(found, "tier") if "cannot be read" in one.text]
    assert code == 1 and one.verdict == "problem" and f"{store}/fp (Permission denied)" in one.text
