"""An executor whose threads do not keep a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads(Executor):
    """As ThreadPoolExecutor, on daemon threads. Python joins the others when a process ends, and a call on a file
    system that hangs never returns."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Raises RuntimeError after `shutdown`, and where no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            if len(self._threads) < self._most and not self._idle.acquire(blocking=False):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
            while cancel_futures and (waiting := self._next()) is not None:
                waiting[0].cancel()
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        try:
            return self._calls.get_nowait()
        except Empty:
            return None

    def _run(self) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call = waiting
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del waiting, future, call  # before it waits: they may be large
            self._idle.release()
