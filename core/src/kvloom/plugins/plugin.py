"""One plugin: its state, and the classes that its hooks returned. The only module that calls pluggy.

A plugin that fails becomes a state with a reason, never an exception: serving must not stop because of a plugin that no
configuration names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from kvloom.errors import PluginError
from kvloom.plugins import hookspecs
from kvloom.plugins.kinds import KINDS, RESERVED

if TYPE_CHECKING:
    import typer

API = "kvloom.v1"
"""The entry-point group: the version of the plugin interface, readable without importing a plugin."""

State = Literal["ok", "blocked", "incompatible", "broken"]


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


@functools.cache
def _spec_of(name: str) -> Any:
    """The options of a hook as pluggy reads them; None for other names of the module of hooks."""
    return pluggy.PluginManager("kvloom").parse_hookspec_opts(hookspecs, name)


class _Manager(pluggy.PluginManager):
    """Reads the hooks once for all plugins, which takes most of the time of a discovery."""

    def parse_hookspec_opts(self, module_or_class: object, name: str) -> Any:
        return _spec_of(name)


_read: dict[ModuleType, tuple[list[tuple[str, Any]], Any]] = {}
"""By module: all its names at the time, and the hooks among them. Every engine asks, and modules hardly change."""


def _hooks_of(module: Any) -> Any:
    """The hooks of an entry module. Raises what pluggy raises, PluginValidationError above all."""
    names = list(vars(module).items()) if isinstance(module, ModuleType) else []
    if names and module in _read:
        then, hooks = _read[module]
        if len(names) == len(then) and all(a is c and b is d for (a, b), (c, d) in zip(names, then, strict=True)):
            return hooks
    # A manager of its own: whatever a plugin does to it, no other plugin sees.
    manager = _Manager("kvloom")
    manager.add_hookspecs(hookspecs)
    manager.register(module)
    manager.check_pending()
    _no_defaults(manager, module)
    if names:
        _read[module] = names, manager.hook
    return manager.hook


class Plugin:
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
        try:
            module = self.entry.load()
        except (Exception, SystemExit) as error:
            self.state, self.reason = "broken", _brief(error)
            return
        try:
            self._hooks = _hooks_of(module)
        except pluggy.PluginValidationError as error:
            self.state, self.reason = "incompatible", _one_line(str(error))
        except Exception as error:
            self.state, self.reason = "broken", _brief(error)

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
        """The reason why this plugin provides nothing of `kind`; "" if nothing went wrong."""
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


def _brief(error: BaseException) -> str:
    return _one_line(str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}")


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
