"""Page-locking the host pool for a GPU: copies to and from pinned memory are faster and need not be waited for.

CUDA is never initialised for it: that takes up to seconds and hundreds of MB of device memory, and no child forked
afterwards could use CUDA. So `pin="auto"` waits until the process has initialised CUDA by itself, be it after the pool
was opened, and asks nothing of the driver before; `torch.cuda.is_available()` already would.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import torch

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Pinner(Protocol):
    """Who can page-lock memory."""

    def ready(self) -> bool:
        """Whether it can by now. Asked often, on the threads that use the memory; must initialise nothing."""

    def register(self, address: int, nbytes: int) -> bool:
        """Lock memory whose pages are present; False if that cannot be."""

    def unregister(self, address: int) -> None: ...


class CudaPinner:
    """`cudaHostRegister`."""

    def __init__(self) -> None:
        self._device = -1

    def ready(self) -> bool:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        # The thread that registers is another one, and must not make a context on a device that nobody uses.
        self._device = torch.cuda.current_device()
        return True

    def register(self, address: int, nbytes: int) -> bool:
        with torch.cuda.device(self._device):
            error = torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)  # type: ignore[no-untyped-call]
        if int(error):
            log.debug("cudaHostRegister of %d bytes: error %d", nbytes, int(error))
        return not int(error)

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def pinner_for(pin: Literal["auto"] | bool | Pinner) -> Pinner | None:
    """None if nothing will ever be pinned, as where torch was built without CUDA."""
    if isinstance(pin, bool) or pin == "auto":
        built = bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]
        return CudaPinner() if pin and built else None
    return pin
