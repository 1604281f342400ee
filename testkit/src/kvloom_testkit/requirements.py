"""Requirements: every test of the kit is one, with an id that never changes and a docstring that says what and why."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_TEST = re.compile(r"test_([A-Z][0-9]{2})_([a-z0-9_]+)")
_DOC = re.compile(r"(.+?)\n\s*\nWhy: (.+?)\n\s*\nUsually: (.+)", re.DOTALL)
_NEEDS = "_kvloom_needs"
_CAPITALS = {"kv": "KV", "cpu": "CPU", "gpu": "GPU"}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement for components of one kind."""

    id: str
    """A letter for the kind and two digits: quoted in reports, xfails and docs/contracts."""
    title: str
    test: str
    """The method of the conformance class."""
    what: str
    why: str
    usually: str
    """The usual cause of a failure."""
    needs: str | None
    """The capability without which it does not apply: a class attribute that is true, or a method of its own."""


def needs(capability: str) -> Callable[[F], F]:
    """Marks a test that applies only to components that claim `capability`."""

    def mark(test: F) -> F:
        setattr(test, _NEEDS, capability)
        return test

    return mark


def needed_by(test: Any) -> str | None:
    """The capability that a test needs."""
    return getattr(test, _NEEDS, None)


def claims(component: Any, capability: str, contract: type) -> bool:
    """Return whether a component, or a class of them, claims a capability.

    It does if its attribute is true, which may depend on its settings, or if it overrides the method.
    """
    default = getattr(contract, capability)
    if not callable(default):
        return bool(getattr(component, capability))
    return getattr(component if isinstance(component, type) else type(component), capability) is not default


def requirements_of(cls: type) -> tuple[Requirement, ...]:
    """The requirements of a conformance class, by id."""
    tests = {name: match for name in dir(cls) if (match := _TEST.fullmatch(name))}
    return tuple(_requirement(getattr(cls, name), match) for name, match in sorted(tests.items()))


def requirement_id(test: str) -> str | None:
    """The id in the name of a test; None for a test that is not the kit's."""
    match = _TEST.match(test)
    return match[1] if match else None


def _requirement(test: Any, name: re.Match[str]) -> Requirement:
    doc = _DOC.fullmatch(inspect.cleandoc(test.__doc__ or ""))
    assert doc is not None, f"{name[0]} lacks a docstring of three parts: what, `Why: ` and `Usually: `"
    what, why, usually = (" ".join(part.split()) for part in doc.groups())
    title = " ".join(_CAPITALS.get(word, word) for word in name[2].split("_"))
    return Requirement(name[1], title, name[0], what, why, usually, needed_by(test))
