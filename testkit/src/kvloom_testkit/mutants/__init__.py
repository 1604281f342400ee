"""Components that are wrong on purpose, and components that are odd and right: they test the kit.

A mutant is a reference component with one fault, and names in `breaks` the requirement that it does not meet. Each
requirement has at least one, and `tests/test_mutants.py` runs each against its own. An oddity must pass everything.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

from kvloom_testkit.kinds import CLASSES


class Mutant:
    """Mixin of a component with a fault; it stands before the reference in the bases."""

    breaks: ClassVar[str]
    """The id of a requirement."""


class Oddity:
    """Mixin of a component that is legal, but unusual."""


def of(kind: str) -> Iterator[type[Any]]:
    """Every mutant and oddity of a kind: those of the package that is called as the kind's own."""
    package = CLASSES[kind].split(".")[1]
    for found in pkgutil.walk_packages(__path__, f"{__name__}."):
        if found.name.startswith(f"{__name__}.{package}."):
            for name, cls in vars(import_module(found.name)).items():
                here = isinstance(cls, type) and cls.__module__ == found.name and not name.startswith("_")
                if here and issubclass(cls, (Mutant, Oddity)):
                    yield cls
