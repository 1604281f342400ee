"""`kvloom new`: writes the package of a new plugin, which installs, is listed, and meets every requirement.

Its component is the kit's reference of that kind under a new name, so that authors start from tested code.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from string import Template

import yaml

import kvloom
from kvloom import KINDS, ConfigError, Registry
from kvloom_testkit.kinds import CLASSES, kind_of
from kvloom_testkit.subjects import HARNESSES

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 40
_CAPITAL = re.compile(r"(?<=.)(?=[A-Z])")
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Start:
    """The template for a package of one kind."""

    kind: str
    noun: str
    """The kind's name at the beginning of a sentence."""
    module: str
    """The module in `kvloom_testkit.reference`."""
    name: str
    """The name of the reference class."""
    type: str
    suffix: str
    """The end of the new class's name; in lower case, also of its module's name."""
    change: str
    """The author's first step."""
    yaml: str
    settings: str = ""
    """Arguments of its Config in the test, where `tmp_path` is a directory."""
    options: str = ""
    """Options of `kvloom check`."""
    harness: bool = False
    """Its tests need more than the component: the module `<module>_harness` has a function `harness` of it."""


STARTS = {
    "backend": Start(
        "backend", "A storage backend", "backend", "DirectoryBackend", "kit_directory", "Backend",
        "Replace the directory by your store: first its settings, then `put`, `get`, `contains` and `delete`, then "
        "`scan`. Set `persistent` and `shared` to what is true, or delete them. `hold` is for stores that processes "
        "share: without it, each of them evicts.",
        "tiers:\n  - {type: memory, capacity: 1GiB}\n  - {type: $type, path: /somewhere}",
        settings="path=tmp_path", options=" --set path={tmp}",
    ),
    "serializer": Start(
        "serializer", "A serializer", "serializer", "RowsSerializer", "kit_rows", "Serializer",
        "Change `encode` and `decode`, and the bound of `max_encoded_bytes`. Delete `view` unless a blob has the bytes "
        "of its chunk, and the methods for layers unless single layers can be decoded. Set `lossless = False` if it is "
        "lossy, and `formats = frozenset({MemoryFormat.KV_BLOB})` if it must distinguish K from V.",
        "tiers:\n  - {type: memory, capacity: 1GiB}\n  - {type: dict, serializer: {type: $type}}",
    ),
    "connector": Start(
        "connector", "A GPU connector", "connector", "SlotsConnector", "kit_slots", "Connector",
        "Replace `pool` and `slots` by your engine's KV: describe the arguments in the class's docstring, validate "
        "them in `check`, and copy in `read` and `write`. Delete `read_layer` and `write_layer` if it cannot move "
        "single layers. `testing.py` makes the same memory for the tests.",
        "connector: {type: $type}\ntiers:\n  - {type: memory, capacity: 1GiB}",
        harness=True,
    ),
    "tokens": Start(
        "tokens", "A token database", "tokens", "EvenTokenDatabase", "kit_even", "TokenDatabase",
        "Change `cuts`, which returns the segments, and write `learn` if they depend on traffic. Keep `root` and "
        "`digest`: a key must cover the type, the fingerprint, the salt and every token up to its end.",
        "tokens: {type: $type}\ntiers:\n  - {type: memory, capacity: 1GiB}",
    ),
    "retriever": Start(
        "blend retriever", "A blend retriever", "retriever", "PiecesRetriever", "kit_pieces", "Retriever",
        "Replace the dictionary by your store: `new_request` finds the known parts of a batch, and `result` of its "
        "task returns them layer by layer. The tests call `add` through `testing.py`. `self.engine` is "
        "the engine that it retrieves for; `kvloom-blend` runs models with it.",
        "blend: {retriever: {type: $type}}",
        harness=True,
    ),
    "executor": Start(
        "blend executor", "A blend executor", "executor", "NoneExecutor", "kit_none", "Executor",
        "Select more tokens: `_chosen` must keep those that it has now, and never have one that the layer before has "
        "left out. Retrieved K is already rotated to the present positions. `kvloom-blend` runs models with it.",
        "blend: {executor: $type}",
    ),
    "observer": Start(
        "observer", "An observer", "observer", "CountingObserver", "kit_counting", "Observer",
        "Change `on_event`. It receives all events on one thread, so leave slow work to another one. Release "
        "everything in `close`.",
        "observers:\n  - {type: $type}",
    ),
}  # fmt: skip
"""By the word of `kvloom new`."""

_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$dist"
version = "0.1.0"
description = "$noun for kvloom: $type"
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

$noun for kvloom, of type `$type`.

    pip install -e '.[test]'
    kvloom plugins    # lists $plugin as ok
    pytest            # the requirements of its kind, and your own tests
    kvloom check $word $type$options

