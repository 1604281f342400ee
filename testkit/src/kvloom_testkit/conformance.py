"""The base of all conformance classes: one fixture to write, capabilities, and no test silently left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, ClassVar

import pytest

from kvloom_testkit.process_state import put_back
from kvloom_testkit.requirements import claims, needed_by, requirement_id

_OURS = "kvloom_testkit."


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

    You may add tests. Override one of the kit's tests only to mark it `@pytest.mark.xfail(reason=...)`. The kit's own
    test still runs, and an unexpected pass counts as a failure.
    """

    kind: ClassVar[str]
    """The kind's name in `kvloom check` and the registry."""
    contract: ClassVar[type]
    """The abstract class of the kind."""
    needs_harness: ClassVar[bool] = False
    """The component alone is not enough: `make` makes what the class's docstring describes."""
    yours: ClassVar[frozenset[str]] = frozenset({"make"})
    """Names that a subclass outside of the kit may redefine."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, own in list(vars(cls).items()):
            theirs = [vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)]
            if theirs and requirement_id(name):
                setattr(cls, name, _excused(cls, name, own, theirs[-1]))
            elif theirs and not (name.startswith("__") or name in cls.yours or cls.__module__.startswith(_OURS)):
                raise pytest.UsageError(
                    f"{cls.__module__}.{cls.__qualname__} overrides {name}, which its requirements are built on; "
                    f"what may be overridden is {', '.join(sorted(cls.yours))}"
                )

    @pytest.fixture
    def make(self) -> Callable[[], Any]:
        """A function that makes the component; write this fixture. Each class's docstring describes the component."""
        raise pytest.UsageError(f"{type(self).__name__} needs a fixture `make`: {inspect.getdoc(type(self).make)}")

    @pytest.fixture
    def opened(self, make: Callable[[], Any]) -> Iterator[Opener]:
        """`make`, and everything that it made is closed at the end."""
        opener = Opener(make, self.component_of)
        yield opener
        for one in reversed(opener.open):
            self.component_of(one).close()

    @pytest.fixture(autouse=True)
    def _process_as_it_was(self) -> Iterator[None]:
        with put_back():
            yield

    @pytest.fixture(autouse=True)
    def _only_what_is_claimed(
        self, request: pytest.FixtureRequest, _process_as_it_was: None, make: Callable[[], Any]
    ) -> None:
        capability, problem = needed_by(request.function), vars(type(self)).get(_OPENS)
        if problem:
            pytest.fail(problem, pytrace=False)
        if capability is None and problem is not None:
            return
        component = self._component(make)
        if capability is not None and not claims(component, capability, self.contract):
            pytest.skip(f"{type(component).__name__} does not claim {capability}")

    def _component(self, make: Callable[[], Any]) -> Any:
        """Open a component. Problems of `make` itself are reported before any requirement, once in full."""
        cls = type(self)
        try:
            with put_back():
                component = opens(make, cls)
        except (CannotOpenError, pytest.fail.Exception):  # the latter where it hangs
            setattr(cls, _OPENS, "make() does not give a component, as was said")
            raise
        setattr(cls, _OPENS, "")
        return component

    @staticmethod
    def component_of(made: Any) -> Any:
        """The component in what `make` returns."""
        return made


_OPENS = "_kvloom_opens"
"""On a class: '' once `make` has made something, else what to say."""


class CannotOpenError(Exception):
    """`make` does not make the right thing; the message says why."""


def opens(make: Callable[[], Any], cls: type[Conformance]) -> Any:
    """A component that was opened and closed again. Raises CannotOpenError."""
    if not callable(make):
        raise CannotOpenError(f"the fixture make is to return a function that makes one, not {_a(make)}")
    component = _opened(make, cls)
    component.close()  # some stores cannot be open twice
    another = _opened(make, cls)
    another.close()
    if another is component:
        raise CannotOpenError("make() returned the same instance twice: it is to make a new one each time")
    return component


def _opened(make: Callable[[], Any], cls: type[Conformance]) -> Any:
    try:
        made = make()
    except Exception as error:
        raise CannotOpenError(f"could not be opened: {type(error).__name__}: {error}") from error
    try:
        component = cls.component_of(made)
    except AttributeError as error:
        raise CannotOpenError(f"make() is to return what {cls.__name__} describes, not {_a(made)}: {error}") from error
    if not isinstance(component, cls.contract):
        raise CannotOpenError(f"make() is to make an instance of {cls.contract.__name__}, not {_a(component)}")
    return component


def _a(value: Any) -> str:
    return "None" if value is None else f"an instance of {type(value).__name__}"


def _excused(cls: type, name: str, own: Any, theirs: FunctionType) -> FunctionType:
    """The kit's test with the marks of its override: a test with another body could fail for ever."""
    marks = [mark for mark in getattr(own, "pytestmark", ()) if mark.name == "xfail"]
    if not any(str(mark.kwargs.get("reason", "")).strip() for mark in marks) or any(
        not mark.kwargs.get("run", True) for mark in marks
    ):
        raise pytest.UsageError(
            f"{cls.__module__}.{cls.__qualname__} overrides {name}; a requirement may only be overridden to say why it "
            "is not met: @pytest.mark.xfail(reason=...), without run=False"
        )
    test = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    test.__dict__.update(theirs.__dict__)
    test.__doc__ = theirs.__doc__
    test.__annotations__ = theirs.__annotations__
    test.__kwdefaults__ = theirs.__kwdefaults__
    # Else one that is met by now would go on being excused.
    strict = [pytest.mark.xfail(*mark.args, **{**mark.kwargs, "strict": True}).mark for mark in marks]
    test.pytestmark = [*getattr(theirs, "pytestmark", ()), *strict]  # type: ignore[attr-defined]
    return test
