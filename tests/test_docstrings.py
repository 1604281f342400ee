"""The API reference says what a caller needs: shapes and dtypes, units, errors. Read from the source, name by name.

Held to it are the names of `kvloom.__all__`, the public functions and classes of its modules, and their public members:

- each has a docstring; a member that overrides a documented one may go without.
- a tensor or array (parameter, result, field) is described with a shape and a dtype. A parameter's description is what
  follows `name:` in the docstring of the function, of its class or of its module; a field's is the string below it; a
  result's is what the docstring says apart from parameters.
- a float, and an int that is called a size or a time, has a unit: in its name, in its type, or in its description.
- an exception that the body raises, or the body of what it calls directly (by name, on `self` or on a module), is
  named, unless it is caught where it is raised. The class's docstring may say so for all: `Every method raises X`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvloom

SHAPE = re.compile(
    r"\b\d-D\b|`?\[[^\]]+\]|\bshapes?\b|\bone (?:entry|row) (?:per|for)\b|\bscalar\b|\bas long as\b|\bone entry more\b"
    r"|\bof any shape\b",
    re.IGNORECASE,
)
DTYPE = re.compile(r"\b(?:bool|u?int(?:8|16|32|64)|integer|b?float(?:8|16|32|64)?|dtypes?)\b", re.IGNORECASE)
UNIT = re.compile(
    r"\b(?:seconds?|milliseconds?|[Bb]ytes?|GiB|elements?|tokens?|layers?|shares?|ratio|times|blobs?|chunks?|calls|pages?"
    r"|0 to 1|positions?|spreads?)\b"
)
MEASURED = re.compile(r"(?:^|_)(?:size|length|lengths|offset|capacity|quota|ttl|timeout|deadline|age|interval|rate)$")
UNIT_IN_NAME = re.compile(r"(?:^|_)(?:n?bytes|seconds|tokens|share|ratio|us|ms)$")
ARRAY = re.compile(r"\b(?:torch\.Tensor|np\.ndarray)\b")
_NAME = r"\*{0,2}`?\w+`?"
NAMED = re.compile(rf"(?:^|(?<=[.;)]\s))({_NAME}(?:(?:, | and ){_NAME})*): ", re.MULTILINE)

EXEMPT = {
    "kvloom.contracts.component.Config.model_config": "pydantic's own setting",
}


@dataclass(frozen=True)
class Public:
    """One function, method, property, field or class, and where to look for what is said of it."""

    name: str
    node: ast.AST
    module: types.ModuleType
    owner: type | None = None
    doc: str = ""

    @property
    def around(self) -> list[str]:
        """The docstrings that may describe its parameters: its class's, those of that one's bases, its module's."""
        docs = [one.__doc__ or "" for one in ours(self.owner)] if self.owner else []
        return [*docs, *(sys.modules[one.__module__].__doc__ or "" for one in ours(self.owner) or ())] or [
            self.module.__doc__ or ""
        ]


def ours(cls: type | None) -> list[type]:
    return [one for one in cls.__mro__ if one.__module__.startswith("kvloom")] if cls else []


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))


@cache
def definitions(module: str, cls: str = "") -> dict[str, ast.AST]:
    """Definitions in a module or one of its classes, the last of each name, without overloads."""
    body = tree(module).body
    if cls:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == cls)
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def fields(module: str, cls: str) -> Iterator[tuple[ast.AnnAssign, str]]:
    """The annotated fields of a class with the string below each."""
    node = definitions(module)[cls]
    assert isinstance(node, ast.ClassDef)
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            said = after.value if isinstance(after, ast.Expr) else None
            yield one, said.value if isinstance(said, ast.Constant) and isinstance(said.value, str) else ""


# -- what is public ----------------------------------------------------------------------------------------------------


def everything() -> Iterator[Public]:
    for name, home in sorted(kvloom._HOME.items()):
        value = getattr(kvloom, name)
        if str(getattr(value, "__module__", "")).startswith("kvloom") and isinstance(value, type | types.FunctionType):
            yield from of_value(f"kvloom.{home}.{name}", value)
    for module in (kvloom.format.envelope, kvloom.native):
        for name, value in vars(module).items():
            own = not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
            if own and isinstance(value, type | types.FunctionType):
                yield from of_value(f"{module.__name__}.{name}", value)


