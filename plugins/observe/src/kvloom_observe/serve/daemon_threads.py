"""An executor whose calls do not keep a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads(Executor):
    """A daemon thread for each call. Python waits for the threads of other executors when a process ends.

    The number of calls at a time is the caller's to bound. `shutdown` waits for none.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call it on a thread of its own. The future has the RuntimeError if none can be started."""
        future: Future[T] = Future()
        call = partial(fn, *args, **kwargs)
        try:
            threading.Thread(target=_run, args=(future, call), name=self._name, daemon=True).start()
        except RuntimeError as error:
            future.set_exception(error)
        return future


def _run(future: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
