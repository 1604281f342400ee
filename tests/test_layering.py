"""Imports go one way, plugins see only public names, and the command line starts without torch."""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import kvloom

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/kvloom"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

LAYERS: list[list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvloom"]["layers"]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
PUBLIC_MODULES = {"kvloom.device", "kvloom.inspection"}
"""Modules of core, besides `kvloom` itself, whose `__all__` other packages may import from."""
HOME = {name: home.split(".")[0] for name, home in {**kvloom._HOME, **kvloom._MODULES}.items()}

NONDETERMINISTIC = {"threading", "time", "random", "queue", "concurrent", "asyncio", "multiprocessing", "secrets"}
FORBIDDEN_IN_CORE = {
    **{name: {"runtime"} for name in NONDETERMINISTIC},
    "threading": {"runtime", "interrupts", "format"},  # the last for memory that is each thread's own
    "time": {"runtime", "interrupts"},
    "queue": {"interrupts"},
    "pluggy": {"plugins"},
    "pickle": set(),
}
"""Module -> the parts of core that may import it."""


class Import(NamedTuple):
    module: str
    name: str
    """The name in `from module import name`; empty for `import module`."""
    line: int
    only_for_types: bool


@cache
def imports(source: str, package: str) -> tuple[Import, ...]:
    """Every import of `source`, a module inside `package`, relative ones made absolute."""

    def walk(node: ast.AST, only_for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, True)
            for child in node.orelse:
                yield from walk(child, only_for_types)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", node.lineno, only_for_types)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            module = importlib.util.resolve_name(dots + (node.module or ""), package) if dots else str(node.module)
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, only_for_types)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, only_for_types)

    return tuple(walk(parsed(source), False))


def parsed(source: str) -> ast.Module:
    return ast.parse(source)  # the trees of all packages have more than 100 MB: none is kept


def core_part(found: Import) -> str | None:
    """The part of core that an import reaches; None for another distribution or the package itself."""
    parts = found.module.split(".")
    if parts[0] != "kvloom":
        return None
    if len(parts) > 1:
        return parts[1]
    return HOME.get(found.name, found.name if found.name in RANK else None)


def core_violations(source: str, module: str) -> list[str]:
    """Return a line for each import that a module of core (`kvloom.pipeline.stack`) may not have."""
    part = module.split(".")[1]
    package = module.rpartition(".")[0]
    problems = []
    for found in imports(source, package):
        if found.only_for_types:
            continue
        top = found.module.split(".")[0]
        if part not in FORBIDDEN_IN_CORE.get(top, {part}):
            problems.append(f"{module}:{found.line} imports {top}")
        target = core_part(found)
        if part == "builtin" or target is None:
            continue
        if target not in RANK:
            problems.append(f"{module}:{found.line} imports kvloom.{target}, which has no place in the order")
        elif RANK[target] > RANK[part]:
            problems.append(f"{module}:{found.line} imports kvloom.{target}, which is above it")
    return problems


def plugin_violations(source: str, module: str) -> list[str]:
    """Imports of names that are not public, in a plugin's module or one of `kvloom.builtin`."""
    package = module.rpartition(".")[0] or module
    own = "kvloom.builtin" if module.startswith("kvloom.") else module.split(".")[0]
    public = {*kvloom.__all__, "__all__"}
    problems = []
    for found in imports(source, package):
        parts = found.module.split(".")
        if parts[0] != "kvloom" or f"{found.module}.".startswith(f"{own}."):
            continue
        if found.module in PUBLIC_MODULES and found.name in importlib.import_module(found.module).__all__:
            continue
        if len(parts) > 1 or (found.name and found.name not in public):
            what = ".".join([*parts, found.name]).rstrip(".")
            problems.append(f"{module}:{found.line} imports {what}, which is not public")
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="kvloom"), attr=name) if name not in public:
                problems.append(f"{module}:{node.lineno} uses kvloom.{name}, which is not public")
    return problems


def sibling_violations(source: str, module: str) -> list[str]:
    """Return a line for each import from inside of another distribution of this repository."""
    own = module.split(".")[0]
    problems = []
    for found in imports(source, module.rpartition(".")[0]):
        top, *below = found.module.split(".")
        if top.startswith("kvloom_") and top != own and (below or (found.name and is_inside(top, found.name))):
            problems.append(f"{module}:{found.line} imports {found.module}.{found.name}, which is not public")
    return problems


@cache
def is_inside(package: str, name: str) -> bool:
    """Return whether a name is a module of a package that the package itself does not export."""
    if not any(ROOT.glob(f"*/*/src/{package}/{name}*")):
        return False
    (init,) = ROOT.glob(f"*/*/src/{package}/__init__.py")
    listed = [node for node in parsed(init.read_text()).body if ast.unparse(node).startswith("__all__ = ")]
    return not any(name in ast.literal_eval(node.value) for node in listed if isinstance(node, ast.Assign))


