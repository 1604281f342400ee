"""The registry on modules made here; `tests/test_discovery.py` has it on installed distributions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import quote

import pytest
from pydantic import create_model

from kvloom import Config, Observer, PluginError, Registry, StorageBackend, hookimpl
from kvloom.config import ComponentBlock, StoredBlock
from kvloom.config.blocks import BlendBlock, SerializerBlock
from kvloom.plugins import hookspecs, installing, plugin
from kvloom.plugins.kinds import KINDS

Install = Callable[..., EntryPoint]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a module with these hooks importable, and give its entry point."""

    def install(name: str, **hooks: Callable[..., Any]) -> EntryPoint:
        module = ModuleType(f"made_here_{name}")
        for hook, function in hooks.items():
            setattr(module, hook, hookimpl(function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return EntryPoint(name, module.__name__, "kvloom.v1")

    return install


def backend(word: str) -> type[StorageBackend]:
    class Made(StorageBackend):
        type = word

        def put(self, key: str, blob: Any) -> None: ...
        def get(self, key: str) -> None: ...
        def contains(self, key: str) -> bool:
            return False

        def delete(self, key: str) -> None: ...

    return Made


def discover(*entries: EntryPoint, **choice: Any) -> Registry:
    return Registry.discover(entry_points=entries, **choice)


def test_every_kind_has_a_hook_and_every_hook_a_kind() -> None:
    specified = {name for name in vars(hookspecs) if name.startswith("kvloom_")}
    assert {kind.hook for kind in KINDS.values()} == specified - {"kvloom_add_commands"}


def test_hooks_are_read_once_for_all_plugins(install: Install) -> None:
    discover(install("one"))
    before = plugin._spec_of.cache_info()
    discover(install("another"))
    after = plugin._spec_of.cache_info()
    assert after.misses == before.misses and after.hits > before.hits


def test_a_module_is_read_again_only_if_it_has_changed(install: Install) -> None:
    entry = install("changing", kvloom_storage_backends=lambda: [backend("one")])
    assert list(discover(entry).types("backend")) == ["one"]
    with mock.patch.object(plugin, "_Manager", side_effect=AssertionError("read again")):
        assert list(discover(entry).types("backend")) == ["one"]
    module: Any = sys.modules[entry.module]
    module.kvloom_storage_backends = hookimpl(lambda: [backend("two")])
    assert list(discover(entry).types("backend")) == ["two"]
    module.kvloom_no_such_hook = hookimpl(lambda: [backend("three")])
    assert "no_such_hook" in discover(entry).statuses()[0].reason


def test_the_keys_that_plugins_may_not_use_are_those_that_the_core_reads() -> None:
    assert set(KINDS["backend"].owned) == set(StoredBlock.model_fields)
    assert set(KINDS["serializer"].owned) == set(SerializerBlock.model_fields)
    assert set(KINDS["blend executor"].owned) == {"type", *BlendBlock.model_fields}
    assert set(KINDS["observer"].owned) == set(ComponentBlock.model_fields)


def test_a_hook_may_be_a_generator(install: Install) -> None:
    def hook() -> Iterator[type[StorageBackend]]:
        yield backend("one")
        yield backend("two")

    registry = discover(install("many", kvloom_storage_backends=hook))
    assert list(registry.types("backend")) == ["one", "two"]


def test_hooks_are_called_once_and_only_for_the_kind_that_is_asked_for(install: Install) -> None:
    called: list[str] = []

    def backends() -> list[type[StorageBackend]]:
        called.append("backends")
        return [backend("one")]

    def observers() -> list[type[Observer]]:
        called.append("observers")
        return []

    registry = discover(install("counting", kvloom_storage_backends=backends, kvloom_observers=observers))
    assert called == []
    assert registry.get("backend", "one") is registry.get("backend", "one")
    assert called == ["backends"]


def test_one_bad_class_withdraws_what_its_hook_returned(install: Install) -> None:
    registry = discover(install("mixed", kvloom_storage_backends=lambda: [backend("good"), object]))
    with pytest.raises(PluginError, match=r"no backend of type 'good'; known: none; not loaded: mixed \(broken: "):
        registry.get("backend", "good")


def test_a_type_given_twice_by_one_plugin_is_refused(install: Install) -> None:
    registry = discover(install("twice", kvloom_storage_backends=lambda: [backend("one"), backend("one")]))
    with pytest.raises(PluginError, match="broken: kvloom_storage_backends returned two classes of type 'one'"):
        registry.get("backend", "one")


def test_settings_that_a_hook_names_are_known_without_their_class(install: Install) -> None:
    module = ModuleType("a_module_of_settings")
    module.Own, module.Other, module.Taken = (  # type: ignore[attr-defined]
        type("Own", (Config,), {}), type("Other", (Config,), {}), create_model("Taken", __base__=Config, ttl=(int, 1)),
    )  # fmt: skip
    module.Unfit = module.One = backend("one")  # type: ignore[attr-defined]
    module.One.Config = module.Own
    at = module.__name__

    def named(cls: str, settings: str) -> Registry:
        return discover(install("pairs", kvloom_storage_backends=lambda: {"one": (cls, f"{at}:{settings}")}))

    with mock.patch.dict(sys.modules, {at: module}):
        registry = named("nosuchmodule:One", "Own")
        assert registry.settings("backend", "one") is module.Own
        assert registry.all_settings("backend") == {"one": module.Own}
        with pytest.raises(PluginError, match=r"broken: ModuleNotFoundError: No module named 'nosuchmodule'"):
            registry.get("backend", "one")
        assert named(f"{at}:One", "Own").get("backend", "one") is module.One
        with pytest.raises(PluginError, match=r"Made.Config is not a_module_of_settings:Other, which "):
            named(f"{at}:One", "Other").get("backend", "one")
        with pytest.raises(PluginError, match="settings:Taken uses the key 'ttl', which belongs to the core"):
            named(f"{at}:One", "Taken").settings("backend", "one")
        with pytest.raises(PluginError, match=r"settings:Unfit is not a subclass of kvloom\.Config"):
            named(f"{at}:One", "Unfit").settings("backend", "one")


def test_a_class_that_a_hook_names_is_imported_when_its_type_is_asked_for(install: Install) -> None:
    named = {"one": "a_module_of_shelves:One", "two": "a_module_of_shelves:Two", "odd": "a_module_of_shelves:One"}
    registry = discover(install("naming", kvloom_storage_backends=lambda: named))
    (status,) = registry.statuses(imported=False)
    assert (status.state, status.provides) == ("ok", (("backend", "one"), ("backend", "two"), ("backend", "odd")))
    module = ModuleType("a_module_of_shelves")
    module.One, module.Two = backend("one"), backend("two")  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"a_module_of_shelves": module}):
        assert registry.get("backend", "two") is module.Two
        with pytest.raises(PluginError, match="Made has the type 'one', and kvloom_storage_backends calls it 'odd'"):
            registry.get("backend", "odd")
    (status,) = registry.statuses()
    assert (status.state, status.provides) == ("broken", ()), "one bad class withdraws all"


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"one": "no_such_module_at_all:One"}, "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ({"one": 3}, "returned 'one': 3; name it as 'type': 'module:class'"),
        ({"memory": "kvloom:Engine"}, "the type 'memory' is the core's own"),
        ({"one": "kvloom:Engine"}, "which is not a subclass of kvloom.StorageBackend"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_fault(install: Install, named: dict[str, object], reason: str) -> None:
    (status,) = discover(install("naming", kvloom_storage_backends=lambda: named)).statuses()
    assert status.state == "broken" and reason in status.reason


def test_plugins_with_one_name_do_not_hide_each_other(install: Install) -> None:
    first = install("here", kvloom_storage_backends=lambda: [backend("one")])
    second = install("there", kvloom_storage_backends=lambda: [backend("two")])
    same = [EntryPoint("same", entry.value, entry.group) for entry in (first, second)]
    assert list(discover(*same).types("backend")) == ["one", "two"]


def test_the_order_of_entry_points_does_not_matter(install: Install) -> None:
    entries = [install(name, kvloom_storage_backends=lambda n=name: [backend(n)]) for name in ("c", "a", "b")]
    assert discover(*entries).names == discover(*reversed(entries)).names == ("a", "b", "c")


def test_a_place_on_the_import_path_that_cannot_be_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another user's directory; a name that is too long is refused to root, too."""
    names = Registry.discover().names
    for place in ("x" * 5000, "a\0b"):
        monkeypatch.syspath_prepend(place)
        assert Registry.discover().names == names


def test_hints_for_a_missing_type(install: Install) -> None:
    registry = discover(install("plain", kvloom_storage_backends=lambda: [backend("shelf")]))
    with pytest.raises(PluginError, match=r"^no backend of type 'shelv'; known: shelf; did you mean 'shelf'\?$"):
        registry.get("backend", "shelv")
    with pytest.raises(
        PluginError, match=r"^no serializer of type 'cachegen'; known: none; pip install .*serde.cachegen"
    ):
        registry.get("serializer", "cachegen")


def test_what_an_extra_would_bring_is_said_with_the_command(install: Install) -> None:
    class Watcher(Observer):
        type = "watcher"
        extras: ClassVar[dict[str, str]] = {"nosuchmodule.inside": "watch", "json": "other"}

        def on_event(self, event: object) -> None: ...

    registry = discover(install("mine", kvloom_observers=lambda: [Watcher]))
    assert registry.lacks("observer", "watcher").startswith("needs nosuchmodule.inside: pip install ")
    assert registry.lacks("observer", "watcher").rstrip("'").endswith("[watch]") and not registry.lacks(
        "observer", "log"
    )
    Watcher.extras = {"json": "other"}
    assert not registry.lacks("observer", "watcher")


@pytest.mark.parametrize(
    ("url", "dist", "extra", "command"),
    [
        ("file://{clone}/core", "kvloom-backend-disk", "", "pip install '{clone}/plugins/backend_disk'"),
        ("file://{clone}/core", "kvloom-observe", "otel", "pip install '{clone}/plugins/observe[otel]'"),
        ("file://{clone}/core", "kvloom", "protect", "pip install '{clone}/core[protect]'"),
        ("file://{clone}/core", "kvloom-elsewhere", "", "pip install kvloom-elsewhere"),
        ("file://{clone}/gone/core", "kvloom-observe", "", "pip install kvloom-observe"),
        ("https://example.org/kvloom.whl", "kvloom-observe", "otel", "pip install 'kvloom-observe[otel]'"),
        (None, "kvloom-observe", "", "pip install kvloom-observe"),
    ],
)
def test_how_to_install_says_what_works_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None, dist: str, extra: str, command: str
) -> None:
    clone = tmp_path / "a clone"
    for folder in ("core", "plugins/backend_disk", "plugins/observe"):
        (clone / folder).mkdir(parents=True)
        (clone / folder / "pyproject.toml").touch()
    noted = None if url is None else json.dumps({"url": url.format(clone=quote(str(clone)))})

    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return noted

    monkeypatch.setattr(installing.metadata, "distribution", lambda name: Installed())
    assert installing.pip_install(dist, extra) == command.format(clone=clone)


def test_blocking_wins_over_only_and_reaches_the_core(install: Install) -> None:
    entry = install("mine", kvloom_storage_backends=lambda: [backend("one")])
    core = EntryPoint("builtin", "kvloom.builtin", "kvloom.v1")
    (blocked, other) = discover(core, entry, only=["mine"], block=["mine", "builtin"]).statuses()
    assert (blocked.state, other.state) == ("blocked", "blocked")
    assert [status.state for status in discover(core, entry, only=[]).statuses()] == ["ok", "blocked"]


def test_groups_that_are_not_ours_are_none_of_our_business() -> None:
    assert Registry.discover(entry_points=[]).names == ()
    assert "builtin" in Registry.discover().names
