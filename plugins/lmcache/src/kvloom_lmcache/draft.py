"""A configuration in the making: fields that were given, settings that come of them, and a row for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloom import ConfigError
from kvloom_lmcache.fields import MAPPED, Outcome, Row

_MOST = 1e15
"""No size in GiB and no time in seconds is larger."""


@dataclass(slots=True)
class Imported:
    """The configuration made of the fields, with a row for each. Nothing in it holds a password."""

    config: dict[str, Any] = field(default_factory=dict)
    """As YAML has it."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """The fields that each part comes from; parts are named as `chunk_tokens` or `tiers/disk`."""
    rows: list[Row] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that have to be set where the configuration is used, and what to put into each."""

    @property
    def complete(self) -> bool:
        """Nothing was left behind that meant something."""
        return not any(row.outcome in ("no counterpart", "unknown") for row in self.rows)

    def tier(self, kind: str) -> dict[str, Any] | None:
        return next((block for block in self.config.get("tiers", ()) if block["type"] == kind), None)

    def note(self, field: str, text: str) -> None:
        """Add to what is said of a field, also of one that was left at its default."""
        found = next((row for row in self.rows if row.field == field), Row(field, "mapped", "its default"))
        new = Row(field, found.outcome, f"{found.text}; {text}")
        self.rows = [new if row is found else row for row in self.rows] + [new] * (found not in self.rows)

    def tried(self, tree: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The configuration, or another tree of it, as if the variables of `environment` were set."""
        return {key: self._stood_in(child) for key, child in (self.config if tree is None else tree).items()}

    def _stood_in(self, node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: self._stood_in(child) for key, child in node.items()}
        if isinstance(node, list):
            return [self._stood_in(child) for child in node]
        if isinstance(node, str):
            for name in self.environment:
                node = node.replace(variable(name), "not-known-here")
        return node


class Draft:
    """One run over the fields: each part of an import takes up its own."""

    def __init__(self, given: Mapping[str, Any], connector: str, separator: Sequence[int] | None) -> None:
        self.given = given
        self.values = {**MAPPED, **given}
        self.separator = separator
        self.done = Imported({"connector": connector, "tiers": []})
        self.taken: set[str] = set()
        """Fields of `NOT_MAPPED` that have become something all the same."""

    def say(self, name: str, outcome: Outcome, text: str, *, part: str = "") -> None:
        """A row for a field that was given. part: of the new configuration, that comes from it."""
        if name in self.given:
            self.row(name, outcome, text, part=part)

    def row(self, name: str, outcome: Outcome, text: str, *, part: str = "") -> None:
        """A row for a field, or for what was inside of one, such as `extra_config.protocol`. The last one counts."""
        self.done.rows = [row for row in self.done.rows if row.field != name]
        self.done.rows.append(Row(name, outcome, text))
        if part:
            self.done.sources.setdefault(part, []).append(name)

    def tier(self, names: Sequence[str], **block: Any) -> dict[str, Any]:
        """Add a tier that comes from the fields `names`."""
        self.done.config["tiers"].append(block)
        for name in names:
            self.say(name, "mapped", f"the tier `{block['type']}`", part=f"tiers/{block['type']}")
        return block

    def flag(self, name: str) -> bool:
        """Raises ConfigError for what is neither true nor false; empty is the default."""
        value = MAPPED[name] if self.values[name] is None else self.values[name]
        if not isinstance(value, bool):
            raise ConfigError(name, f"should be true or false, not {shown(value)}")
        return value

    def number(self, name: str) -> float:
        """Raises ConfigError for what is not a number from 0, or one that means nothing."""
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
            raise ConfigError(name, f"should be a number from 0, not {shown(value)}")
        return value

    def text(self, name: str) -> str:
        """Empty if there is none, as LMCache takes an empty field, `null` and `false`. Raises ConfigError."""
        value = self.values[name]
        if value is not None and value is not False and not isinstance(value, str):
            raise ConfigError(name, f"should be text, not {shown(value)}")
        return (value or "").strip()

    def secret(self, name: str, what: str) -> str:
        """Return what stands in the file for a password. name: of the variable to set. what: to put into it."""
        self.done.environment[name] = what
        return variable(name)


def variable(name: str) -> str:
    """Return the text by which a value of the configuration reads an environment variable."""
    return f"${{env:{name}}}"


def literal(text: str) -> str:
    """`text` as a value of the configuration, in which `${` would begin a variable."""
    return text.replace("${", "$${")


def shown(value: Any) -> str:
    """Return what a message may say of a value: only the type of one that could hold a password."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) <= _MOST or isinstance(value, float) else "a number of many digits"
    words: dict[type, str] = {str: "text", list: "a list", tuple: "a list", dict: "a block"}
    return words.get(type(value), f"a {type(value).__name__}")
