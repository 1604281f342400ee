"""Memory of a torch device behind the same pool: for staging on the way between an engine's KV and the host."""

from __future__ import annotations

from typing import Protocol

import torch

from kvloom.device import device_of


class Done(Protocol):
    """Tells when work queued on a device is over; `torch.cuda.Event` does."""

    def query(self) -> bool: ...


class DevicePages:
    """`size` bytes on `device`, taken at once. Not zeroed."""

    settled = True
    pinned_bytes = 0

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.slab_ends = (size,)
        its = device_of(device)
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device) if its is None else its.empty(size)

    @property
    def view(self) -> memoryview:
        raise TypeError(f"Python cannot read memory of {self.bytes.device}; use `tensor`")

    def reach(self, end: int) -> None:
        """It is all there."""

    def close(self) -> None:
        """There is no thread to stop."""

    def give_back(self) -> None:
        """The memory is freed with the last tensor in it; no new one can be made."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
