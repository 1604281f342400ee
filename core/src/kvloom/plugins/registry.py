"""Find plugins, load each on its own, and answer which class a `type:` names. The only module that touches pluggy.

A plugin that fails becomes a state with a reason, never an exception: serving must not stop because of a plugin that no
configuration names. Entry modules are imported when plugins are discovered, classes when their kind is first requested.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from kvloom.errors import PluginError
from kvloom.plugins import hookspecs
from kvloom.plugins.installing import pip_install

if TYPE_CHECKING:
    import typer

API = "kvloom.v1"
"""The entry-point group: the version of the plugin interface, readable without importing a plugin."""

_GROUPS = "kvloom.v"
_BUILTIN = "kvloom.builtin"

State = Literal["ok", "blocked", "incompatible", "broken"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component."""

    hook: str
    abc: str
    """`module:class`, imported when a class is to be checked."""
    owned: tuple[str, ...] = ("type",)
    """The keys of its YAML block that belong to the core: no plugin may have a setting of that name."""


KINDS: Mapping[str, Kind] = {
    "tokens": Kind("kvloom_token_databases", "kvloom.contracts.tokens:TokenDatabase"),
    "connector": Kind("kvloom_gpu_connectors", "kvloom.contracts.connector:GPUConnector"),
    "serializer": Kind("kvloom_serializers", "kvloom.contracts.serializer:Serializer", ("type", "timed")),
    "backend": Kind(
        "kvloom_storage_backends",
        "kvloom.contracts.storage:StorageBackend",
        (
            "type",
            "name",
            "serializer",
            "write",
            "capacity",
            "policy",
            "ttl",
            "deadline",
            "quota",
            "remember",
            "protect",
        ),
    ),
    "blend retriever": Kind("kvloom_blend_retrievers", "kvloom.contracts.blend:BlendRetriever"),
    "blend executor": Kind(
        "kvloom_blend_executors",
        "kvloom.contracts.blend:BlendExecutor",
        ("type", "executor", "retriever", "min_tokens"),
    ),
    "observer": Kind("kvloom_observers", "kvloom.contracts.observer:Observer"),
}
"""The kinds of components by name."""

RESERVED = frozenset({("backend", "memory")})
"""Types that are the core's own."""

_FIRST_PARTY = {
    ("tokens", "radix"): "kvloom-tokens-radix",
    ("connector", "transformers"): "kvloom-connector-transformers",
    ("connector", "sglang"): "kvloom-connector-sglang",
    ("connector", "vllm"): "kvloom-connector-vllm",
    ("connector", "vllm_blob"): "kvloom-connector-vllm",
    ("connector", "vllm_offload"): "kvloom-connector-vllm",
    ("connector", "nested_tuple"): "kvloom-connector-vllm",
    ("connector", "paged"): "kvloom-connector-vllm",
    ("connector", "paged_cuda"): "kvloom-connector-vllm",
    ("serializer", "cachegen"): "kvloom-serde-cachegen",
    ("serializer", "safetensors"): "kvloom-serde-tensors",
    ("serializer", "torch"): "kvloom-serde-tensors",
    ("backend", "disk"): "kvloom-backend-disk",
    ("backend", "fsspec"): "kvloom-backend-fsspec",
    ("backend", "mooncake"): "kvloom-backend-mooncake",
    ("backend", "redis"): "kvloom-backend-redis",
    ("blend retriever", "separator"): "kvloom-blend",
    ("blend retriever", "explicit"): "kvloom-blend",
    ("blend retriever", "fixed"): "kvloom-blend",
    ("blend retriever", "content"): "kvloom-blend",
    ("blend executor", "cacheblend"): "kvloom-blend",
    ("blend executor", "epic"): "kvloom-blend",
    ("blend executor", "full"): "kvloom-blend",
    ("blend executor", "hybrid"): "kvloom-blend",
    ("blend executor", "none"): "kvloom-blend",
    ("blend executor", "question_attention"): "kvloom-blend",
    ("observer", "events_zmq"): "kvloom-events-zmq",
    ("observer", "live"): "kvloom-observe",
    ("observer", "opentelemetry"): "kvloom-observe",
    ("observer", "prometheus"): "kvloom-observe",
    ("observer", "trace"): "kvloom-tools",
}


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """The state of one entry point."""

    name: str
    dist: str
    version: str
    state: State
    reason: str
    """The reason for a state other than `ok`."""
    provides: tuple[tuple[str, str], ...]
    """(kind, type) of every class that can be used; a broken plugin keeps those of its hooks that work."""


