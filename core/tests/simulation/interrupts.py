"""Threads that may be interrupted before any statement of the core, not only where it takes a lock.

The functions of a module get the code that they would have if `Scheduler.point()` stood before each of their
statements, and get their own back afterwards.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import walk_packages
from types import CodeType, FunctionType, ModuleType
from typing import Any

import kvloom.engine.background
import kvloom.engine.engine
import kvloom.engine.layers
import kvloom.engine.lookup
import kvloom.memory
import kvloom.pipeline
import kvloom.runtime
import kvloom.telemetry.events
import kvloom.tiers

_TICK, _INTERRUPTED = "__simulation_tick__", "__simulation_interrupted__"
_POINT = ast.parse(f"if {_TICK}(): {_INTERRUPTED}()").body[0]
"""`Scheduler.point`, without a call of a function in Python where nothing happens."""
_OUTSIDE = ("SystemRuntime", "TimedSerializer")
_PACKAGES = (kvloom.memory, kvloom.pipeline, kvloom.runtime, kvloom.tiers)
WHOLE = frozenset(
    f"kvloom.{name}"
    for name in (
        "memory.extents", "tiers.index.access_time_sync", "tiers.index.columns", "tiers.index.expiry",
        "tiers.index.frequency", "tiers.index.listing", "tiers.index.lru", "tiers.index.quotas",
    )
)  # fmt: skip
"""Modules of plain data, used under the lock of whoever owns it: their callers are interrupted before and after."""


class _Points(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name != "__del__":  # it runs wherever memory is given back, and that is no choice of the thread
            self._into(node)
        return node

    def _into(self, node: Any) -> None:
        for part in ("body", "orelse", "finalbody"):
            statements = getattr(node, part, None)
            if isinstance(statements, list) and statements:
                setattr(node, part, self._between(statements))
        for handler in getattr(node, "handlers", ()):
            self._into(handler)

    def _between(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in statements:
            if not isinstance(statement, ast.Global | ast.Nonlocal | ast.Pass):
                point = copy.deepcopy(_POINT)
                for part in ast.walk(point):
                    ast.copy_location(part, statement)
                result.append(point)
            self._into(statement)
            result.append(statement)
        return result


@functools.cache
def _changes() -> list[tuple[ModuleType, list[tuple[FunctionType, CodeType, CodeType]]]]:
    """For each module its functions, with their own code and with that which can be interrupted."""
    return [(module, _changes_of(module)) for module in _modules()]


def _modules() -> list[ModuleType]:
    parts = [part.name for package in _PACKAGES for part in walk_packages(package.__path__, f"{package.__name__}.")]
    core = [
        kvloom.engine.engine,
        kvloom.engine.layers,
        kvloom.engine.lookup,
        kvloom.engine.background,
        kvloom.telemetry.events,
    ]
    found = [*map(importlib.import_module, parts), *core]
    by_name = {module.__name__: module for module in found if module.__name__ not in WHOLE}
    return [by_name[name] for name in sorted(by_name)]


def _changes_of(module: ModuleType) -> list[tuple[FunctionType, CodeType, CodeType]]:
    tree = _Points().visit(ast.parse(inspect.getsource(module)))
    compiled = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _nested(compiled)}
    changes = []
    for function in _functions(module):
        own = function.__code__
        code = codes.get((own.co_qualname, own.co_firstlineno))
        same = code is not None and own.co_filename == module.__file__ and code.co_freevars == own.co_freevars
        if code is not None and same and not own.co_qualname.startswith(_OUTSIDE):
            changes.append((function, own, code))
    return changes


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _functions(owner: Any) -> Iterator[FunctionType]:
    for value in vars(owner).values():
        if inspect.isclass(value) and value.__module__ == (
            owner.__module__ if inspect.isclass(owner) else owner.__name__
        ):
            yield from _functions(value)
        inner = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for function in inner:
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, FunctionType):
                yield function


@contextmanager
def anywhere(tick: Callable[[], bool], interrupted: Callable[[], None]) -> Iterator[None]:
    """While this lasts, the core calls `tick` before each of its statements, and `interrupted` if that says so."""
    for module, changes in _changes():
        vars(module).update({_TICK: tick, _INTERRUPTED: interrupted})
        for function, _, code in changes:
            function.__code__ = code
    try:
        yield
    finally:
        for module, changes in _changes():
            for function, own, _ in changes:
                function.__code__ = own
            for name in (_TICK, _INTERRUPTED):
                vars(module).pop(name, None)
