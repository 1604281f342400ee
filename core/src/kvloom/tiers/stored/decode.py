"""Calls of a serializer about bytes of a store: however they end, it is the blob's doing and not the store's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvloom.errors import CorruptBlobError, UnreadableBlobError
from kvloom.tiers.stored.calls import tamed

T = TypeVar("T")


class DecodeFailedError(UnreadableBlobError):
    """A serializer broke off at a blob with something that it should not raise."""


def guarded(function: Callable[[], T]) -> T:
    """What `function` returns. Raises CorruptBlobError or UnreadableBlobError, and nothing else."""
    try:
        return tamed(function)
    except (CorruptBlobError, UnreadableBlobError):
        raise
    except Exception as error:
        raise DecodeFailedError(f"{type(error).__name__}: {error}") from error
