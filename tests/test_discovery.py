"""Plugins as they are found installed: each fault of one of them is a state with a reason, and nobody else's problem.

`fixtures/plugins` holds distributions as an installer leaves them, metadata and all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from children_support import Ended, forked

import kvloom
from kvloom import PluginError, Registry
from kvloom.cli.main import main
from kvloom.plugins import registry as plugins
from kvloom.plugins.plugin import PluginStatus

FIXTURES = Path(__file__).parent / "fixtures/plugins"
MODULES = {"double", "faulty", "later", "shelf", "shelves"}
DISTRIBUTIONS = {"kvloom", "double", "faulty", "later", "shelf"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FIXTURES))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in MODULES]:
        del sys.modules[name]


def discover(**choice: list[str]) -> Registry:
    """The core and the fixtures, whatever else is installed where this runs."""
    found = [entry for entry, dist in plugins._installed() if dist in DISTRIBUTIONS]
    return Registry.discover(entry_points=found, **choice)


def statuses(registry: Registry) -> dict[str, PluginStatus]:
    return {status.name: status for status in registry.statuses()}


def command(*arguments: str) -> Ended:
    def work() -> None:
        sys.path.insert(0, str(FIXTURES))
        sys.argv = ["kvloom", *arguments]
        os.environ["COLUMNS"] = "200"
        main()

    return forked(work)


def test_a_plugin_that_is_installed_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "meanwhile" not in Registry.discover().names
    about = tmp_path / "meanwhile-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: meanwhile\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[kvloom.v1]\nmeanwhile = json\n")
    assert "meanwhile" in Registry.discover().names


@pytest.mark.usefixtures("installed")
def test_a_good_plugin_is_ok_and_says_what_it_provides() -> None:
    status = statuses(Registry.discover())["shelf"]
    assert status == PluginStatus("shelf", "shelf", "1.0", "ok", "", (("backend", "shelf"),))


@pytest.mark.usefixtures("installed")
def test_the_core_comes_in_by_its_own_entry_point() -> None:
    status = statuses(discover())["builtin"]
    assert (status.dist, status.version, status.state) == ("kvloom", kvloom.__version__, "ok")
    assert set(status.provides) == {
        ("tokens", "chunked"),
        ("connector", "plain"),
        ("serializer", "raw"),
        ("backend", "dict"),
        ("observer", "log"),
    }


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("faulty_missing", "ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("faulty_exit", "SystemExit: 3"),
        ("faulty_hook", "backend: OSError: no shelf in the house"),
        ("faulty_nothing", "backend: kvloom_storage_backends returned 42; return a list of classes"),
        (
            "faulty_wrong",
            "backend: kvloom_storage_backends returned <class 'dict'>, "
            "which is not a subclass of kvloom.StorageBackend",
        ),
        ("faulty_untyped", "backend: Untyped has no `type`, the word that users write in YAML"),
        ("faulty_abstract", "backend: Abstract lacks contains, delete, get, put"),
        ("faulty_memory", "backend: Memory: the type 'memory' is the core's own"),
        ("faulty_config", "backend: Loose.Config is not a subclass of kvloom.Config"),
        ("faulty_owned", "backend: Greedy.Config uses the key 'capacity', which belongs to the core"),
    ],
)
def test_a_broken_plugin_says_why(name: str, reason: str) -> None:
    status = statuses(discover())[name]
    assert (status.state, status.reason) == ("broken", reason)


@pytest.mark.usefixtures("installed")
def test_the_hooks_that_work_of_a_broken_plugin_stay() -> None:
    registry = discover()
    assert statuses(registry)["faulty_hook"].provides == (("observer", "sturdy"),)
    assert registry.get("observer", "sturdy").type == "sturdy"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("later", "written for kvloom.v2; this kvloom speaks kvloom.v1"),
        ("later_hook", "unknown hook 'kvloom_teleporters'"),
        ("later_argument", "Argument(s) {'engine'}"),
        ("later_default", "kvloom_add_commands gives 'commands' a default value; remove it"),
    ],
)
def test_an_incompatible_plugin_says_why(name: str, reason: str) -> None:
    status = statuses(discover())[name]
    assert status.state == "incompatible"
    assert reason in status.reason
    assert status.provides == ()


@pytest.mark.usefixtures("installed")
def test_a_plugin_for_this_and_a_later_version_is_served_once() -> None:
    assert [status.state for status in discover().statuses() if status.name == "shelf"] == ["ok"]


@pytest.mark.usefixtures("installed")
def test_a_blocked_plugin_is_not_imported() -> None:
    registry = discover(block=["shelf", "double"])
    assert "shelf" not in sys.modules
    assert statuses(registry)["shelf"].state == "blocked"
    with pytest.raises(PluginError, match=r"shelf \(blocked: named in plugins.block\)"):
        registry.get("backend", "shelf")


@pytest.mark.usefixtures("installed")
def test_only_keeps_the_core_and_what_it_names() -> None:
    registry = discover(only=["shelf"])
    assert {name for name, status in statuses(registry).items() if status.state == "ok"} == {"builtin", "shelf"}
    assert {status.reason for status in registry.statuses() if status.state == "blocked"} == {
        "not named in plugins.only"
    }
    assert "faulty" not in sys.modules


@pytest.mark.usefixtures("installed")
def test_a_duplicate_fails_when_it_is_used_and_names_every_provider() -> None:
    registry = discover(only=["shelf", "double"])
    assert {status.state for status in registry.statuses() if status.name in ("shelf", "double")} == {"ok"}
    assert registry.get("backend", "dict").type == "dict"
    with pytest.raises(PluginError) as caught:
        registry.get("backend", "shelf")
    assert str(caught.value) == (
        "2 plugins provide a backend of type 'shelf': double (from double 2.0), shelf (from shelf 1.0); "
        "uninstall all but one, or name them in plugins.block"
    )
    assert "shelf" not in registry.types("backend")


@pytest.mark.usefixtures("installed")
def test_a_missing_type_names_what_did_not_load() -> None:
    registry = discover(only=["faulty_missing", "faulty_hook"])
    with pytest.raises(PluginError) as caught:
        registry.get("backend", "redis")
    message = str(caught.value)
    assert message.startswith("no backend of type 'redis'; known: dict; not loaded: ")
    assert "faulty_missing (broken: ModuleNotFoundError: No module named 'nosuchmodule')" in message
    assert "faulty_hook (broken: OSError: no shelf in the house)" in message
    assert re.search(r"; pip install \S*backend.redis$", message)
    with pytest.raises(PluginError) as caught:
        registry.get("observer", "prometheus")
    assert "faulty_hook" not in str(caught.value), "its observers work"


@pytest.mark.usefixtures("installed")
def test_no_plugin_is_imported_beyond_its_entry_module_before_it_is_used() -> None:
    registry = discover(only=["shelf"])
    assert "shelf" in sys.modules
    assert "shelves" not in sys.modules
    registry.get("backend", "shelf")
    assert "shelves" in sys.modules


# -- the command -------------------------------------------------------------------------------------------------------


def test_help_survives_every_broken_plugin_and_loads_no_torch_or_pydantic() -> None:
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('loaded:', {'torch', 'pydantic', 'yaml', 'rich'} & set(sys.modules)))\n"
        "from kvloom.cli.main import main\n"
        "main()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(FIXTURES)}
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "dust" in done.stdout
    assert "Not the real one" not in done.stdout
    assert "loaded: set()" in done.stdout


def test_a_plugins_verb_works() -> None:
    done = command("dust")
    assert (done.status, done.out) == (0, "dusted\n")


def test_plugins_lists_every_state() -> None:
    done = command("plugins", "--json")
    assert done.status == 0, done.err
    listed = {status["name"]: status for status in json.loads(done.out)}
    assert listed["shelf"]["provides"] == [["backend", "shelf"]]
    assert (listed["faulty_commands"]["state"], listed["faulty_commands"]["reason"]) == (
        "broken",
        "commands: RuntimeError: no verbs today",
    )
    assert listed["faulty_verb"]["reason"] == "commands: the verb 'plugins' is taken"
    table = command("plugins").out
    assert "No module named 'nosuchmodule'" in table
    assert "written for kvloom.v2" in table


def test_an_installed_plugin_can_be_configured_and_a_broken_one_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    only = "plugins: {only: [shelf, faulty_hook, faulty_missing]}\n"
    file.write_text(only + "tiers: [memory, {type: shelf, path: /x}]\n")
    assert command("config", "check", str(file)).status == 0
    file.write_text(only + "tiers: [memory, {type: shelf, pth: /x}, {type: greedy}]\n")
    done = command("config", "check", str(file))
    assert done.status == 2
    assert done.err.splitlines()[:2] == [
        "kvloom: tiers.1.path: missing; it has no default",
        "tiers.1.pth: unknown key; did you mean 'path'?",
    ]
    assert "tiers.2.type: no backend of type 'greedy'; known: dict, shelf; not loaded: " in done.err
    assert "faulty_hook (broken: OSError: no shelf in the house)" in done.err