def of_value(name: str, value: Any) -> Iterator[Public]:
    module = sys.modules[value.__module__]
    node = definitions(value.__module__)[value.__name__]
    if isinstance(value, types.FunctionType):
        yield Public(name, node, module, doc=inspect.getdoc(value) or "")
        return
    yield Public(name, node, module, value, inspect.cleandoc(value.__doc__ or ""))
    for one, said in fields(value.__module__, value.__name__):
        yield Public(f"{name}.{one.target.id}", one, module, value, said)
    for member, function in definitions(value.__module__, value.__name__).items():
        if not member.startswith("_"):
            yield Public(f"{name}.{member}", function, module, value, inspect.getdoc(getattr(value, member)) or "")


# -- the rules ---------------------------------------------------------------------------------------------------------


def problems(one: Public) -> list[str]:
    if isinstance(one.node, ast.AnnAssign):
        return quantity(one.name.rpartition(".")[2], one.node.annotation, one.doc)
    if not one.doc or generated(one):
        return ["has no docstring"]
    return signature(one) + errors(one) if isinstance(one.node, ast.FunctionDef) else []


def generated(one: Public) -> bool:
    """Return whether a class's docstring was generated by dataclasses or NamedTuple."""
    return isinstance(one.node, ast.ClassDef) and ast.get_docstring(one.node) is None


def signature(one: Public) -> list[str]:
    assert isinstance(one.node, ast.FunctionDef)
    found, arguments = [], one.node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None:
            said = next((text for doc in (one.doc, *one.around) if (text := described(doc).get(argument.arg))), "")
            said = said or mentioned(one.doc, argument.arg)
            found += quantity(argument.arg, argument.annotation, said)
    if one.node.returns is not None:
        result = "result" if not UNIT_IN_NAME.search(one.node.name) else one.node.name
        found += quantity(result, one.node.returns, NAMED.split(one.doc)[0])
    return found


def quantity(name: str, annotation: ast.expr, said: str) -> list[str]:
    """Missing parts of the description of a parameter, a result or a field."""
    kind = ast.unparse(annotation)
    if isinstance(annotation, ast.Constant):
        kind = str(annotation.value)
    if kind.startswith("Callable"):
        return []
    if ARRAY.search(kind):
        lacks = [what for what, rule in (("shape", SHAPE), ("dtype", DTYPE)) if not rule.search(said)]
        return [f"{name}: says no {what}" for what in lacks]
    number = re.fullmatch(r"(?:tuple\[)?(float|int)(?:, \.\.\.\])?(?: \| None)?", kind)
    if number and (number[1] == "float" or MEASURED.search(name)) and not UNIT_IN_NAME.search(name):
        return [] if UNIT.search(said) else [f"{name}: says no unit"]
    return []


def described(doc: str) -> dict[str, str]:
    """By parameter, what follows its name and a colon, up to the next such name or the end of the paragraph."""
    found = {}
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        flat = " ".join(paragraph.split())
        parts = NAMED.split(flat)
        for names, text in zip(parts[1::2], parts[2::2], strict=True):
            for name in re.findall(r"\w+", names):
                found.setdefault(name, text)
    return found


def mentioned(doc: str, name: str) -> str:
    """The sentence in which a parameter is named as code."""
    for sentence in re.split(r"(?<=[.;])\s+", " ".join(doc.split())):
        if f"`{name}`" in sentence:
            return sentence
    return ""


# -- errors ------------------------------------------------------------------------------------------------------------


def errors(one: Public) -> list[str]:
    whole = " ".join(one.doc.split())
    for doc in one.around:
        whole += " ".join(re.findall(r"Every method raises [^.]*\.", " ".join(doc.split())))
    raised = raises(one.node, one.module, one.owner, deep=True)
    return [f"does not name {name}" for name in sorted(raised) if not re.search(rf"\b{name}\b", whole)]


def raises(node: ast.AST, module: types.ModuleType, owner: type | None, *, deep: bool) -> set[str]:
    """The names of the public exceptions that leave a body, and with `deep` those of what it calls."""
    found = set()
    for inner, caught in inside(node, ()):
        leaving: set[str] = set()
        if isinstance(inner, ast.Raise) and inner.exc is not None:
            thrown = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
            leaving = {thrown.id} if isinstance(thrown, ast.Name) else set()
        elif isinstance(inner, ast.Call) and deep:
            for called, where, cls in callee(inner.func, module, owner):
                leaving |= raises(called, where, cls, deep=False)
        found |= {name for name in leaving if public(name) and not any(covers(one, name) for one in caught)}
    return found


