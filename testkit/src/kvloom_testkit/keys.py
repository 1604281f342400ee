"""Keys that no other test uses, so that a store need not be empty and may be shared."""

from __future__ import annotations

import os
import uuid

DASHES = "-"


class Namespace:
    """Blob keys as the core makes them, `<fingerprint>/<salt tag>/<depth>-<digest>`, under a fingerprint of its own."""

    def __init__(self) -> None:
        self.fingerprint = uuid.uuid4().hex
        self.prefix = f"{self.fingerprint}/{DASHES}/"
        self.used: set[str] = set()
        """Every key that was asked for."""

    def key(self, number: int = 0, *, tag: str = DASHES) -> str:
        """The same for the same number and salt tag."""
        digest = uuid.uuid5(uuid.UUID(self.fingerprint), str(number)).hex
        return self.named(f"{tag}/{number}-{digest * 2}")

    def named(self, name: str) -> str:
        """`<fingerprint>/<name>`."""
        key = f"{self.fingerprint}/{name}"
        self.used.add(key)
        return key

    def keys(self, count: int, *, tag: str = DASHES) -> list[str]:
        return [self.key(number, tag=tag) for number in range(count)]


def blob_of(num_bytes: int, *, seed: int | None = None) -> bytes:
    """Bytes that hardly compress, and by a seed the same ones again."""
    if seed is None:
        return os.urandom(num_bytes)
    import random

    return random.Random(seed).randbytes(num_bytes)
