"""Errors between a client and a server."""

from __future__ import annotations

from kvloom import BackendError


class ServerError(BackendError):
    """The server refused. The connection stays usable."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.word, _, self.rest = text.partition(" ")
        """The error's word: `OOM`, `MOVED`, `NOPERM`, ...; and the rest of its text."""


class ProtocolError(BackendError):
    """Bytes that are no reply, or no reply to the request. The connection cannot be used any more."""


class Unreachable(BackendError):
    """There is no connection to be had."""


LinkLost = (OSError, ProtocolError, Unreachable)
"""Errors after which a server may be gone or replaced."""
