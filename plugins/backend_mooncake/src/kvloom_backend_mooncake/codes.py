"""Meanings of Mooncake's numbers: absent, may be tried again, or failed.

Source: `ErrorCode` in mooncake-store/include/types.h of Mooncake 0.3.13.
"""

from __future__ import annotations

from typing import Final

from kvloom import BackendError

NO_ROOM: Final = -200
INVALID: Final = -600
ILLEGAL_CLIENT: Final = -601
NOT_READY: Final = -703
NOT_FOUND: Final = -704
EXISTS: Final = -705
LEASED: Final = -706
LEASE_EXPIRED: Final = -707
TRANSFER_FAILED: Final = -800

ABSENT: Final = frozenset({NOT_FOUND, NOT_READY, -710, -712})
"""Codes of a miss: never put, still being written, or lost with the process that held the last copy."""
IN_USE: Final = frozenset({LEASED, -708, -714})
"""A reader holds it, or it is being copied: it may not be removed in the ordinary way."""

_SAID: Final = {
    -1: "internal error of the client",
    -101: "no process contributes memory; set `segment` in one of them",
    NO_ROOM: "no room; contribute larger segments, or let the master evict earlier (eviction_high_watermark_ratio)",
    INVALID: "refused as invalid; is the blob larger than every segment?",
    NOT_READY: "still being written",
    NOT_FOUND: "not found",
    EXISTS: "exists already",
    LEASED: "leased to a reader",
    LEASE_EXPIRED: "the lease ended before the bytes had arrived; raise default_kv_lease_ttl of the master",
    TRANSFER_FAILED: "the transfer failed: the process that holds the segment is gone, or the network is",
    -801: "Mooncake's own checksum does not match",
    -900: "the master does not answer: it is not running, or not at this address",
    -901: "the master did not answer in time",
    -1010: "the master is not ready yet",
}


class MooncakeError(BackendError):
    """A call failed. code: Mooncake's number."""

    def __init__(self, doing: str, code: int) -> None:
        self.code = code
        super().__init__(f"{doing}: {_SAID.get(code, 'failed')} (Mooncake's code {code})")


class NoRoomError(MooncakeError):
    """The segments are full, and nothing could be evicted in time."""


class LeaseExpiredError(MooncakeError):
    """The lease ended before the blob had arrived, also at the second attempt."""


class TransferError(MooncakeError):
    """The bytes could not be moved from or to the peer that holds them."""


class MasterError(MooncakeError):
    """The master did not answer: nothing is known about the key."""


_KINDS: Final[dict[int, type[MooncakeError]]] = {
    NO_ROOM: NoRoomError,
    LEASE_EXPIRED: LeaseExpiredError,
    TRANSFER_FAILED: TransferError,
    -900: MasterError,
    -901: MasterError,
    -1010: MasterError,
}


def error(doing: str, code: int) -> MooncakeError:
    """The exception for a negative `code`."""
    return _KINDS.get(code, MooncakeError)(doing, code)
