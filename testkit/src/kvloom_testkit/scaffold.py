"""`kvloom new`: a package to start a plugin from, which installs, is listed, and meets every requirement as it is.

Its component is the kit's reference of that kind under a new name: what is tried here every day is what authors get.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from kvloom import ConfigError, Registry
from kvloom.plugins import KINDS
from kvloom_testkit.kinds import CLASSES, kind_of
from kvloom_testkit.subjects import HARNESSES

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Start:
    """What the package of one kind is made from."""

    kind: str
    module: str
    """Of `kvloom_testkit.reference`."""
    name: str
    """Of the reference class."""
    type: str
    suffix: str
    """What the new class's name ends with."""
    settings: str = ""
    """Arguments of its Config in the test, where `tmp_path` is a directory."""
    options: str = ""
    """Of `kvloom check`."""
    harness: bool = False
    """Its tests need more than the component: the module `<module>_harness` has a function `harness` of it."""
    yaml: str = ""


STARTS = {
    "backend": Start(
        "backend", "backend", "DirectoryBackend", "kit_directory", "Backend", "path=tmp_path", " --set path={tmp}",
        yaml="tiers:\n  - {type: memory, capacity: 1GiB}\n  - {type: $type, path: /somewhere}",
    ),
    "serializer": Start(
        "serializer", "serializer", "RowsSerializer", "kit_rows", "Serializer",
        yaml="tiers:\n  - {type: dict, serializer: {type: $type}}",
    ),
    "connector": Start(
        "connector", "connector", "SlotsConnector", "kit_slots", "Connector", harness=True,
        yaml="connector: {type: $type}\ntiers:\n  - {type: memory, capacity: 1GiB}",
    ),
    "tokens": Start(
        "tokens", "tokens", "EvenTokenDatabase", "kit_even", "TokenDatabase",
        yaml="tokens: {type: $type}\ntiers:\n  - {type: memory, capacity: 1GiB}",
    ),
    "retriever": Start(
        "blend retriever", "retriever", "PiecesRetriever", "kit_pieces", "Retriever", harness=True,
        yaml="blend: {retriever: {type: $type}}",
    ),
    "executor": Start(
        "blend executor", "executor", "NoneExecutor", "kit_none", "Executor", yaml="blend: {executor: {type: $type}}",
    ),
    "observer": Start(
        "observer", "observer", "CountingObserver", "kit_counting", "Observer", yaml="observers:\n  - {type: $type}",
    ),
}  # fmt: skip
"""By the word of `kvloom new`."""

_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$dist"
version = "0.1.0"
description = "kvloom $kind: $type"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["kvloom>=0.1,<0.2"$more]

[project.optional-dependencies]
test = ["kvloom-testkit>=0.1,<0.2"]

[project.entry-points."kvloom.v1"]
$plugin = "$package"
$harness_entry
[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
$package = ["py.typed"]
"""

_HARNESS = """
[project.entry-points."{group}"]
"{name}" = "{home}"
"""

_README = """# $dist

A kvloom $kind of type `$type`.

    pip install -e '.[test]'
    kvloom plugins                                # lists $plugin as ok
    pytest                                        # the requirements of its kind, and your own tests
    kvloom check $word $type$options

In a configuration:

    $yaml
"""

_ENTRY = '''"""The entry module: every `kvloom` command imports it, so it imports nothing itself."""

from __future__ import annotations

from kvloom.hookspecs import hookimpl


@hookimpl
def $hook() -> list[type]:
    from $package.$module import $cls

    return [$cls]
'''

_TEST = '''"""$cls meets the requirements of its kind."""

from __future__ import annotations

import pytest
from kvloom_testkit import $conformance
$imports

class Test$cls($conformance):
    @pytest.fixture
    def make(self$argument):
        return $make
'''


def create(word: str, type_: str, into: Path) -> Path:
    """Write the package of a new plugin into a directory of `into`, which must not be there yet; where it is.

    word: a kind. Raises ConfigError.
    """
    word = kind_of(word).removeprefix("blend ")
    if not _NAME.fullmatch(type_):
        raise ConfigError("name", f"{type_!r} is no name for a type: small letters, digits and single underscores")
    start = STARTS[word]
    if type_ in Registry.discover().types(start.kind):
        raise ConfigError("name", f"there is a {start.kind} of type {type_!r} already")
    package = f"kvloom_{word}_{type_}"
    place = into / package.replace("_", "-")
    if place.exists():
        raise ConfigError("name", f"{place} is there already")
    for path, text in _package(word, start, type_, package).items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text, encoding="utf-8")
    return place


def _package(word: str, start: Start, type_: str, package: str) -> dict[str, str]:
    cls = "".join(part.title() for part in type_.split("_")) + start.suffix
    module = f"{type_}_{word}"
    conformance = CLASSES[start.kind].split(":")[1]
    source = _source(start.module).replace(start.name, cls).replace(f'"{start.type}"', f'"{type_}"')
    made = f"{cls}({cls}.Config({start.settings}), SPEC)"
    values = {
        "cls": cls,
        "conformance": conformance,
        "dist": package.replace("_", "-"),
        "harness_entry": "",
        "hook": KINDS[start.kind].hook,
        "kind": start.kind,
        "module": module,
        "more": ', "torch>=2.6"' if "import torch" in source else "",
        "options": start.options,
        "package": package,
        "plugin": f"{word}_{type_}",
        "type": type_,
        "word": start.kind.replace(" ", "-"),
        "argument": ", tmp_path" if start.settings else "",
        "imports": f"from kvloom_testkit.subjects import SPEC\n\nfrom {package}.{module} import {cls}\n",
        "make": f"lambda: harness(lambda: {made})" if start.harness else f"lambda: {made}",
    }
    if start.harness:
        name, home = f"{start.kind.replace(' ', '_')}.{type_}", f"{package}.testing:harness"
        values["harness_entry"] = _HARNESS.format(group=HARNESSES, name=name, home=home)
        values["imports"] += f"from {package}.testing import harness\n"
    values["yaml"] = Template(start.yaml).substitute(values).replace("\n", "\n    ")
    texts = {
        "pyproject.toml": Template(_PYPROJECT).substitute(values),
        "README.md": Template(_README).substitute(values),
        f"src/{package}/__init__.py": Template(_ENTRY).substitute(values),
        f"src/{package}/{module}.py": source,
        f"src/{package}/py.typed": "",
        "tests/test_conformance.py": Template(_TEST).substitute(values),
    }
    if start.harness:
        text = _source(f"{start.module}_harness").replace(start.name, cls)
        home = f"kvloom_testkit.reference.{start.module}"
        texts[f"src/{package}/testing.py"] = text.replace(home, f"{package}.{module}")
    return texts


def _source(module: str) -> str:
    return (files("kvloom_testkit.reference") / f"{module}.py").read_text(encoding="utf-8")
