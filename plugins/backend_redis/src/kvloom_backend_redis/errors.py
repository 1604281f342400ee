"""What can go wrong between a client and a server."""

from __future__ import annotations

from kvloom import BackendError


class ServerError(BackendError):
    """The server said no. The connection goes on."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.word, _, self.rest = text.partition(" ")
        """`OOM`, `MOVED`, `NOPERM`, ...; and what it said besides."""


class ProtocolError(BackendError):
    """What came is no reply, or not one to what was asked. The connection is of no more use."""


class Unreachable(BackendError):
    """There is no connection to be had."""


LinkLost = (OSError, ProtocolError, Unreachable)
"""What means that a server may be gone, or another one by now."""
