"""Connections that end in time: a timeout of a socket begins anew with each byte."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

MAX_SECONDS = 10.0
"""For an answer."""


class Ending:
    """A connection that is ended some seconds after it was made, however it is doing."""

    most_seconds: float | None = None
    """Default: MAX_SECONDS."""
    sock: socket.socket
    _timer: threading.Timer | None = None

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._timer = threading.Timer(self.most_seconds or MAX_SECONDS, _shut, [self.sock])
        self._timer.daemon = True
        self._timer.start()

    def getresponse(self, *args: Any, **settings: Any) -> Any:
        """Return the answer. The time for its body goes on, and ends when the caller closes the connection."""
        timer, self._timer = self._timer, None  # this calls `close` where a body without a length is still to be read
        try:
            return super().getresponse(*args, **settings)  # type: ignore[misc]
        finally:
            self._timer = timer

    def close(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        super().close()  # type: ignore[misc]


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises TimeoutError if a connection that was made within has been ended."""
    began = time.monotonic()
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException):
        _check(began)
        raise
    else:
        _check(began)


def _check(began: float) -> None:
    if time.monotonic() - began >= MAX_SECONDS:
        raise TimeoutError(f"no whole answer within {MAX_SECONDS:g} seconds")


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is over already
        sock.shutdown(socket.SHUT_RDWR)
