"""NUMA nodes: the one that a device is on, and memory and threads there. Nothing happens on machines with one node."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: elsewhere, if the node is full
_MOVE = 2  # MPOL_MF_MOVE: also pages that are present
_MOST_NODES = 1024
_CPUS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MOST_CPUS = 1 << 16


@dataclass(frozen=True, slots=True)
class Node:
    number: int
    cpus: frozenset[int]


def node_of(pci: str, sysfs: Path | None = None) -> Node | None:
    """The node of a device on the PCI bus, such as `0000:3b:00.0`; None where there is one node, or it is not told."""
    root = SYSFS if sysfs is None else sysfs
    try:
        number = int((root / "bus/pci/devices" / pci.lower() / "numa_node").read_text(encoding="ascii"))
        online = _listed((root / "devices/system/node/online").read_text(encoding="ascii"))
        if len(online) < 2 or number not in online:
            return None
        cpus = _listed((root / f"devices/system/node/node{number}/cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return Node(number, cpus) if number < _MOST_NODES else None


def run_on(cpus: frozenset[int], thread: int = 0) -> None:
    """Have a thread (0: the calling one) run on those of these processors on which it may run, if there are any."""
    if cpus and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # it has ended
            allowed = cpus & os.sched_getaffinity(thread)
            if allowed:
                os.sched_setaffinity(thread, allowed)


def bind(node: Node, address: int, nbytes: int) -> bool:
    """Take pages of this memory from the node, as long as it has some.

    Returns False, and changes no policy of the memory, where the system does not allow it.
    """
    call = _MBIND.get(platform.machine())
    if call is None:
        return False
    mask = (ctypes.c_uint64 * (_MOST_NODES // 64))()
    mask[node.number // 64] = 1 << node.number % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (address, nbytes, _PREFERRED, ctypes.addressof(mask), _MOST_NODES + 1, _MOVE)
    if libc.syscall(ctypes.c_long(call), *map(ctypes.c_ulong, arguments)):
        log.debug("memory is not bound to NUMA node %d: errno %d", node.number, ctypes.get_errno())
        return False
    return True


def _listed(text: str) -> frozenset[int]:
    """The numbers of a list such as `0-3,8`. ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = _CPUS.fullmatch(part)
        if match is None:
            raise ValueError(f"not a list of numbers: {part!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MOST_CPUS:
            raise ValueError(f"not a range: {part!r}")
        found.update(range(first, last + 1))
    return frozenset(found)
