"""What all conformance classes have in common: one fixture to write, capabilities, and no test silently left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from kvloom_testkit.requirements import claims, needed_by, requirement_id

SECONDS = 180.0
"""How long one test may take before it counts as hanging."""


class Opener:
    """Makes components, and remembers those that are to be closed."""

    def __init__(self, make: Callable[[], Any], component_of: Callable[[Any], Any]) -> None:
        self._make = make
        self._component_of = component_of
        self.open: list[Any] = []

    def __call__(self) -> Any:
        self.open.append(self._make())
        return self.open[-1]

    def close(self, made: Any) -> None:
        """Close one now, and not again at the end: only one requirement is about closing twice."""
        self.open = [one for one in self.open if one is not made]
        self._component_of(made).close()


class Conformance:
    """Subclass the class of a kind in a test module, and write the fixture `make`. Do not subclass this one.

    Tests may be added. One of the kit's may be overridden only to say that it fails, and why, by
    `@pytest.mark.xfail(reason=...)`; it then counts as a failure if it passes.
    """

    kind: ClassVar[str]
    """As `kvloom check` and the registry call it."""
    contract: ClassVar[type]
    """The abstract class of the kind."""
    needs_harness: ClassVar[bool] = False
    """The component alone is not enough: `make` makes what the class's docstring describes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, test in list(vars(cls).items()):
            theirs = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
            if requirement_id(name) and theirs is not None:
                _check_override(cls, name, test)

    @pytest.fixture
    def make(self) -> Callable[[], Any]:
        """A function that makes the component; write this one. The docstring of each class says what it is to make."""
        raise pytest.UsageError(f"{type(self).__name__} needs a fixture `make`: {inspect.getdoc(type(self).make)}")

    @pytest.fixture
    def opened(self, make: Callable[[], Any]) -> Iterator[Opener]:
        """`make`, and everything that it made is closed at the end."""
        opener = Opener(make, self.component_of)
        yield opener
        for one in reversed(opener.open):
            self.component_of(one).close()

    @pytest.fixture(autouse=True)
    def _only_what_is_claimed(self, request: pytest.FixtureRequest) -> None:
        capability = needed_by(request.function)
        if capability is None:
            return
        component = self.component_of(request.getfixturevalue("make")())
        component.close()  # some stores cannot be open twice
        if not claims(component, capability, self.contract):
            pytest.skip(f"{type(component).__name__} does not claim {capability}")

    @staticmethod
    def component_of(made: Any) -> Any:
        """The component in what `make` returns."""
        return made


def _check_override(cls: type, name: str, test: Any) -> None:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "xfail"]
    if not any(mark.kwargs.get("reason") for mark in marks):
        raise pytest.UsageError(
            f"{cls.__module__}.{cls.__qualname__} overrides {name}; a requirement may only be overridden to say why it "
            "is not met: @pytest.mark.xfail(reason=...)"
        )
    # Else one that is met by now would go on being excused.
    strict = [pytest.mark.xfail(*mark.args, **{**mark.kwargs, "strict": True}).mark for mark in marks]
    test.pytestmark = [*(mark for mark in test.pytestmark if mark.name != "xfail"), *strict]
