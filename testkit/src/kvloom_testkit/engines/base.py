"""Stores, processes and judgements: the tools that the requirements of every engine share."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvloom_testkit.engines.damage import copy
from kvloom_testkit.engines.process import Engine, Host

T = TypeVar("T")


class NotMetError(Exception):
    """A requirement is not met; the message says what was seen."""


class NotApplicableError(Exception):
    """A requirement does not apply; the message says why."""


def expect(condition: object, text: str) -> None:
    """Raise NotMetError with the text unless the condition holds."""
    if not condition:
        raise NotMetError(text)


class BaseBench(ABC):
    """A process that engines are forked from, and directories for their stores.

    module: of the host. environment: of its process. seconds: deadline of each call. host: one that runs already.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], *, seconds: float, short: bool, host: Host | None
    ) -> None:
        self.short = short
        self._module, self._environment, self._seconds = module, environment, seconds
        self._own_host = host is None
        self.host = host or Host(module, environment=environment)
        self.folder = self.host.folder / f"bench-{id(self):x}"
        self.folder.mkdir()
        self._fresh: Host | None = None
        self._done: dict[str, Any] = {}
        self._generation = 0

    @abstractmethod
    def end_session(self) -> None:
        """End the last session, however it can be ended."""

    def start_over(self) -> None:
        """End the session and leave the stores: what failed may have left wrong KV in both."""
        self.end_session()
        self._done.clear()
        self._generation += 1

    def close(self) -> None:
        """End every process."""
        self.end_session()
        for host in (self._fresh, self.host if self._own_host else None):
            if host is not None:
                host.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def once(self, name: str, work: Callable[[], T]) -> T:
        """The result of some work that several requirements judge; it is done for the first."""
        if name not in self._done:
            self._done[name] = work()
        found: T = self._done[name]
        return found

    def store(self, name: str) -> Path:
        """The directory of a store."""
        return self.folder / f"{name}-{self._generation}"

    def copy_of(self, store: str, name: str) -> Path:
        """A copy of a store under another name."""
        copy(self.store(store), self.store(name))
        return self.store(name)

    def fork(self, fresh: bool = False) -> Engine:
        """A process for an engine. fresh: of a new interpreter."""
        if fresh and self._fresh is None:
            self._fresh = Host(self._module, environment=self._environment)
        host = self._fresh if fresh and self._fresh is not None else self.host
        return host.fork(self._seconds)