def modules(source_folder: Path) -> Iterator[tuple[str, str]]:
    """(dotted name, source) of every module under a src folder; a package is named `package.__init__`."""
    for path in sorted(source_folder.rglob("*.py")):
        yield ".".join(path.relative_to(source_folder).with_suffix("").parts), path.read_text(encoding="utf-8")


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the rules, on this repository -------------------------------------------------------------------------------------


def test_core_imports_go_one_way() -> None:
    found = [(name, source) for name, source in modules(CORE.parent) if name != "kvloom.__init__"]
    assert len(found) > 10
    assert [problem for name, source in found for problem in core_violations(source, name)] == []


def test_every_part_of_core_has_a_place_in_the_order() -> None:
    parts = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert parts - {"__init__", "builtin"} <= set(RANK)


def test_contributing_shows_the_layers() -> None:
    lines = [", ".join(layer) for layer in LAYERS]
    assert (
        "\n".join(f"< {line}" if at else line for at, line in enumerate(lines))
        in (ROOT / "CONTRIBUTING.md").read_text()
    )


SOURCES = [ROOT / "core/src", ROOT / "testkit/src", *(plugin / "src" for plugin in PLUGINS)]


@pytest.mark.parametrize("folder", SOURCES, ids=lambda path: path.parent.name)
def test_no_module_imports_itself_through_others(folder: Path) -> None:
    """Imports for types alone count, too."""
    sources = {name.removesuffix(".__init__"): (name, source) for name, source in modules(folder)}
    graph: dict[str, set[str]] = {}
    for module, (name, source) in sources.items():
        reached = {
            inner if (inner := f"{found.module}.{found.name}") in sources else found.module
            for found in imports(source, name.rpartition(".")[0])
        }
        graph[module] = (reached & sources.keys()) - {module}
    graphlib.TopologicalSorter(graph).prepare()


def test_builtin_uses_only_public_names() -> None:
    found = [(name, source) for name, source in modules(CORE.parent) if name.startswith("kvloom.builtin.")]
    assert found
    assert [problem for name, source in found for problem in plugin_violations(source, name)] == []


@pytest.mark.parametrize("package", [*PLUGINS, ROOT / "testkit"], ids=lambda path: path.name)
def test_packages_use_only_public_names_of_each_other(package: Path) -> None:
    found = list(modules(package / "src"))
    assert found
    assert [problem for name, source in found for problem in plugin_violations(source, name)] == []
    assert [problem for name, source in found for problem in sibling_violations(source, name)] == []