In a configuration:

    $yaml

## What to change

The class is in `$source`. It works, and does something simple.
$change

`pytest` shows the requirements that are not met; `python -m kvloom_testkit.contracts contracts` writes all of them,
with the reasons, to `contracts/$page.md`.
"""

_ENTRY = '''"""The entry module: every `kvloom` command imports it, so it names the class and does not import it."""

from __future__ import annotations

import kvloom


@kvloom.hookimpl
def $hook() -> dict[str, str]:
    return {$names}
'''

_NAMES = """
        # `kvloom config check` imports torch because of this class. It does not if you name the settings too: write a
        # pair, with "kvloom:Config" for none, or else the class's `Config` in a module that does not import torch.
        "$type": "$package.$module:$cls",
    """

_TEST = '''"""$cls meets the requirements of its kind."""

from __future__ import annotations

import pytest
from kvloom_testkit import SPEC, $conformance

$imports

class Test$cls($conformance):
    """Add your own tests here or in other files."""

    @pytest.fixture
    def make(self$argument):  # with settings that suit a test
        return $make
'''


def create(word: str, type_: str, into: Path) -> Path:
    """Write the package of a new plugin into a directory of `into`, which must not be there yet; where it is.

    word: a kind. Raises ConfigError.
    """
    word = kind_of(word).removeprefix("blend ")
    if not _NAME.fullmatch(type_) or len(type_) > _LONGEST or iskeyword(type_) or yaml.safe_load(type_) != type_:
        raise ConfigError(
            "name",
            f"{type_!r} is no name for a type: small letters, digits and single underscores, at most {_LONGEST}, "
            "and no reserved word of Python or YAML",
        )
    start = STARTS[word]
    if type_ in Registry.discover().types(start.kind):
        raise ConfigError("name", f"there is a {start.kind} of type {type_!r} already")
    if (cls := _class_name(start, type_)) in kvloom.__all__:
        raise ConfigError("name", f"kvloom has a class of this name, {cls}, already; choose another name")
    package = f"kvloom_{word}_{type_}"
    place = into / package.replace("_", "-")
    if place.exists():
        raise ConfigError("name", f"{place} exists already")
    try:
        for path, text in _package(word, start, type_, package).items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--into", f"{place} cannot be written: {error}") from error
    return place


def _package(word: str, start: Start, type_: str, package: str) -> dict[str, str]:
    cls = _class_name(start, type_)
    module = f"{type_}_{_CAPITAL.sub('_', start.suffix).lower()}"
    conformance = CLASSES[start.kind].split(":")[1]
    source = _begun(_renamed(start.module, start, cls).replace(f'"{start.type}"', f'"{type_}"'), start)
    made = f"{cls}({cls}.Config({start.settings}), SPEC)"
    heavy = "import torch" in source
    values = {
        "change": textwrap.fill(start.change, _WIDTH),
        "cls": cls,
        "conformance": conformance,
        "dist": package.replace("_", "-"),
        "harness_entry": "",
        "hook": KINDS[start.kind].hook,
        "noun": start.noun,
        "page": start.kind.replace(" ", "-"),
        "module": module,
        "more": ', "torch>=2.6"' if heavy else "",
        "options": start.options,
        "source": f"src/{package}/{module}.py",
        "package": package,
        "plugin": f"{word}_{type_}",
        "type": type_,
        "word": word,
        "argument": ", tmp_path" if start.settings else "",
        "imports": f"from {package}.{module} import {cls}\n",
        "make": f"lambda: harness(lambda: {made})" if start.harness else f"lambda: {made}",
    }
    values["names"] = Template(_NAMES if heavy else '"$type": "$package.$module:$cls"').substitute(values)
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
        text = _renamed(f"{start.module}_harness", start, cls)
        home = f"kvloom_testkit.reference.{start.module}"
        texts[f"src/{package}/testing.py"] = text.replace(home, f"{package}.{module}")
    return texts


def _class_name(start: Start, type_: str) -> str:
    return "".join(part.title() for part in type_.split("_")) + start.suffix


def _begun(source: str, start: Start) -> str:
    """The module with what to do about it in its docstring."""
    title, rest = source.split('"""\n', 1)
    what = textwrap.fill(f"Written by `kvloom new`. {start.change}", _WIDTH)
    return f'{title}\n\n{what}\n"""\n{rest}'


def _renamed(module: str, start: Start, cls: str) -> str:
    """A module of the reference, in which the component, and what else is named like it, has its new name."""
    old, new = start.name.removesuffix(start.suffix), cls.removesuffix(start.suffix)
    return re.sub(rf"\b{old}(?=[A-Z])", new, _source(module))


def _source(module: str) -> str:
    return (files("kvloom_testkit.reference") / f"{module}.py").read_text(encoding="utf-8")