class Registry:
    """The plugins of one engine. A value: make as many as you like."""

    def __init__(self, plugins: Iterable[_Plugin]) -> None:
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
        found = [_Plugin(*each) for each in (_installed() if entry_points is None else _with_dists(entry_points))]
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
        return self._of_all(kind, _Plugin.get)

    def all_settings(self, kind: str) -> dict[str, type[Any]]:
        """The settings of every class of `kind`, by type, sorted."""
        return self._of_all(kind, _Plugin.settings)

    def add_commands(self, commands: typer.Typer, verb: str | None = None) -> None:
        """Let every plugin add its verbs to the `kvloom` command. A plugin whose verbs do not work adds none.

        verb: work out the options of this one only, "" of none; default: of all.
        """
        for plugin in self._plugins:
            plugin.add_commands(commands, verb)

    def _of_all(self, kind: str, get: Callable[[_Plugin, str, str], type[Any] | None]) -> dict[str, Any]:
        """The answers of `get` for each type that one plugin provides; of none whose types of `kind` do not all fit."""
        found: list[tuple[str, Any]] = []
        for plugin in self._plugins:
            answers = [(type, get(plugin, kind, type)) for type in plugin.types(kind)]
            found += answers if plugin.types(kind) else []
        names = [type for type, _ in found]
        return {type: answer for type, answer in sorted(found, key=itemgetter(0)) if names.count(type) == 1}

    def _provider(self, kind: str, type: str) -> _Plugin | None:
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


