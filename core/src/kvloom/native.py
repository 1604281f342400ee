"""Access to compiled code for plugins: find the library, get addresses.

The libraries have a plain C interface: addresses, sizes, strides and a stream. They link no torch, so that one build
serves every version of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvloom.errors import PluginError
from kvloom.plugins.installing import pip_install

if TYPE_CHECKING:
    import torch

    from kvloom.contracts.storage import Sink
    from kvloom.types import Buffer

_INTERFACE = "b73977154b427c8c"
"""Hash of the functions of `kvloom-native` that are called here: see `interface.cmake` there."""

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def load(package: str, name: str, *, brief: bool = False) -> ctypes.CDLL:
    """The library `lib<name>` that lies in the directory of the installed `package`.

    Calls into it release the GIL. brief: they keep it, for functions that take less time than to get it back. Raises
    PluginError, with the remedy, if it is missing or cannot be loaded.
    """
    dist = package.replace("_", "-")
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    if not places:
        raise PluginError(f"{package}: not an installed package; {pip_install(dist)}")
    file = next((file for place in places if (file := place / f"lib{name}{_SUFFIX}").is_file()), None)
    if file is None:
        raise PluginError(
            f"{package}: no lib{name}{_SUFFIX} in {places[0]}: it was installed without its compiled part; "
            f"install a C++ compiler, then {pip_install(dist)} --force-reinstall --no-deps"
        )
    try:
        return (ctypes.PyDLL if brief else ctypes.CDLL)(str(file))
    except OSError as error:
        raise PluginError(f"{package}: {file} cannot be loaded ({error}); reinstall {dist} on this machine") from error


def load_own(*, brief: bool = False) -> ctypes.CDLL:
    """The library of `kvloom-native`. brief: as for `load`.

    Raises PluginError, with the remedy, as `load`, and if it has other functions than this release calls.
    """
    library = load("kvloom_native", "kvloom", brief=brief)
    interface = getattr(library, "kvloom_interface", None)
    found = ""
    if interface is not None:
        interface.restype = ctypes.c_char_p
        found = interface().decode()
    if found != _INTERFACE:
        raise PluginError(
            f"kvloom_native: its library has other functions (interface {found or 'unknown'}) than this release of "
            f"kvloom calls ({_INTERFACE}); install that of the version of kvloom, or from the same clone: "
            f"{pip_install('kvloom-native')} --force-reinstall --no-deps"
        )
    return library


def own_library(*, brief: bool = False) -> ctypes.CDLL | None:
    """As `load_own`; None where that raises."""
    try:
        return load_own(brief=brief)
    except PluginError:
        return None


def own_function(name: str, *argtypes: type, asked: str = "", brief: bool = False) -> Callable[..., int] | None:
    """The function `name` of `kvloom-native`'s library, which returns an int, or None if there is none.

    argtypes: types of `ctypes`. asked: a function without arguments that says whether the processor supports
    it. brief: as for `load`.
    """
    library = own_library(brief=brief)
    if library is None or (asked and not getattr(library, asked)()):
        return None
    function = getattr(library, name)
    function.argtypes = argtypes
    return cast("Callable[..., int]", function)


def pointer(memory: torch.Tensor | Buffer) -> int:
    """The address of a tensor's first element, or of a buffer's first byte. Valid as long as `memory` is held.

    memory: of any shape and dtype.
    """
    if not isinstance(memory, bytes | bytearray | memoryview):
        return memory.data_ptr()
    buffer = _PyBuffer()
    _acquire(memory, buffer, 0)
    _release(buffer)
    return buffer.buf or 0


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython. Unlike `ctypes.c_char.from_buffer` it serves read-only memory too."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_acquire = ctypes.pythonapi.PyObject_GetBuffer
_acquire.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None


def filled_by(sink: Sink) -> tuple[int, int] | None:
    """The C function and state that `NativeSink.native_filled` describes; None if this sink has none."""
    ask = getattr(sink, "native_filled", None)
    return None if ask is None else ask()


def about_devices(count: int) -> str:
    """The state of a library that was built with CUDA, for people. count: of devices, or minus a CUDA error."""
    if count > 0:
        return f"built with CUDA, {count} device{'s' * (count > 1)}"
    reasons = {0: "no device", -35: "NVIDIA's driver is missing or too old", -100: "no device"}
    return f"built with CUDA, {reasons.get(count, 'CUDA does not start')}" + (f" (error {-count})" if count else "")
