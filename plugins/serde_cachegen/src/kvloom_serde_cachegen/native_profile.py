"""A profile as the native codec reads it."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:  # it needs safetensors
    from kvloom_serde_cachegen.profile import Profile


class _Basis(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mean", "scale", "forward", "backward", "exponents")),
        ("sigma", ctypes.c_float),
        ("rank", ctypes.c_int32),
    ]


class _Profile(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint8 * 16),
        ("rotations", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("rotary_size", "interleaved", "head_size")),
    ]


_known: WeakValueDictionary[bytes, NativeProfile] = WeakValueDictionary()


def known(id: bytes) -> NativeProfile | None:
    """The profile of this id, if this process has it open: a decoder may have no profile of its own."""
    return _known.get(id)


class NativeProfile:
    """The bases of a profile in the orders in which products are taken. Immutable; any number of threads use it."""

    def __init__(self, profile: Profile) -> None:
        """ValueError for a profile without bases, or of an odd number of channels."""
        transform = profile.transform
        if transform is None:
            raise ValueError("the profile has no bases: calibrate with --klt")
        if profile.hidden % 2:
            raise ValueError(f"mode: klt takes an even number of channels, not {profile.hidden}")
        self.id = profile.id
        self.shape = (profile.planes, profile.layers, profile.hidden)
        self._profile = profile
        self._in: dict[torch.device, Addresses] = {}
        self._lock = threading.Lock()
        self.on(torch.device("cpu"))
        _known[self.id] = self

    def on(self, device: torch.device) -> Addresses:
        """Addresses in the memory of `device`. The profile is copied there once, and stays as long as this object."""
        with self._lock:
            if device not in self._in:
                self._in[device] = Addresses(self._profile, device)
            return self._in[device]

    def covers(self, kv: torch.Tensor, first_layer: int) -> bool:
        """Return whether the profile has the layers of `kv`, `[planes, layers, tokens, hidden]`, from that one on."""
        planes, layers, hidden = self.shape
        return (planes, hidden) == (kv.shape[0], kv.shape[3]) and first_layer + kv.shape[1] <= layers


class Addresses:
    """Addresses of a profile in the memory of one device."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        transform = profile.transform
        assert transform is not None
        self._device = device
        self._held: list[torch.Tensor] = []
        about = _Profile(
            (ctypes.c_uint8 * 16)(*profile.id), self._hold(profile.rotations), profile.rotary_size,
            profile.interleaved, profile.head_size,
        )  # fmt: skip
        self.about = self._place(about)
        self._layers = []
        for layer in range(profile.layers):
            bases = (_Basis * profile.planes)()
            for plane, basis in enumerate(bases):
                components = transform.bases[plane][layer]
                basis.mean = self._hold(transform.means[plane, layer])
                basis.scale = self._hold(transform.scales[plane, layer])
                basis.forward, basis.backward = (self._hold(_in_pairs(each)) for each in (components.T, components))
                basis.exponents = self._hold(transform.exponents[plane][layer])
                basis.sigma, basis.rank = float(transform.sigmas[plane, layer]), len(components)
            self._layers.append(self._place(bases))

    def of_layer(self, layer: int) -> int:
        """The address of the bases of each plane."""
        return self._layers[layer]

    def _hold(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor.contiguous().to(self._device))
        return int(self._held[-1].data_ptr())

    def _place(self, native: ctypes.Structure | ctypes.Array[Any]) -> int:
        return self._hold(torch.frombuffer(bytearray(native), dtype=torch.uint8))


def _in_pairs(matrix: torch.Tensor) -> torch.Tensor:
    """`[rows, columns]` as `[rows / 2, columns, 2]`: products are taken two at a time."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // 2, 2, columns).transpose(1, 2)
