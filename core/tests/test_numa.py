"""The NUMA node of a device, from a tree like sysfs."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.numa import Node, bind, node_of, run_on
from kvloom.runtime import SystemRuntime

PCI = "0000:3b:00.0"


def tree(root: Path, *, device: str, online: str, cpus: dict[int, str]) -> Path:
    for path, text in (
        (f"bus/pci/devices/{PCI}/numa_node", device), ("devices/system/node/online", online),
        *((f"devices/system/node/node{number}/cpulist", each) for number, each in cpus.items()),
    ):  # fmt: skip
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def listed(numbers: set[int]) -> str:
    """As the kernel writes them: runs of two and more as ranges."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@given(st.sets(st.integers(0, 300)), st.sets(st.integers(0, 40), min_size=2), st.data())
def test_the_node_of_a_device_and_its_processors(cpus: set[int], nodes: set[int], data: st.DataObject) -> None:
    number = data.draw(st.sampled_from(sorted(nodes)))
    with TemporaryDirectory() as folder:
        root = tree(Path(folder), device=str(number), online=listed(nodes), cpus={number: listed(cpus)})
        assert node_of(PCI.upper(), root) == Node(number, frozenset(cpus))


@pytest.mark.parametrize(
    ("device", "online", "cpus"),
    [("0", "0", "0-3"), ("-1", "0-1", "0-3"), ("2", "0-1", "0-3"), ("x", "0-1", "0-3"), ("0", "", "0-3"),
     ("0", "0-1", "3-0"), ("0", "0-1", "0-99999999"), ("0", "0-1", "all"), ("0", "0-999999", "1"), ("", "0-1", "1")],
)  # fmt: skip
def test_one_node_or_nonsense_is_none(tmp_path: Path, device: str, online: str, cpus: str) -> None:
    assert node_of(PCI, tree(tmp_path, device=device, online=online, cpus={0: cpus})) is None
    assert node_of("0000:00:00.0", tmp_path) is None and node_of("", tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux binds memory")
def test_a_binding_is_in_force_or_refused() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    bound = bind(Node(0, frozenset({0})), address, 1 << 20)
    try:
        policies = Path("/proc/self/numa_maps").read_text()
    except OSError:
        return
    (policy,) = [line.split()[1] for line in policies.splitlines() if int(line.split()[0], 16) == address]
    assert policy == ("prefer:0" if bound else "default")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads run anywhere here")
def test_threads_of_a_runtime_move_to_the_node() -> None:
    here = os.sched_getaffinity(0)
    one, runtime, ended = frozenset({min(here), 10**5}), SystemRuntime(), threading.Event()
    seen: list[set[int]] = []

    def look(begun: threading.Event) -> None:
        begun.set()
        ended.wait(20)
        seen.append(os.sched_getaffinity(0))

    begun = [threading.Event(), threading.Event()]
    threads = [runtime.spawn(partial(look, begun[0]), name="before")]
    assert begun[0].wait(20)
    other = SystemRuntime().spawn(partial(look, threading.Event()), name="another engine's")
    runtime.run_on(one)
    threads.append(runtime.spawn(partial(look, begun[1]), name="afterwards"))
    ended.set()
    for thread in (*threads, other):
        thread.join(20)
    assert sorted(seen, key=len) == [{min(here)}, {min(here)}, here]
    assert os.sched_getaffinity(0) == here


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads run anywhere here")
def test_a_system_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    run_on(frozenset(os.sched_getaffinity(0)))
    assert not bind(Node(0, frozenset({0})), 1, 4096), "no address of a page"
