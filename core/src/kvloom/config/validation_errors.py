"""One line for each error in a configuration: the YAML path, the problem, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvloom.contracts.component import Config
from kvloom.errors import ConfigError
from kvloom.redaction import is_secret, masked, without_logins

C = TypeVar("C", bound=Config)

KeyPath = tuple[str | int, ...]
"""The place of a setting: `("tiers", 1, "path")` is written `tiers.1.path`."""

Problem = tuple[KeyPath, str]

_WORDING = {
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "byte_size": "should be a size such as 512MiB or 20GiB",
    "byte_size_unit": "should be a size such as 512MiB or 20GiB",
    "dict_type": "should be a block of settings",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "int_from_float": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_parsing_size": "should be a smaller number",
    "int_type": "should be a whole number",
    "invalid_key": "should have words for keys",
    "list_type": "should be a list",
    "mapping_type": "should be a block of settings",
    "model_attributes_type": "should be a block of settings",
    "model_type": "should be a block of settings",
    "path_type": "should be a path",
    "string_type": "should be text",
    "string_unicode": "should be text that UTF-8 can have",
    "too_short": "should not be empty",
    "tuple_type": "should be a list",
}
_SECRET_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of values that the YAML file does not hold itself. All are equal: only values count."""

    templates: Mapping[KeyPath, str] = field(default_factory=dict, compare=False)
    """The text with `${env:NAME}` in it that stood at each path."""
    variables: Mapping[KeyPath, str] = field(default_factory=dict, compare=False)
    """The KVLOOM_ variable that set each path."""
    secrets: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The values of the environment variables that were interpolated."""

    directory: Path | None = field(default=None, compare=False)
    """The directory that relative paths start in: the file's directory; None: the working directory."""

    def is_by_variable(self, path: KeyPath) -> bool:
        """Return whether a KVLOOM_ variable set the value at `path`."""
        return any(path[:length] in self.variables for length in range(1, len(path) + 1))

    def masked(self, text: str) -> str:
        """`text` without any interpolated value, and without logins. Very short values are not secrets and would be
        found everywhere."""
        text = without_logins(text)
        for secret in sorted(self.secrets, key=len, reverse=True):
            if len(secret) >= _SECRET_LENGTH:
                text = text.replace(secret, "***")
        return text

    def masked_tree(self, node: Any) -> Any:
        """`masked` for every text in a tree of settings."""
        if isinstance(node, Mapping):
            return {key: self.masked_tree(child) for key, child in node.items()}
        if isinstance(node, list | tuple):
            return [self.masked_tree(child) for child in node]
        return self.masked(node) if isinstance(node, str) else node

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """All problems as one error, a line each."""
        return ConfigError.of_all((dotted(path), self.masked(text) + self._setter(path)) for path, text in problems)

    def _setter(self, path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.variables:
                return f" (set by {self.variables[path[:length]]})"
        return ""


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def unknown(word: str, known: Collection[str]) -> str:
    """The error text for an unknown key."""
    close = get_close_matches(word, known, n=1)
    if close:
        return f"unknown key; did you mean {close[0]!r}?"
    return f"unknown key; known: {', '.join(sorted(known))}" if known else "unknown key"


def problems(error: ValidationError, *, at: KeyPath = (), stray: Callable[[KeyPath], str]) -> list[Problem]:
    """Translate pydantic's errors into problems. at: the path of the validated part. stray: returns the error text for
    an unknown key."""
    found: list[Problem] = []
    for details in error.errors(include_url=False):
        path = (*at, *details["loc"])
        several = details.get("ctx", {}).get("found")
        if several:
            found += [((*path, *below), text) for below, text in several]
        else:
            text = stray(path) if details["type"] == "extra_forbidden" else _wording(details, path)
            found.append((path, text))
    return found


def validated(settings_class: type[C], settings: Mapping[str, Any], *, at: str, by_line: bool = False) -> C:
    """Validate the settings of a component as those in YAML. Raises ConfigError with the path `at`.

    by_line: a line for each problem, with the path of its own setting below `at`.
    """
    try:
        return settings_class.model_validate(settings)
    except ValidationError as error:
        found = problems(error, stray=lambda path: unknown(str(path[-1]), settings_class.model_fields))
        if by_line:
            raise ConfigError.of_all((dotted((at, *path)), text) for path, text in found) from None
        said = [": ".join(filter(None, (dotted(path), text))) for path, text in found]
        raise ConfigError(at, "; ".join(said)) from None


def _wording(details: ErrorDetails, path: KeyPath) -> str:
    kind = details["type"]
    if kind == "missing":
        return "missing; it has no default"
    if kind == "value_error":
        return without_logins(str(details["ctx"]["error"]))
    if kind in ("kvloom", "assertion_error"):
        return without_logins(details["msg"])
    text = _WORDING.get(kind) or details["msg"].replace("Input should", "should").replace("String should", "should")
    if any(map(is_secret, path)) or {"salt", "protect"} & {*path}:  # a key may stand where its file should
        return text
    return f"{text}, not {_quoted(masked(details['input']))}"


def _quoted(value: Any) -> str:
    if value is None:
        return "empty"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