class _Plugin:
    """One entry point: its state and, once asked for, what each of its hooks returned."""

    def __init__(self, entry: metadata.EntryPoint, dist: str) -> None:
        """dist: the name of its distribution."""
        self.entry = entry
        self.dist = dist
        self.state: State = "ok"
        self.reason = ""
        self._hooks: Any = None
        self._faults: dict[str, str] = {}
        self._found: dict[str, dict[str, type[Any] | _ClassName]] = {}
        """By kind and type: a class, or its name until that is asked for."""

    @property
    def version(self) -> str:
        return self.entry.dist.version if self.entry.dist else ""

    @property
    def origin(self) -> str:
        return f"{self.dist} {self.version}".strip() or self.entry.value

    def load(self) -> None:
        """Import the entry module and check its hooks; sets the state."""
        if self.entry.group != API:
            self.state = "incompatible"
            self.reason = f"written for {self.entry.group}; this kvloom speaks {API}"
            return
        # A manager of its own: whatever a plugin does to it, no other plugin sees.
        manager = pluggy.PluginManager("kvloom")
        manager.add_hookspecs(hookspecs)
        try:
            module = self.entry.load()
        except (Exception, SystemExit) as error:
            self.state, self.reason = "broken", _brief(error)
            return
        try:
            manager.register(module)
            manager.check_pending()
            _no_defaults(manager, module)
        except pluggy.PluginValidationError as error:
            self.state, self.reason = "incompatible", _one_line(str(error))
        except Exception as error:
            self.state, self.reason = "broken", _brief(error)
        else:
            self._hooks = manager.hook

    def types(self, kind: str) -> tuple[str, ...]:
        """The types of `kind` from this plugin: all that its hook returned, or none if any of them is unfit."""
        if self._hooks is None:
            return ()
        if kind not in self._found:
            try:
                self._found[kind] = _by_type(kind, getattr(self._hooks, KINDS[kind].hook)())
            except (Exception, SystemExit) as error:
                self._fail(kind, error)
        return tuple(self._found[kind])

    def get(self, kind: str, type: str) -> type[Any] | None:
        """The class of this type; None if it has none that can be used."""
        if type not in self.types(kind):
            return None
        found = self._found[kind][type]
        if isinstance(found, _ClassName):
            try:
                found = self._found[kind][type] = found.load(kind, type)
            except (Exception, SystemExit) as error:
                self._fail(kind, error)
                return None
        return found

    def settings(self, kind: str, type: str) -> type[Any] | None:
        """The settings of this type; None if it has none that can be used."""
        found = self._found[kind][type] if type in self.types(kind) else None
        if not isinstance(found, _ClassName) or not found.settings:
            return getattr(self.get(kind, type), "Config", None)
        try:
            return found.load_settings(kind)
        except (Exception, SystemExit) as error:
            self._fail(kind, error)
            return None

    def extras(self, kind: str, type: str) -> Mapping[str, str]:
        """The optional dependencies of the class of this type; none before it is imported."""
        extras: Mapping[str, str] = getattr(self._found.get(kind, {}).get(type), "extras", {})
        return extras

    def _fail(self, kind: str, error: BaseException) -> None:
        self._found[kind] = {}
        self._faults[kind] = _brief(error)

    def add_commands(self, commands: typer.Typer, verb: str | None) -> None:
        """Add this plugin's verbs. verb: as `Registry.add_commands` takes it."""
        if self._hooks is None or not self._hooks.kvloom_add_commands.get_hookimpls():
            return
        import typer
        from typer.main import get_group

        from kvloom.plugins import verb_list

        apart = typer.Typer()
        try:
            self._hooks.kvloom_add_commands(commands=apart)
            tried = apart if verb is None else verb_list.only(apart, verb)
            if tried is not None:
                get_group(tried)
            verb_list.merge(commands, apart)
        except (Exception, SystemExit) as error:
            self._faults["commands"] = _brief(error)

    def why_not(self, kind: str) -> str:
        """The reason why nothing of `kind` comes from this plugin; "" if that is how it should be."""
        if self.state != "ok":
            return f"{self.state}: {self.reason}"
        return f"broken: {self._faults[kind]}" if kind in self._faults else ""

    def status(self, *, imported: bool) -> PluginStatus:
        for kind in KINDS if imported else ():
            for type in self.types(kind):
                self.get(kind, type)
        provides = tuple((kind, type) for kind in KINDS for type in self.types(kind))
        state, reason = self.state, self.reason
        if self._faults:
            state, reason = "broken", "; ".join(f"{kind}: {fault}" for kind, fault in self._faults.items())
        return PluginStatus(self.entry.name, self.dist, self.version, state, reason, provides)


@dataclass(frozen=True, slots=True)
class _ClassName:
    """A class that a hook named and that is not imported yet."""

    cls: str
    """`module:class`."""
    settings: str = ""
    """`module:class` of its `Config`, if the hook named that too."""

    @classmethod
    def of(cls, answer: Any) -> _ClassName | None:
        """From a value of a hook's mapping; None if it is neither a name nor two."""
        names = (answer,) if isinstance(answer, str) else answer
        fits = isinstance(names, tuple) and len(names) in (1, 2) and all(isinstance(name, str) for name in names)
        return cls(*names) if fits else None

    def load(self, kind: str, type: str) -> type[Any]:
        """Import the class. PluginError if it is unfit."""
        cls = _checked(kind, pkgutil.resolve_name(self.cls), type)
        if self.settings and cls.Config is not self.load_settings(kind):
            raise PluginError(f"{cls.__name__}.Config is not {self.settings}, which {KINDS[kind].hook} names")
        return cls

    def load_settings(self, kind: str) -> type[Any]:
        """Import the settings. PluginError if they are unfit."""
        return _checked_settings(kind, pkgutil.resolve_name(self.settings), self.settings)