def inside(node: ast.AST, caught: tuple[str, ...]) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """The nodes of a body, each with what is caught round it; what functions in it do is theirs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        here = caught
        if isinstance(node, ast.Try) and child in node.body:
            for handler in node.handlers:
                here += tuple(re.findall(r"\w+", ast.unparse(handler.type))) if handler.type else ("BaseException",)
        yield child, here
        yield from inside(child, here)


def exception(name: str) -> Any:
    found = getattr(builtins, name, None) or (getattr(kvloom, name) if name in kvloom._HOME else None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def public(name: str) -> bool:
    return exception(name) is not None


def covers(caught: str, raised: str) -> bool:
    return public(caught) and issubclass(exception(raised), exception(caught))


def callee(
    function: ast.expr, module: types.ModuleType, owner: type | None
) -> Iterator[tuple[ast.AST, types.ModuleType, type | None]]:
    """The body that a call runs, where the source says which: `f()`, `module.f()`, `self.f()`, `super().f()`, `C()`."""
    value: Any = None
    if isinstance(function, ast.Name):
        value = getattr(module, function.id, None)
    elif isinstance(function, ast.Attribute):
        on = function.value
        if isinstance(on, ast.Name) and on.id in ("self", "cls") and owner is not None:
            yield from method(owner.__mro__, function.attr)
            return
        if isinstance(on, ast.Call) and getattr(on.func, "id", "") == "super" and owner is not None:
            yield from method(owner.__mro__[1:], function.attr)
            return
        if isinstance(on, ast.Name):
            holder = getattr(module, on.id, None)
            if isinstance(holder, type):
                yield from method(holder.__mro__, function.attr)
                return
            value = getattr(holder, function.attr, None) if isinstance(holder, types.ModuleType) else None
    if isinstance(value, type):
        for name in ("__init__", "__post_init__"):
            yield from method(value.__mro__, name)
    elif isinstance(value, types.FunctionType) and value.__module__.startswith("kvloom"):
        where = importlib.import_module(value.__module__)
        if value.__name__ in definitions(where.__name__):
            yield definitions(where.__name__)[value.__name__], where, None


def method(classes: tuple[type, ...], name: str) -> Iterator[tuple[ast.AST, types.ModuleType, type]]:
    for cls in classes:
        if name in vars(cls) and cls.__module__.startswith("kvloom"):
            if name in (found := definitions(cls.__module__, cls.__name__)):
                yield found[name], sys.modules[cls.__module__], cls
            return


# -- the tests ---------------------------------------------------------------------------------------------------------


def test_what_is_public_says_what_a_caller_needs() -> None:
    found = {one.name: problems(one) for one in everything() if one.name not in EXEMPT}
    assert len(found) > 300 and {name: lacking for name, lacking in found.items() if lacking} == {}


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("def f(x): pass", ["has no docstring"]),
        ("def f(x: torch.Tensor): 'Does. x: bool.'", ["x: says no shape"]),
        ("def f(x: torch.Tensor): 'Does. x: `[tokens]`.'", ["x: says no dtype"]),
        ("def f(x: torch.Tensor): 'Does. x: bool `[tokens]`.'", []),
        ("def f() -> torch.Tensor: 'A mask.'", ["result: says no shape", "result: says no dtype"]),
        ("def f(timeout: float): 'Waits.'", ["timeout: says no unit"]),
        ("def f(timeout: float): 'Waits. timeout: seconds.'", []),
        ("def f(wait_seconds: float): 'Waits.'", []),
        ("def f():\n 'Does.'\n raise KeyError", ["does not name KeyError"]),
        ("def f():\n 'Does. Raises KeyError.'\n raise KeyError", []),
        ("def f():\n 'Does.'\n try: raise KeyError\n except LookupError: pass", []),
        ("def f():\n 'Does.'\n salt_tag_of_nobody()", []),
        ("def f():\n 'Does.'\n chain(1)", ["does not name TypeError", "does not name ValueError"]),
    ],
)
def test_what_is_lacking_is_noticed(source: str, lacking: list[str]) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    assert problems(Public("f", node, kvloom.keys, doc=ast.get_docstring(node) or "")) == lacking
