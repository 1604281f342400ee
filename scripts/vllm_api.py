"""Print what differs in vLLM's interfaces for KV connectors between two source trees: `vllm_api.py OLD NEW`.

A tree is a folder with the package `vllm` (site-packages, an unpacked wheel) or a wheel itself. Reads the sources and
imports nothing, so that a version that does not run here is compared, too.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

FILES = (
    "config/kv_transfer.py",
    "distributed/kv_events.py",
    "distributed/kv_transfer/kv_connector/factory.py",
    "distributed/kv_transfer/kv_connector/utils.py",
    "distributed/kv_transfer/kv_connector/v1/base.py",
    "distributed/kv_transfer/kv_connector/v1/metrics.py",
    "v1/core/kv_cache_utils.py",
    "v1/core/sched/output.py",
    "v1/kv_cache_interface.py",
    "v1/kv_offload/base.py",
    "v1/kv_offload/config.py",
    "v1/metrics/cache_hit_source.py",
    "v1/outputs.py",
    "v1/worker/kv_connector_model_runner_mixin.py",
)
"""Everything of vLLM that a connector implements, is given, or asks for."""


def sources(tree: Path) -> dict[str, str]:
    """The text of each of `FILES` that a tree has. FileNotFoundError if it has none."""
    if tree.is_file():
        with zipfile.ZipFile(tree) as wheel:
            names = set(wheel.namelist())
            found = {name: wheel.read(f"vllm/{name}").decode() for name in FILES if f"vllm/{name}" in names}
    else:
        paths = {name: tree / "vllm" / name for name in FILES}
        found = {name: path.read_text() for name, path in paths.items() if path.is_file()}
    if not found:
        raise FileNotFoundError(f"{tree}: no vllm in it")
    return found


def interface(source: str) -> dict[str, str]:
    """Public names of a module, those in classes as `Class.name`, each with its signature, or its type and default."""
    return dict(_names(ast.parse(source).body, ""))


def _names(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        match node:
            case ast.ClassDef():
                bases = ", ".join(map(ast.unparse, node.bases))
                yield f"{prefix}{node.name}", f"class({bases})"
                yield from _names(node.body, f"{prefix}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == "__init__" or not node.name.startswith("_"):
                decorators = "".join(f"@{ast.unparse(one)} " for one in node.decorator_list)
                result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                yield f"{prefix}{node.name}", f"{decorators}({ast.unparse(node.args)}){result}"
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                default = f" = {ast.unparse(node.value)}" if node.value else ""
                yield f"{prefix}{name}", f"{ast.unparse(node.annotation)}{default}"
            case ast.Assign(targets=[ast.Name(id=name)]) if prefix and not name.startswith("_"):
                yield f"{prefix}{name}", f"= {ast.unparse(node.value)}"


def differences(old: Path, new: Path) -> Iterator[str]:
    """Yield a line for each name that is new (+), gone (-) or changed (two lines), below the name of its file."""
    before, after = sources(old), sources(new)
    for file in FILES:
        was, now = (interface(tree.get(file, "")) for tree in (before, after))
        lines = []
        for name in dict.fromkeys((*was, *now)):
            if was.get(name) != now.get(name):
                lines += [f"  {sign} {name}: {some[name]}" for sign, some in (("-", was), ("+", now)) if name in some]
        if lines:
            yield file
            yield from lines


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    for line in differences(*map(Path, arguments)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
