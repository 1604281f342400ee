"""The command: what each verb prints, over a store that outlives the engine that filled it."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import model_validator

import kvloom
from kvloom import KVSpec, Registry, hookimpl
from kvloom.builtin.dict_backend import DictBackend
from kvloom.cli import output
from kvloom.cli.main import main

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16", revision="abc")
CHUNK = 4

Run = Callable[..., str]


class Drawer(DictBackend):
    """A dictionary that is found again by its label."""

    type = "drawer"
    persistent = True
    drawers: ClassVar[dict[str, dict[str, bytes]]] = {}

    class Config(kvloom.Config):
        label: str = "top"
        secret: str = ""

        @model_validator(mode="before")
        @classmethod
        def _labelled(cls, value: Any) -> Any:
            return {"label": f"of {value['secret']}", **value} if "secret" in value else value

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config)
        self._blobs = self.drawers.setdefault(config.label, {})


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The drawer as an installed plugin."""
    metadata = tmp_path / "made_here-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made-here\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvloom.v1]\ndrawers = made_here_drawers\n")
    module = ModuleType("made_here_drawers")
    module.kvloom_storage_backends = hookimpl(lambda: [Drawer])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here_drawers", module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    yield
    Drawer.drawers.clear()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; what it printed. status: the exit status that is expected."""

    def run(*arguments: object, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["kvloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        assert (left.value.code or 0) == status, printed.err
        return printed.err if status else printed.out

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"chunk_tokens: {CHUNK}\n"
        "plugins: {only: [drawers]}\n"
        "tiers:\n"
        "- {type: memory, capacity: 1MiB}\n"
        "- {type: drawer, name: warm, label: one, capacity: 64KiB}\n"
        "- {type: drawer, name: cold, label: two}\n"
    )
    return path


def test_version(run: Run) -> None:
    assert run("--version").strip() == kvloom.__version__


def test_a_wrong_command_line_is_status_2(run: Run) -> None:
    assert "no-such-verb" in run("no-such-verb", status=2)


# -- plugins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("closed", "arguments", "status"), [("stdout", "--version", 0), ("stderr", "nothing", 2)])
def test_a_caller_that_closed_a_stream_gets_the_status(
    closed: str, arguments: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kvloom", arguments])
        patch.setattr(sys, closed, None)
        with pytest.raises(SystemExit) as left:
            main()
        getattr(sys, closed).close()
    assert (left.value.code or 0) == status and capsys.readouterr() == ("", ""), "an error is not output"


def test_what_stdout_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["kvloom", "--version"])
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(kvloom, "__version__", "\u00e9\udcff")
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code and out.buffer.getvalue() == b"\\xe9\\udcff\n"  # type: ignore[attr-defined]


def test_an_interrupt_while_the_verbs_are_imported_is_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Registry:
        raise KeyboardInterrupt

    monkeypatch.setattr(Registry, "discover", interrupted)
    assert not run("plugins", status=130)


@pytest.mark.parametrize("handled", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_verb_that_is_terminated_tidies_up(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, handled: signal.Handlers
) -> None:
    tidied = []

    def verb() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            tidied.append(True)

    monkeypatch.setattr("kvloom.cli.main.app", lambda name: verb)
    before = signal.signal(number, handled)
    try:
        if handled is signal.SIG_IGN:
            main()
        else:
            with pytest.raises(SystemExit) as left:
                main()
            assert left.value.code == 128 + number
    finally:
        signal.signal(number, before)
    assert tidied


def test_plugins(run: Run) -> None:
    listed = {status["name"]: status for status in json.loads(run("plugins", "--json"))}
    assert listed["drawers"] == {
        "name": "drawers",
        "dist": "made-here",
        "version": "1.0",
        "state": "ok",
        "reason": "",
        "provides": [["backend", "drawer"]],
    }
    assert re.search(r"drawers\s+ok\s+backend drawer\s+made-here 1.0", run("plugins"))


# -- config ------------------------------------------------------------------------------------------------------------


def test_config_check(run: Run, config: Path) -> None:
    assert run("config", "check", config).splitlines() == [
        f"{config}: ok: plain, chunked of 4 tokens, memory (1MiB) > warm (64KiB) > cold (no limit)",
        "paths and servers were not tried",
    ]
    said = json.loads(run("config", "check", config, "--json"))
    assert said["tiers"][1:] == [{"name": "warm", "capacity": 64 << 10}, {"name": "cold", "capacity": None}]
    assert (said["connector"], said["chunk_tokens"]) == ("plain", CHUNK)


def test_config_check_says_what_is_wrong_on_stderr_with_status_2(run: Run, config: Path) -> None:
    config.write_text("tiers: [memory, {type: drawer, lable: x}, {type: papyrus}]\n")
    first, second = run("config", "check", config, status=2).splitlines()
    assert first == "kvloom: tiers.1.lable: unknown key; did you mean 'label'?"
    assert second.startswith("tiers.2.type: no backend of type 'papyrus'; known: ")


def test_config_show_is_the_whole_configuration_and_can_be_read_back(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOM_TIERS__1__DEADLINE", "3s")
    shown = run("config", "show", config)
    tree = yaml.safe_load(shown)
    assert tree["chunk_tokens"] == CHUNK
    assert tree["tiers"][1] == {
        "type": "drawer",
        "name": "warm",
        "serializer": {"type": "raw", "timed": False},
        "write": "through",
        "capacity": "64KiB",
        "policy": "lru",
        "remember": None,
        "protect": None,
        "deadline": 3.0,
        "label": "one",
        "secret": "",
    }
    assert json.loads(run("config", "show", config, "--json")) == tree
    monkeypatch.delenv("KVLOOM_TIERS__1__DEADLINE")
    config.write_text(shown)
    assert run("config", "show", config) == shown


def test_config_show_prints_sizes_that_have_no_unit(run: Run, config: Path) -> None:
    config.write_text("tiers: [{type: drawer, capacity: 100_000_001, quota: {a: 1000001}}]\n")
    tier = yaml.safe_load(run("config", "show", config))["tiers"][0]
    assert (tier["capacity"], tier["quota"]) == (100_000_001, {"a": 1000001})


def test_config_show_keeps_what_was_interpolated_to_itself(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAWER_KEY", "hunter2")
    monkeypatch.setenv("DRAWER", "drawer")
    config.write_text("tiers: ['${env:DRAWER}', {type: drawer, name: b, secret: 'key-${env:DRAWER_KEY}'}]\n")
    shown = run("config", "show", config)
    assert "hunter2" not in shown
    first, second = yaml.safe_load(shown)["tiers"]
    assert first["type"] == "${env:DRAWER}"
    assert second["secret"] == "***${env:DRAWER_KEY}", "what stands beside it is a part of the secret"
    assert second["label"] == "of key-***", "what the plugin made of it"


# -- how things are printed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text", "exact"),
    [
        (0, "0B", 0),
        (1023, "1023B", 1023),
        (1024, "1KiB", "1KiB"),
        (1025, "1KiB", 1025),
        (3 << 29, "1.5GiB", "1.5GiB"),
        (5 << 30, "5GiB", "5GiB"),
        (1 << 50, "1PiB", "1PiB"),
    ],
)
def test_sizes(num_bytes: int, text: str, exact: int | str) -> None:
    assert output.size(num_bytes) == text
    assert output.exact_size(num_bytes) == exact
    assert num_bytes == 0 or kvloom.EngineConfig.load({"tiers": [{"type": "dict", "capacity": exact}]})
