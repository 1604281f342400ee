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
    """A connection that is ended by the timers that it adds to a list, however it is doing."""

    sock: socket.socket

    def __init__(self, *place: Any, timers: list[threading.Timer], **settings: Any) -> None:
        super().__init__(*place, **settings)
        self._timers = timers

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        timer = threading.Timer(MAX_SECONDS, _shut, [self.sock])
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


@contextlib.contextmanager
def in_time() -> Iterator[list[threading.Timer]]:
    """Give the timers of connections, which go when it is left. Raises TimeoutError if they have ended one."""
    timers: list[threading.Timer] = []
    began = time.monotonic()
    try:
        yield timers
    except (OSError, ValueError, http.client.HTTPException):
        _check(began)
        raise
    else:
        _check(began)
    finally:
        for timer in timers:
            timer.cancel()


def _check(began: float) -> None:
    if time.monotonic() - began >= MAX_SECONDS:
        raise TimeoutError(f"no whole answer within {MAX_SECONDS:g} seconds")


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is over already
        sock.shutdown(socket.SHUT_RDWR)
