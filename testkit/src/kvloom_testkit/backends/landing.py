"""A sink for `get_into` that watches how it is used."""

from __future__ import annotations

from kvloom import BackendError


class Landing:
    """Memory with the inverse of the expected bytes, until they have arrived."""

    def __init__(self, expected: bytes | None = None, *, refusal: BackendError | None = None) -> None:
        self.expected = expected
        self.refusal = refusal
        self.reserved: list[int] = []
        self.told: list[int] = []
        self.early: int | None = None
        """Number of bytes that were reported as arrived before they had; None if there were none."""
        self.memory = memoryview(b"")

    def reserve(self, num_bytes: int) -> memoryview:
        self.reserved.append(num_bytes)
        if self.refusal is not None:
            raise self.refusal
        data = bytearray(num_bytes)
        if self.expected is not None:
            data[:] = bytes(255 - byte for byte in self.expected[:num_bytes].ljust(num_bytes, b"\0"))
        self.memory = memoryview(data)
        return self.memory

    def filled(self, num_bytes: int) -> None:
        self.told.append(num_bytes)
        if self.expected is not None and self.memory[:num_bytes] != self.expected[:num_bytes]:
            self.early = num_bytes
