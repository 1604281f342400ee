"""Page-locking the host pool for a GPU: copies to and from pinned memory are faster and need not be waited for.

CUDA is never initialised for it: that takes up to seconds and hundreds of MB of device memory, and no child forked
afterwards could use CUDA. So `pin="auto"` waits until the process has initialised CUDA by itself, be it after the pool
was opened, and asks nothing of the driver before; `torch.cuda.is_available()` already would.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, Protocol

import torch

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda
_backend: Any = torch.backends.cuda
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Pinner(Protocol):
    """Who can page-lock memory."""

    def ready(self) -> bool:
        """Return whether it can by now. Asked often, on the threads that use the memory; must initialise nothing."""

    def register(self, address: int, nbytes: int) -> bool:
        """Lock memory whose pages are present; False if that cannot be."""

    def unregister(self, address: int) -> None: ...


class CudaPinner:
    """`cudaHostRegister`."""

    def __init__(self) -> None:
        self._device = -1

    def ready(self) -> bool:
        if not _cuda.is_initialized():
            return False
        # The thread that registers is another one, and must not make a context on a device that nobody uses.
        self._device = int(_cuda.current_device())
        return True

    def register(self, address: int, nbytes: int) -> bool:
        with _cuda.device(self._device):
            error = _cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error):
            log.debug("cudaHostRegister of %d bytes: error %d", nbytes, int(error))
        return not int(error)

    def unregister(self, address: int) -> None:
        with _cuda.device(self._device):
            _cuda.cudart().cudaHostUnregister(address)


def pinner_for(pin: Literal["auto"] | bool | Pinner) -> Pinner | None:
    """None if nothing will ever be pinned, as where torch was built without CUDA."""
    if isinstance(pin, bool) or pin == "auto":
        return CudaPinner() if pin and _backend.is_built() else None
    return pin