def _by_type(kind: str, answers: Iterable[Any]) -> dict[str, type[Any] | _ClassName]:
    """Classes or names by type, from what the implementations of a hook returned. PluginError if it is unfit."""
    found: dict[str, type[Any] | _ClassName] = {}
    for answer in answers:
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            raise PluginError(f"{KINDS[kind].hook} returned {answer!r}; return a list of classes")
        named = answer.items() if isinstance(answer, Mapping) else ((None, cls) for cls in answer)
        for type, item in named:
            answer = _checked(kind, item) if type is None else _ClassName.of(item)
            type = type if isinstance(answer, _ClassName | None) else answer.type
            if answer is None or not isinstance(type, str):
                raise PluginError(f"{KINDS[kind].hook} returned {type!r}: {item!r}; name it as 'type': 'module:class'")
            if (kind, type) in RESERVED:
                raise PluginError(f"{getattr(item, '__name__', item)}: the type {type!r} is the core's own")
            if type in found:
                raise PluginError(f"{KINDS[kind].hook} returned two classes of type {type!r}")
            found[type] = answer
    return found


def _checked(kind: str, cls: Any, named: str = "") -> type[Any]:
    """The class, or PluginError if it is not one of `kind`. named: the type that its hook says it has."""
    module, _, name = KINDS[kind].abc.partition(":")
    base = getattr(importlib.import_module(module), name)
    if not _is_subclass(cls, base):
        raise PluginError(f"{KINDS[kind].hook} returned {cls!r}, which is not a subclass of kvloom.{name}")
    if inspect.isabstract(cls):
        raise PluginError(f"{cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))}")
    if not isinstance(getattr(cls, "type", None), str) or not cls.type:
        raise PluginError(f"{cls.__name__} has no `type`, the word that users write in YAML")
    if named and cls.type != named:
        raise PluginError(f"{cls.__name__} has the type {cls.type!r}, and {KINDS[kind].hook} calls it {named!r}")
    _checked_settings(kind, cls.Config, f"{cls.__name__}.Config")
    checked: type[Any] = cls
    return checked


def _checked_settings(kind: str, settings: Any, named: str) -> type[Any]:
    """The settings of a class of `kind`, or PluginError if they cannot be. named: their name in an error."""
    if not _is_subclass(settings, importlib.import_module("kvloom.contracts.component").Config):
        raise PluginError(f"{named} is not a subclass of kvloom.Config")
    names = {word for key, field in settings.model_fields.items() for word in (key, field.alias)}
    if owned := [key for key in KINDS[kind].owned if key in names]:
        raise PluginError(f"{named} uses the key {owned[0]!r}, which belongs to the core")
    checked: type[Any] = settings
    return checked


def _is_subclass(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _no_defaults(manager: pluggy.PluginManager, module: object) -> None:
    """pluggy versions disagree on what a default value of a hook's argument means."""
    for caller in manager.get_hookcallers(module) or []:
        for implementation in caller.get_hookimpls():
            if implementation.kwargnames:
                raise pluggy.PluginValidationError(
                    module, f"{caller.name} gives {implementation.kwargnames[0]!r} a default value; remove it"
                )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


_Found = tuple[metadata.EntryPoint, str]
"""An entry point, and the name of its distribution."""


def _installed() -> tuple[_Found, ...]:
    """All installed plugins. Reading the entry points of every distribution takes a while."""
    return _entry_points(tuple((path, Path(path).stat().st_mtime_ns) for path in sys.path if Path(path).is_dir()))


@lru_cache(maxsize=1)
def _entry_points(of: tuple[tuple[str, int], ...]) -> tuple[_Found, ...]:
    """As they are in these directories at these times."""
    found = metadata.entry_points()
    groups = [group for group in found.groups if group.startswith(_GROUPS)]
    return tuple(_with_dists(entry for group in groups for entry in found.select(group=group)))


def _with_dists(entries: Iterable[metadata.EntryPoint]) -> Iterator[_Found]:
    return ((entry, entry.dist.name if entry.dist else "") for entry in entries)


def _brief(error: BaseException) -> str:
    return _one_line(str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}")


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
