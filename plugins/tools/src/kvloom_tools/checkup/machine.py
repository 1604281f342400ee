"""The machine: GPUs, pinned memory, limits of the process, memory; and what is different on macOS."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kvloom.device import numa_node
from kvloom_tools.checkup.finding import Finding, note, ok, problem

_PIN_BYTES = 64 << 20
_FILES = 4096
_SHARED_BYTES = 1 << 30


def looked_at() -> Iterator[Finding]:
    yield from _gpus()
    yield from _limits()
    yield from _memory()
    if sys.platform == "darwin":
        yield note("machine", "macOS", "files are read and written through the page cache: there is no O_DIRECT")
        yield note("machine", "macOS", "there is no CUDA: kernels run as their builds for processors")


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        yield note("gpu", "torch", "is not installed: configurations, stores and the testkit work, engines do not")
        return
    if not torch.cuda.is_available():
        build = torch.version.cuda or "none"
        if build == "none" and Path("/proc/driver/nvidia/version").exists():
            yield problem("gpu", "cuda", "there is a driver, and torch is a build without CUDA; install another torch")
        else:
            yield note("gpu", "cuda", f"no device (torch's CUDA: {build}); kernels run as their builds for processors")
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield ok(
            "gpu", f"cuda:{number}", f"{found.name}, {found.total_memory >> 30} GiB, sm_{found.major}{found.minor}"
        )
        node = numa_node(number)
        if node is not None:
            yield ok(
                "gpu", f"cuda:{number}", f"NUMA node {node.number}: pinned pools for it are there, if there is room"
            )
    try:
        torch.empty(_PIN_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        text = f"64 MiB cannot be pinned ({str(error).splitlines()[0]}): copies are slow; raise `ulimit -l`"
        yield problem("gpu", "pinned memory", text)
    else:
        yield ok("gpu", "pinned memory", "64 MiB could be pinned")


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FILES:
        yield note("machine", "open files", f"{files} at most (ulimit -n): stores with many connections need more")
    else:
        yield ok("machine", "open files", "no limit" if files == resource.RLIM_INFINITY else f"{files} at most")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "no limit" if locked == resource.RLIM_INFINITY else f"{locked >> 20} MiB at most (ulimit -l)"
    yield ok("machine", "locked memory", said)


def _memory() -> Iterator[Finding]:
    available = available_bytes()
    if available is not None:
        yield ok("machine", "memory", f"{available / (1 << 30):.1f} GiB are free to use")
    if Path("/dev/shm").is_dir():
        found = os.statvfs("/dev/shm")
        free = found.f_bavail * found.f_frsize
        if free < _SHARED_BYTES:
            yield note(
                "machine", "/dev/shm", f"{free >> 20} MiB free: vLLM's ranks share more than that (docker --shm-size)"
            )
        else:
            yield ok("machine", "/dev/shm", f"{free / (1 << 30):.1f} GiB free")


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, of the machine and of the container that this may be in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if most == "max" else min(free, max(0, int(most) - used))
    except (OSError, ValueError):
        return free
