"""Installed components as subjects of the kit: found by kind and type, made from settings as in YAML."""

from __future__ import annotations

import os
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloom import ConfigError, KVSpec, PluginError, Registry, validated
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.kinds import conformance_of, kind_of

SPEC = KVSpec(model="kit", num_layers=3, num_kv_heads=2, head_size=8, dtype="bfloat16")
"""The model that components are made for."""
HARNESSES = "kvloom.testkit"
"""The entry-point group of harnesses, by `<kind>.<type>`: what the kit needs beside the component itself."""

_OWN_HARNESSES = {
    "blend_retriever.kit_pieces": "kvloom_testkit.reference.retriever_harness:harness",
    "connector.kit_pages": "kvloom_testkit.connectors.harnesses:pages",
    "connector.kit_slots": "kvloom_testkit.reference.connector_harness:harness",
    "connector.plain": "kvloom_testkit.connectors.harnesses:plain",
}
"""Harnesses of kvloom's built-in components, which do not depend on the kit, and of the kit's own."""
_TMP = "{tmp}"

chosen: list[Subject] = []
"""The components that `--kvloom` names."""


@dataclass(frozen=True)
class Subject:
    """One component and its settings."""

    kind: str
    type: str
    cls: type[Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, tmp_path: Path) -> Any:
        """A new instance, in its harness if its kind needs one. In texts of the settings, {tmp} becomes `tmp_path`."""
        config, harness = self.config(tmp_path), self._harness
        return self.cls(config, SPEC) if harness is None else harness(lambda: self.cls(config, SPEC))

    @cached_property
    def _harness(self) -> Callable[[Callable[[], Any]], Any] | None:
        return self.harness()  # which looks through all that is installed: not for each instance

    def config(self, tmp_path: Path) -> Any:
        """Its typed settings. Raises ConfigError."""
        return validated(self.cls.Config, _filled(self.settings, tmp_path), at=f"{self.kind} {self.type}")

    def tests(self) -> type[Conformance]:
        """The conformance class of its kind, with `make`."""
        subject = self

        @pytest.fixture
        def make(self: Conformance, tmp_path: Path) -> Callable[[], Any]:
            return lambda: subject.make(tmp_path)

        base = conformance_of(self.kind)
        own = {"make": make, "__doc__": base.__doc__, "__module__": __name__}
        separator = getattr(self._harness, "separator", None)
        return type(base.__name__, (base,), own if separator is None else {**own, "separator": separator})

    def harness(self) -> Callable[[Callable[[], Any]], Any] | None:
        """The function that makes a harness from a component's factory; None if it needs none. Raises ConfigError.

        A retriever's may have an attribute `separator`: the tokens that must stand between texts.
        """
        name = f"{self.kind.replace(' ', '_')}.{self.type}"
        if name in _OWN_HARNESSES:
            own: Callable[[Callable[[], Any]], Any] = pkgutil.resolve_name(_OWN_HARNESSES[name])
            return own
        for found in metadata.entry_points(group=HARNESSES, name=name):
            try:
                theirs: Callable[[Callable[[], Any]], Any] = found.load()
            except Exception as error:
                raise ConfigError(
                    f"{self.kind} {self.type}", f"its harness {found.value} cannot be imported: {error}"
                ) from error
            return theirs
        if conformance_of(self.kind).needs_harness:
            raise ConfigError(
                f"{self.kind} {self.type}",
                f"to test a {self.kind} the kit needs a harness: write an entry point "
                f"{name} in the group {HARNESSES!r}, a function of a function that "
                f"makes the component; see kvloom_testkit.{conformance_of(self.kind).__name__}",
            )
        return None


def choose(
    named: Iterable[str], settings: Iterable[str], *, said_by: tuple[str, str] = ("--kvloom", "--kvloom-set")
) -> list[Subject]:
    """The subjects of `KIND:TYPE` and `KEY=VALUE` texts. Raises ConfigError.

    said_by: what the user gave them with, for errors.
    """
    by_name, by_setting = said_by
    values = dict(_setting(text, by_setting) for text in settings)
    registry, found = Registry.discover(), []
    for name in named:
        word, separator, type_ = name.partition(":")
        if not separator:
            raise ConfigError(by_name, f"expected KIND:TYPE, such as backend:disk, not {name!r}")
        kind = kind_of(word)
        try:
            cls = registry.get(kind, type_)
        except PluginError as error:
            raise ConfigError(by_name, str(error)) from error
        subject = Subject(kind, type_, cls, values)
        subject.config(Path(tempfile.gettempdir()))  # report errors now, and once
        subject.harness()
        found.append(subject)
    return found


def _setting(text: str, said_by: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(said_by, f"expected KEY=VALUE, not {text!r}")
    try:
        return key, value if _TMP in value else yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):  # such as of 2024-99-99, and of many brackets
        hint = f"; {_TMP} stands for a directory" if "{" in value else ""
        raise ConfigError(said_by, f"{key}: {value!r} is not YAML; put it in quotes{hint}") from None


def _filled(value: Any, tmp_path: Path) -> Any:
    if isinstance(value, str):
        return os.path.expandvars(value.replace(_TMP, str(tmp_path)))
    if isinstance(value, Mapping):
        return {key: _filled(each, tmp_path) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, tmp_path) for each in value]
    return value
