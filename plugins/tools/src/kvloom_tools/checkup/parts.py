"""A configuration's connector and observers: what they need is here, and an observer can be made."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvloom import ConfigError
from kvloom_tools.checkup.finding import Finding, note, ok, problem

if TYPE_CHECKING:
    from kvloom.inspection import Resolved

_ENGINES = {"vllm": "vllm", "vllm_offload": "vllm", "sglang": "sglang", "transformers": "transformers"}
"""The package that uses a connector, by the connector's type."""


def looked_at(resolved: Resolved) -> Iterator[Finding]:
    word = resolved.connector.type
    engine = _ENGINES.get(word)
    if engine is not None and find_spec(engine) is None:
        yield note("connector", word, f"{engine} is not installed here; it is what this connector is for")
    else:
        yield ok("connector", word, "is there" if engine is None else f"{engine} is installed")
    for choice in resolved.observers:
        yield _observer(choice.type, choice.make)


def _observer(name: str, make: Any) -> Finding:
    """Made, and closed again: that takes its port, or looks at its path, as an engine does."""
    try:
        make().close()
    except ConfigError as error:
        taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        if taken:
            return note("observer", name, f"{error.problem}, unless it is the engine of this configuration that has it")
        return problem("observer", name, str(error))
    return ok("observer", name, "can be made")
