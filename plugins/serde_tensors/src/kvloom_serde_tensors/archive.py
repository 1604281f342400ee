"""Reads the one tensor in an archive of `torch.save`, without inflating or unpickling anything.

`torch.load` inflates compressed members, and allocates a storage of any length that the pickle names. This module
accepts only what `torch.save` writes for a plain contiguous tensor: uncompressed members with their true sizes, and a
pickle that names the tensor's member. Anything else raises some exception.
"""

from __future__ import annotations

import math
import pickletools
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

_END = struct.Struct("<4s4H2IH")
_ZIP64_BYTES = 56 + 20
"""Bytes that torch writes before the end as well."""
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_STORED = 0
_MOST_ENTRIES = 16
_MOST_PICKLE_BYTES = 4096

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
# Looked up here, not in torch: that imports whole packages when it is asked for some names.
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Global(NamedTuple):
    name: str


class _Made(NamedTuple):
    """The result of a call in a pickle."""

    by: Any
    arguments: Any


class _Storage(NamedTuple):
    fields: Any


def tensor_of(data: bytes) -> torch.Tensor:
    """The tensor, in memory of its own."""
    members = _members(memoryview(data))
    (pickled,) = (content for name, content in members.items() if name.endswith("/data.pkl"))
    (order,) = [bytes(content) for name, content in members.items() if name.endswith("/byteorder")] or [b"little"]
    if order != b"little":
        raise ValueError("of another byte order")
    fields, dtype, shape = _described(_unpickled(bytes(pickled)))
    (content,) = (content for name, content in members.items() if name.endswith(f"/data/{fields[2]}"))
    if not len(content) == math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for a tensor of {shape}")
    tensor = torch.empty(len(content), dtype=torch.uint8)
    tensor.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
    return tensor.view(dtype).view(shape)


def _members(data: memoryview) -> dict[str, memoryview]:
    """The archive's members by name, each a view of `data`."""
    end = len(data) - _END.size
    if data[:2] != b"PK" or end < 0:
        raise ValueError("not a zip archive")
    magic, _, _, _, count, nbytes, at, comment = _END.unpack_from(data, end)
    if magic != b"PK\5\6" or comment or count > _MOST_ENTRIES or at + nbytes not in (end, end - _ZIP64_BYTES):
        raise ValueError("not a zip archive, or bytes behind it")
    members: dict[str, memoryview] = {}
    firsts = []
    for _ in range(count):
        entry = _ENTRY.unpack_from(data, at)
        method, packed, size, (name_bytes, extra_bytes, comment_bytes) = entry[4], *entry[8:10], entry[10:13]
        name = bytes(data[at + _ENTRY.size : at + _ENTRY.size + name_bytes]).decode()
        if entry[0] != b"PK\1\2" or method != _STORED or packed != size or name in members:
            raise ValueError(f"the member {name[:64]!r} is compressed, encrypted or repeated")
        members[name] = _stored(data, entry[-1], size)
        firsts.append(entry[-1])
        at += _ENTRY.size + name_bytes + extra_bytes + comment_bytes
    if min(firsts) != 0:
        raise ValueError("bytes before the archive")
    return members


def _stored(data: memoryview, at: int, size: int) -> memoryview:
    local = _LOCAL.unpack_from(data, at)
    start = at + _LOCAL.size + local[9] + local[10]
    if local[0] != b"PK\3\4" or start + size > len(data):
        raise ValueError("a member that is not in the archive")
    return data[start : start + size]


def _described(made: Any) -> tuple[tuple[Any, ...], torch.dtype, tuple[int, ...]]:
    """The fields of its storage, its dtype and its shape."""
    if not isinstance(made, _Made) or not isinstance(made.by, _Global):
        raise ValueError("not a plain tensor")
    storage, offset, shape, strides, *rest = made.arguments
    (word, kind, key, device, count) = fields = storage.fields
    typed = made.by == _Global("torch._utils _rebuild_tensor_v2")
    if typed:
        dtype = _STORAGES[kind.name.removeprefix("torch ")]
    elif made.by == _Global("torch._utils _rebuild_tensor_v3") and kind == _Global("torch.storage UntypedStorage"):
        dtype = _DTYPES[rest[2].name.removeprefix("torch ")]
    else:
        raise ValueError("not a plain tensor")
    whole = all(isinstance(number, int) and number >= 0 for number in (offset, count, *shape, *strides))
    if not whole or not isinstance(key, str):
        raise ValueError("not a plain tensor")
    if (word, device, offset, count) != ("storage", "cpu", 0, math.prod(shape) * (1 if typed else dtype.itemsize)):
        raise ValueError("a tensor that is not all of its storage")
    step = 1
    for size, stride in reversed([*zip(shape, strides, strict=True)]):
        if size > 1 and stride != step:
            raise ValueError("a tensor that is not contiguous")
        step *= size
    return fields, dtype, shape


def _unpickled(data: bytes) -> Any:
    """The content of a pickle, without importing or calling anything."""
    if len(data) > _MOST_PICKLE_BYTES:
        raise ValueError("a pickle of more than a tensor")
    stack: list[Any] = []
    mark = object()
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "BINPUT" | "LONG_BINPUT" | "STOP":
                pass
            case "GLOBAL":
                stack.append(_Global(argument))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "MARK":
                stack.append(mark)
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(opcode.name[-1]) :] = [tuple(stack[-int(opcode.name[-1]) :])]
            case "TUPLE":
                start = len(stack) - 1 - stack[::-1].index(mark)
                stack[start:] = [tuple(stack[start + 1 :])]
            case "BINPERSID":
                stack.append(_Storage(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_Made(stack.pop(), arguments))
            case _:
                raise ValueError(f"a pickle of more than a tensor: {opcode.name}")
    (made,) = stack
    return made
