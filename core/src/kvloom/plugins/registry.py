"""Find plugins, load each on its own, and answer which class a `type:` names.

Entry modules are imported when plugins are discovered, classes when their kind is first requested.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from importlib import metadata
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kvloom.errors import PluginError
from kvloom.plugins.installing import pip_install
from kvloom.plugins.plugin import API, Plugin, PluginStatus

if TYPE_CHECKING:
    import typer

_GROUPS = "kvloom.v"
_BUILTIN = "kvloom.builtin"

_OURS = {
    ("kvloom-tokens-radix", "tokens"): "radix",
    ("kvloom-connector-transformers", "connector"): "transformers",
    ("kvloom-connector-sglang", "connector"): "sglang",
    ("kvloom-connector-vllm", "connector"): "vllm vllm_blob vllm_offload nested_tuple paged paged_cuda",
    ("kvloom-serde-cachegen", "serializer"): "cachegen",
    ("kvloom-serde-tensors", "serializer"): "safetensors torch",
    ("kvloom-backend-disk", "backend"): "disk",
    ("kvloom-backend-fsspec", "backend"): "fsspec",
    ("kvloom-backend-mooncake", "backend"): "mooncake",
    ("kvloom-backend-redis", "backend"): "redis",
    ("kvloom-blend", "blend retriever"): "separator explicit fixed content",
    ("kvloom-blend", "blend executor"): "cacheblend epic full hybrid none question_attention",
    ("kvloom-events-zmq", "observer"): "events_zmq",
    ("kvloom-observe", "observer"): "live opentelemetry prometheus",
    ("kvloom-tools", "observer"): "trace",
}
"""Types by the package of this repository that provides them, and their kind."""
_FIRST_PARTY = {(kind, type): dist for (dist, kind), types in _OURS.items() for type in types.split()}


class Registry:
    """The plugins of one engine. A value: make as many as you like."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self._plugins = tuple(plugins)

    @classmethod
    def discover(
        cls,
        *,
        only: Collection[str] | None = None,
        block: Collection[str] = (),
        entry_points: Iterable[metadata.EntryPoint] | None = None,
    ) -> Registry:
        """Load the entry module of every installed plugin; never raises because of one.

        only: names of the entry points to load, besides the core's own. block: names of those not to load.
        entry_points: instead of those that are installed.
        """
        found = [Plugin(*each) for each in (_installed() if entry_points is None else _with_dists(entry_points))]
        found.sort(key=lambda plugin: (plugin.entry.name, plugin.entry.group, plugin.dist, plugin.entry.value))
        served = {(plugin.dist, plugin.entry.name) for plugin in found if plugin.entry.group == API}
        plugins = []
        for plugin in found:
            entry = plugin.entry
            if entry.group != API and (plugin.dist, entry.name) in served:
                continue
            plugins.append(plugin)
            if entry.name in block:
                plugin.state, plugin.reason = "blocked", "named in plugins.block"
            elif only is not None and entry.name not in only and entry.value != _BUILTIN:
                plugin.state, plugin.reason = "blocked", "not named in plugins.only"
            else:
                plugin.load()
        return cls(plugins)

    @property
    def names(self) -> tuple[str, ...]:
        """The entry points that were found, in whatever state."""
        return tuple(plugin.entry.name for plugin in self._plugins)

    def statuses(self, *, imported: bool = True) -> tuple[PluginStatus, ...]:
        """The state of every plugin. Imports every class that a plugin provides, unless `imported` is False."""
        return tuple(plugin.status(imported=imported) for plugin in self._plugins)

    def get(self, kind: str, type: str) -> type[Any]:
        """The class of `kind` that calls itself `type`. PluginError if there is none, or more than one."""
        plugin = self._provider(kind, type)
        cls = None if plugin is None else plugin.get(kind, type)
        if cls is None:
            raise PluginError(self._missing(kind, type))
        return cls

    def settings(self, kind: str, type: str) -> type[Any]:
        """The `Config` of the class that `get` returns, not imported if its hook names the settings. PluginError as
        there."""
        plugin = self._provider(kind, type)
        settings = None if plugin is None else plugin.settings(kind, type)
        if settings is None:
            raise PluginError(self._missing(kind, type))
        return settings

    def lacks(self, kind: str, type: str) -> str:
        """Text on a missing optional dependency of this class, with the remedy; empty if none is missing.

        Of a class whose hook names its settings, none is missing before `get` has imported it. Raises PluginError if
        several plugins provide the type.
        """
        plugin = self._provider(kind, type)
        if plugin is not None:
            for module, extra in plugin.extras(kind, type).items():
                if not _is_there(module):
                    return f"needs {module}: {pip_install(plugin.dist, extra)}"
        return ""

    def types(self, kind: str) -> dict[str, type[Any]]:
        """Every class of `kind` that can be used, by type, sorted. Imports all of them."""
        return self._of_all(kind, Plugin.get)

    def all_settings(self, kind: str) -> dict[str, type[Any]]:
        """The settings of every class of `kind`, by type, sorted."""
        return self._of_all(kind, Plugin.settings)

    def add_commands(self, commands: typer.Typer, verb: str | None = None) -> None:
        """Let every plugin add its verbs to the `kvloom` command. A plugin whose verbs do not work adds none.

        verb: work out the options of this one only, "" of none; default: of all.
        """
        for plugin in self._plugins:
            plugin.add_commands(commands, verb)

    def _of_all(self, kind: str, get: Callable[[Plugin, str, str], type[Any] | None]) -> dict[str, Any]:
        """The answers of `get` for each type that one plugin provides; of none whose types of `kind` do not all fit."""
        found: list[tuple[str, Any]] = []
        for plugin in self._plugins:
            answers = [(type, get(plugin, kind, type)) for type in plugin.types(kind)]
            found += answers if plugin.types(kind) else []
        names = [type for type, _ in found]
        return {type: answer for type, answer in sorted(found, key=itemgetter(0)) if names.count(type) == 1}

    def _provider(self, kind: str, type: str) -> Plugin | None:
        """The plugin that provides the type. PluginError if there are several."""
        providers = [plugin for plugin in self._plugins if type in plugin.types(kind)]
        if len(providers) > 1:
            names = ", ".join(f"{plugin.entry.name} (from {plugin.origin})" for plugin in providers)
            raise PluginError(
                f"{len(providers)} plugins provide a {kind} of type {type!r}: {names}; "
                "uninstall all but one, or name them in plugins.block"
            )
        return providers[0] if providers else None

    def _missing(self, kind: str, type: str) -> str:
        known = sorted({known for plugin in self._plugins for known in plugin.types(kind)})
        parts = [f"no {kind} of type {type!r}", f"known: {', '.join(known) or 'none'}"]
        absent = [f"{plugin.entry.name} ({why})" for plugin in self._plugins if (why := plugin.why_not(kind))]
        if absent:
            parts.append(f"not loaded: {', '.join(absent)}")
        dist = _FIRST_PARTY.get((kind, type))
        if dist is not None and dist not in {plugin.dist for plugin in self._plugins}:
            parts.append(pip_install(dist))
        elif close := get_close_matches(type, known, n=1):
            parts.append(f"did you mean {close[0]!r}?")
        return "; ".join(parts)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


_Found = tuple[metadata.EntryPoint, str]
"""An entry point, and the name of its distribution."""


def _installed() -> tuple[_Found, ...]:
    """All installed plugins. Reading the entry points of every distribution takes a while."""
    return _entry_points(tuple(_searched()))


def _searched() -> Iterator[tuple[str, int]]:
    """The directories of the import path and when they changed; without those that this user may not look into."""
    for path in sys.path:
        with suppress(OSError, ValueError):
            status = os.stat(path or ".")
            if stat.S_ISDIR(status.st_mode):
                yield path, status.st_mtime_ns


@lru_cache(maxsize=1)
def _entry_points(of: tuple[tuple[str, int], ...]) -> tuple[_Found, ...]:
    """All installed plugins. of: directories and the times of their last change, the key of the cache."""
    found = metadata.entry_points()
    groups = [group for group in found.groups if group.startswith(_GROUPS)]
    return tuple(_with_dists(entry for group in groups for entry in found.select(group=group)))


def _with_dists(entries: Iterable[metadata.EntryPoint]) -> Iterator[_Found]:
    return ((entry, entry.dist.name if entry.dist else "") for entry in entries)
