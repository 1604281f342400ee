"""Page-locking the host pool for a GPU: copies to and from pinned memory are faster and asynchronous.

This never initialises CUDA, which takes up to seconds and hundreds of MB of device memory, and keeps children forked
later from using CUDA. So `pin="auto"` waits until the process has initialised CUDA itself, even after the pool was
opened, and does not call the driver before; `torch.cuda.is_available()` would.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from kvloom.device import Driver, driver, forget_error, numa_node
from kvloom.numa import Node

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Pinner(Protocol):
    """Page-locks memory."""

    def ready(self) -> bool:
        """Return whether memory can be pinned by now. Called often, on threads that use the memory; initialises
        nothing."""

    def node(self) -> Node | None:
        """The NUMA node of the device that it is for, once it is ready; None if there is no other."""

    def register(self, address: int, nbytes: int) -> bool:
        """Lock memory whose pages are present; False if that cannot be."""

    def unregister(self, address: int) -> None: ...


class CudaPinner:
    """`cudaHostRegister`."""

    def __init__(self, cuda: Driver) -> None:
        self._cuda = cuda
        self._device = -1

    def ready(self) -> bool:
        if not self._cuda.is_initialized():
            return False
        # Another thread registers the memory, and must not make a context on an unused device.
        self._device = int(self._cuda.current_device())
        return True

    def node(self) -> Node | None:
        return numa_node(self._device)

    def register(self, address: int, nbytes: int) -> bool:
        with self._cuda.device(self._device):
            error = self._cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error):
            log.debug("cudaHostRegister of %d bytes: error %d", nbytes, int(error))
            forget_error(self._device)
        return not int(error)

    def unregister(self, address: int) -> None:
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(address)


def pinner_for(pin: Literal["auto"] | bool | Pinner) -> Pinner | None:
    """None if nothing will ever be pinned, as where torch was built without CUDA."""
    if isinstance(pin, bool) or pin == "auto":
        cuda = driver() if pin else None
        return None if cuda is None else CudaPinner(cuda)
    return pin