def test_kvloom_and_backends_import_no_torch() -> None:
    backends = [path for path in PLUGINS if path.name.startswith("backend_")]
    found = [module for plugin in backends for module in modules(plugin / "src")]
    torch = {name: [one.line for one in imports(source, name) if is_torch(one)] for name, source in found}
    assert found and {name: lines for name, lines in torch.items() if lines} == {}
    names = ["kvloom", *(name.removesuffix(".__init__") for name, _ in found)]
    script = (
        f"import importlib, sys\nfor name in {names}:\n"
        "    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    )
    run("-c", script)


def is_torch(found: Import) -> bool:
    return found.module.split(".")[0] == "torch" and not found.only_for_types


def heavy_components() -> list[tuple[str, str]]:
    """Every connector beside every serializer, each at least once."""
    registry = kvloom.Registry.discover()
    connectors, serializers = (list(registry.all_settings(kind)) for kind in ("connector", "serializer"))
    assert {"vllm", "transformers", "sglang"} <= set(connectors) and {"cachegen", "torch"} <= set(serializers)
    return [(one, serializers[number % len(serializers)]) for number, one in enumerate(connectors)]


def test_settings_of_our_components_load_no_torch() -> None:
    script = (
        "import sys, kvloom\n"
        "registry = kvloom.Registry.discover()\n"
        "for kind in kvloom.KINDS: assert registry.all_settings(kind), kind\n"
        "print('torch' in sys.modules)"
    )
    assert run("-c", script).strip() == "False"


def test_verbs_that_move_no_kv_load_little(tmp_path: Path) -> None:
    config = tmp_path / "kv.yaml"
    verbs = [["--help"], ["plugins"]]
    for number, (connector, serializer) in enumerate(heavy_components()):
        config = tmp_path / f"{number}.yaml"
        tier = f"{{type: disk, path: {tmp_path}, serializer: {serializer}}}"
        blend = "blend: {retriever: {type: separator, separator: 1}}"
        config.write_text(f"connector: {connector}\ntiers: [memory, {tier}]\n{blend}\n")
        verbs += [["config", "check", str(config)]]
    verbs += [["config", "show", str(config)], ["stat", str(config)]]
    unwanted = {"torch", "transformers", "vllm", "numpy", "fsspec", "asyncio", "kvloom.engine"}
    script = (
        "import contextlib, sys\n"
        "from kvloom.cli.main import main\n"
        f"for verb in {verbs}:\n"
        "    sys.argv = ['kvloom', *verb]\n"
        "    try: main()\n"
        "    except SystemExit as left: assert not left.code, (verb, left.code)\n"
        f"    assert not {unwanted} & set(sys.modules), verb\n"
    )
    assert "kvloom-backend-disk" in run("-c", script)


# -- the rules themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("kvloom.types", "from kvloom.engine.engine import Engine", "imports kvloom.engine, which is above it"),
        ("kvloom.contracts.storage", "import kvloom.pipeline.stack", "imports kvloom.pipeline, which is above it"),
        ("kvloom.contracts.storage", "from ..keys import chain", "imports kvloom.keys, which is above it"),
        ("kvloom.memory.__init__", "from ..tiers import Tier", "imports kvloom.tiers, which is above it"),
        ("kvloom.plugins.registry", "from kvloom import Engine", "imports kvloom.engine, which is above it"),
        ("kvloom.plugins.registry", "from kvloom import config", "imports kvloom.config, which is above it"),
        (
            "kvloom.config",
            "def f():\n    from kvloom.runtime import Clock",
            "imports kvloom.runtime, which is above it",
        ),
        ("kvloom.engine", "import kvloom.magic", "imports kvloom.magic, which has no place in the order"),
        ("kvloom.pipeline.stack", "import time", "imports time"),
        ("kvloom.engine", "from concurrent.futures import Future", "imports concurrent"),
        ("kvloom.builtin.dict", "import threading", "imports threading"),
        ("kvloom.config", "import pluggy", "imports pluggy"),
        ("kvloom.runtime", "import pickle", "imports pickle"),
        ("kvloom.engine", "if TYPE_CHECKING:\n    pass\nelse:\n    import time", "imports time"),
    ],
)
def test_core_rule_reports(module: str, source: str, complaint: str) -> None:
    (problem,) = core_violations(source, module)
    assert problem.endswith(complaint)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvloom.types", "if TYPE_CHECKING:\n    from kvloom.engine.engine import Engine"),
        ("kvloom.engine.engine", "from kvloom.tiers.tier import Tier\nfrom kvloom.types import Chunk"),
        ("kvloom.memory.pool", "from kvloom.keys import chain"),
        ("kvloom.runtime", "import threading, time, random"),
        ("kvloom.cli.main", "from kvloom import Engine, __version__"),
        ("kvloom.plugins.hookspecs", "import pluggy"),
        ("kvloom.memory.pool", "from .extents import Extents"),
    ],
)
def test_core_rule_allows(module: str, source: str) -> None:
    assert core_violations(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "from kvloom.contracts.storage import StorageBackend",
        "import kvloom.engine.engine",
        "from kvloom import runtime",
        "from kvloom import _HOME",
        "from kvloom.inspection import _parsed",
        "import kvloom\nkvloom.keys",
        "if TYPE_CHECKING:\n    from kvloom.types import Chunk",
    ],
)
def test_plugin_rule_reports(source: str) -> None:
    assert len(plugin_violations(source, "kvloom_backend_x.store")) == 1
    assert len(plugin_violations(source, "kvloom.builtin.store")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from kvloom_observe.live.observer import LiveObserver",
        "import kvloom_observe.live",
        "from kvloom_observe import sources",
    ],
)
def test_sibling_rule_reports(source: str) -> None:
    assert len(sibling_violations(source, "kvloom_blend.x")) == 1
    assert sibling_violations(source, "kvloom_observe.x") == []


@pytest.mark.parametrize("source", ["import kvloom_native", "from kvloom_native import Files, resp"])
def test_sibling_rule_allows(source: str) -> None:
    assert sibling_violations(source, "kvloom_backend_x.store") == []


def test_plugin_rule_allows() -> None:
    source = "import kvloom\nfrom kvloom import hookimpl, output\nfrom kvloom.inspection import Store\nkvloom.join"
    assert plugin_violations(source + "\nfrom .store import Store", "kvloom_backend_x.__init__") == []
    assert plugin_violations(source + "\nfrom kvloom.builtin.x import Y", "kvloom.builtin.__init__") == []


CUDA_DOORS = {
    "core/src/kvloom/device.py",
    "plugins/tools/src/kvloom_tools/checkup/machine.py",
}  # the last one reports on torch


def test_streams_and_launches_go_through_one_door() -> None:
    """What is done on a device in another way is not seen by the simulated one."""
    sources = [path for folder in SOURCES for path in folder.rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if names_cuda(path.read_text())}
    assert found == CUDA_DOORS


def names_cuda(source: str) -> bool:
    """Whether code, and not only its docstrings, has `torch.cuda` or `from torch import cuda`."""
    if "cuda" not in source:
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) == ("torch", "cuda"):
                return True
        elif isinstance(node, ast.Import) and any(name.name.startswith("torch.cuda") for name in node.names):
            return True
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            if any(name.name == "cuda" for name in node.names):
                return True
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            return True
    return False


def test_the_door_is_found_to_be_gone_round() -> None:
    for source in (
        "import torch\ntorch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda as c",
        "from torch.cuda import Stream",
    ):
        assert names_cuda(source)
    assert not names_cuda('"""As torch.cuda."""\nx = y.cuda()')
