"""The sources of settings: YAML text, KVLOOM_ variables, and `${env:NAME}` inside of values."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from kvloom.bounded import text_of
from kvloom.config import legacy
from kvloom.config.validation_errors import KeyPath, Problem, dotted
from kvloom.errors import ConfigError

PREFIX = "KVLOOM_"
TRACE, TRACE_MAX_BYTES = "KVLOOM_TRACE", "KVLOOM_TRACE_MAX_BYTES"
"""No settings: where every engine of a process writes a trace, see `kvloom trace record`."""
MOST_TEXT = 4 << 20
"""Characters of a configuration."""
MOST_BYTES = 4 * MOST_TEXT
MOST_NODES = 100_000
"""Values in a configuration, with all aliases written out."""
_CHARS = 64
"""Number of characters for which a text counts as one more value."""
_INTEGER, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_MOST_DIGITS = 300
_LONE = re.compile("[\ud800-\udfff]")
_INTERPOLATION = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_UNQUOTED = re.compile(r"""[{\[,:]\s*([^\s"',{\[]*\$\{[^}]*\}[^\s"',}\]]*)""")
_ENV_NAME = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")


def read(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The mapping in a YAML file, and the keys that it gives twice. ConfigError if there is none that can be read."""
    try:
        tree, twice = load_yaml(text := text_of(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(str(path), "nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(str(path), f"{error}; write out what is meant") from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), f"not YAML: {_not_yaml(error, text)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"not YAML: {error}") from None
    except ValueError as error:
        if "\0" in str(path):
            raise ConfigError(repr(str(path)), f"cannot be read: {error}; name a file") from None
        raise ConfigError(str(path), "not YAML: it has an impossible number or date") from None
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        raise ConfigError(str(path), f"should hold settings such as `connector: plain`, not {type(tree).__name__}")
    return tree, twice


def load_yaml(text: str) -> tuple[Any, list[Problem]]:
    """Return the content of a YAML document, and a problem for each key that it gives twice.

    Raises ConfigError for a document larger than any configuration, with text that UTF-8 cannot have, or with a number
    in base 60, and YAMLError, RecursionError or ValueError for text that is not YAML. An alias costs as much as what it
    stands for: a few lines of them can stand for more than there is memory.
    """
    if len(text) > MOST_TEXT:
        raise ConfigError("", f"{len(text)} characters, and a configuration has {MOST_TEXT} at most")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        _written_out(node, {})
        twice = list(repeated(node))  # before merged mappings are put into the node
        return loader.construct_document(node), twice
    finally:
        loader.dispose()


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """The size of a node with its aliases expanded. known: nodes counted before; inside itself, a node counts once."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = total = 1
    if isinstance(node, yaml.ScalarNode):
        total += len(node.value) // _CHARS
        if not node.value.isascii() and _LONE.search(node.value):
            raise ConfigError("", f"line {node.start_mark.line + 1}: half of a surrogate pair is not a character")
        if node.tag == _INTEGER and len(node.value) > _MOST_DIGITS:  # Python refuses to print it
            raise ConfigError("", f"line {node.start_mark.line + 1}: a number of {len(node.value)} digits")
        if node.tag in (_INTEGER, _FLOAT) and ":" in node.value:  # 1:30 is 90
            text = "YAML takes digits with a colon as a number in base 60; put quotes round a text"
            raise ConfigError("", f"line {node.start_mark.line + 1}: {text}")
    else:
        pairs = isinstance(node, yaml.MappingNode)
        children = [part for pair in node.value for part in pair] if pairs else node.value
        for child in children:
            total += _written_out(child, known)
            if total > MOST_NODES:
                raise ConfigError("", f"its aliases stand for more than {MOST_NODES} values")
    known[id(node)] = total
    return total


def _not_yaml(error: yaml.YAMLError, text: str) -> str:
    """The place where the text stops being YAML, and the reason, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    hint = _UNQUOTED.search(line)
    said = f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or 'it is cut short'}"
    return f'{said}; within braces, put quotes round it: "{hint[1]}"' if hint else said


def repeated(node: yaml.Node) -> Iterator[Problem]:
    """YAML lets the last of two equal keys win; that hides mistakes."""
    yield from _repeated(node, (), set())


def _repeated(node: yaml.Node, at: KeyPath, seen: set[int]) -> Iterator[Problem]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _repeated(child, (*at, index), seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, child in node.value:
            word, line = str(key.value), key.start_mark.line + 1
            if word in lines:
                yield (*at, word), f"given twice, in lines {lines[word]} and {line}; remove one"
            lines[word] = line
            yield from _repeated(child, (*at, word), seen)


def overridden(
    tree: Mapping[str, Any], environment: Mapping[str, str], *, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[KeyPath, str], list[Problem]]:
    """`tree` with KVLOOM_ variables on top, the paths that variables set, and errors in the variables.

    `KVLOOM_SALT=x` sets `salt`, `KVLOOM_TIERS__1__CAPACITY=2GiB` sets `tiers.1.capacity`. Values are YAML, except for
    settings that are text. defaults: every setting's, for variables that reach into one which `tree` leaves out.
    """
    result = dict(tree)
    variables: dict[KeyPath, str] = {}
    wrong: list[Problem] = []
    for name in sorted(environment):  # KVLOOM_TIERS comes before what reaches into it
        if not name.startswith(PREFIX) or name in (TRACE, TRACE_MAX_BYTES):
            continue
        first, *rest = name.removeprefix(PREFIX).lower().split("__")
        try:
            if first not in defaults:
                raise ConfigError(name, _no_setting(first, defaults))
            text_alone = isinstance(defaults[first], str) and not rest
            value = environment[name] if text_alone else _parsed(environment[name], name)
            if rest:
                value = _placed(copy.deepcopy(result.get(first, defaults[first])), rest, value, name)
        except ConfigError as error:
            wrong.append(((error.path,), error.problem))
            continue
        result[first] = value
        variables[(first, *(int(word) if word.isdecimal() else word for word in rest))] = name
    return result, variables, wrong


def traced(tree: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """`tree` with the observer that KVLOOM_TRACE asks for, wherever the configuration came from."""
    path, observers = environment.get(TRACE), tree.get("observers", ())
    if not path or not isinstance(observers, list | tuple):
        return dict(tree)
    path = os.path.abspath(os.path.expanduser(path))  # of the environment, so below the working directory
    block = {"type": "trace", "path": path.replace("${", "$${")}
    if most := environment.get(TRACE_MAX_BYTES):
        block["max_bytes"] = most
    return {**tree, "observers": [*observers, block]}


def _placed(node: Any, words: list[str], value: Any, name: str) -> Any:
    """`node` with `value` at the path `words`."""
    if not words:
        return value
    word, *rest = words
    if isinstance(node, list | tuple):
        if not word.isdecimal() or int(word) >= len(node):
            raise ConfigError(name, f"there is no number {word!r} in a list of {len(node)}")
        return [_placed(child, rest, value, name) if index == int(word) else child for index, child in enumerate(node)]
    if isinstance(node, str):
        node = {"type": node}
    if node is not None and not isinstance(node, Mapping):
        raise ConfigError(name, f"there is nothing to set {word!r} in: {node!r}")
    return {**(node or {}), word: _placed((node or {}).get(word), rest, value, name)}


def _no_setting(word: str, known: Mapping[str, Any]) -> str:
    if word in legacy.FIELDS:
        return f"no such setting; LMCache's {word} is {legacy.FIELDS[word].becomes} here"
    close = get_close_matches(word, known, n=1)
    return f"no such setting; did you mean {PREFIX}{close[0].upper()}?" if close else "no such setting; unset it"


def _parsed(text: str, name: str) -> Any:
    try:
        return load_yaml(text)[0]
    except ConfigError as error:
        raise ConfigError(name, f"{error}; write out what is meant") from None
    except RecursionError:
        raise ConfigError(name, "nested too deeply") from None
    except (yaml.YAMLError, ValueError):  # the latter of a date that there is not
        return text


def interpolated(
    tree: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[KeyPath, str], frozenset[str], list[Problem]]:
    """`tree` with `${env:NAME}` replaced in its values, the texts that held one, the inserted values, and errors.

    `$${` stands for `${`. Raises ConfigError if a block contains itself.
    """
    templates: dict[KeyPath, str] = {}
    secrets: set[str] = set()
    missing: list[Problem] = []

    def fill(node: Any, at: KeyPath, above: frozenset[int] = frozenset()) -> Any:
        if id(node) in above:
            raise ConfigError(dotted(at), "an alias of a block that it is itself part of; write its settings out")
        if isinstance(node, Mapping):
            return {key: fill(child, (*at, key), above | {id(node)}) for key, child in node.items()}
        if isinstance(node, list | tuple):
            return [fill(child, (*at, index), above | {id(node)}) for index, child in enumerate(node)]
        return _INTERPOLATION.sub(lambda match: put(match, node, at), node) if isinstance(node, str) else node

    def put(match: re.Match[str], template: str, at: KeyPath) -> str:
        if match[0] == "$${":
            return "${"
        name = _ENV_NAME.fullmatch(match[1])
        if name is None or not match[0].endswith("}"):
            missing.append((at, f"cannot fill in {match[0]}; write ${{env:NAME}}, or $${{ for a plain ${{"))
            return ""
        if name[1] not in environment:
            missing.append((at, f"the environment variable {name[1]} is not set"))
            return ""
        templates[at] = template
        secrets.add(environment[name[1]])
        return environment[name[1]]

    filled = fill(tree, ())
    return filled, templates, frozenset(secrets), missing
