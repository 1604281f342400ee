"""Makes the components of an engine, each within a bounded time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from kvloom.errors import ConfigError
from kvloom.runtime import NoThreadError, Runtime, SystemRuntime, Workers

T = TypeVar("T")

OPENING_SECONDS = 60.0
"""The least that a component may take to open: some read files, join a cluster, or register memory."""


def in_time(path: str, opening: Callable[[], T], runtime: Runtime, *, seconds: float = 0.0) -> T:
    """Run `opening`. Raises ConfigError if it hangs, as with a file system of a server that is gone.

    path: of the component in the YAML. seconds: more than `OPENING_SECONDS`, if it may take longer.
    """
    if not isinstance(runtime, SystemRuntime):
        return opening()  # a simulation has threads of its own
    workers = Workers(runtime, name=f"kvloom-open-{path}", threads=1)
    seconds = max(OPENING_SECONDS, seconds)
    try:
        call = workers.submit(opening, seconds=seconds, discard=_close_quietly)
    except NoThreadError:
        return opening()
    done = call.wait()
    workers.close(1.0 if done else 0.0)
    if done:
        opened: T = call.result()
        return opened
    call.cancel()  # what is opened later is closed then
    raise ConfigError(path, f"did not open within {seconds:g} s; see whether its server or file system answers")


def _close_quietly(component: Any) -> None:
    with suppress(Exception):  # nobody is there to be told, and some have nothing to close
        component.close()
