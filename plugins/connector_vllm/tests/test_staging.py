"""Slots in shared memory: one owner each, nobody's while somebody uses them, and what workers copy into them."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvloom_connector_vllm import native
from kvloom_connector_vllm.offload.copy import Blocks, Copier, Order
from kvloom_connector_vllm.paged.bounce import BounceBuffers
from kvloom_connector_vllm.staging import Held, Slots, Staging, staging_path
from kvloom_testkit.devices.simulated import SimulatedDevice


def test_two_processes_see_the_same_bytes(tmp_path: Path) -> None:
    worker = Staging.create(tmp_path / "a", slots=3, slot_bytes=5, about={"model": "x"})
    scheduler = Staging.open(tmp_path / "a")
    assert (scheduler.slots, scheduler.slot_bytes, scheduler.about) == (3, 5, {"model": "x"})
    assert scheduler.nonce == worker.nonce
    worker.data[1] = 7
    worker.stamps[2] = -9
    assert scheduler.data.tolist() == [[0] * 5, [7] * 5, [0] * 5]
    assert scheduler.stamps.tolist() == [0, 0, -9]
    scheduler.unlink()
    scheduler.unlink()
    worker.data[0] = 1
    assert scheduler.data[0].tolist() == [1] * 5 and os.listdir(tmp_path) == []


def test_what_a_dead_process_left_behind_is_not_used(tmp_path: Path) -> None:
    old = Staging.create(tmp_path / "a", slots=2, slot_bytes=2, about={})
    old.data[:] = 5
    new = Staging.create(tmp_path / "a", slots=2, slot_bytes=2, about={})
    assert new.nonce != old.nonce and not new.data.any()
    old.unlink()
    assert Staging.open(tmp_path / "a").nonce == new.nonce


def test_a_file_that_nobody_opened_goes_with_its_maker(tmp_path: Path) -> None:
    made = Staging.create(tmp_path / "a", slots=2, slot_bytes=2, about={})
    assert os.listdir(tmp_path) == ["a"]
    del made
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="--shm-size"):
        Staging.create(tmp_path / "a", slots=2, slot_bytes=2, about={})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["posix_fallocate", "pwrite", "replace"])
def test_an_interrupt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    real = getattr(os, step)

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Staging.create(tmp_path / "a", slots=2, slot_bytes=2, about={})
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_only_this_users_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Staging.create(tmp_path / "a", slots=1, slot_bytes=1, about={})
    assert made.path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        Staging.open(tmp_path / "link")
    (tmp_path / "other").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="not a file of slots"):
        Staging.open(tmp_path / "other")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError):
        Staging.open(tmp_path / "a")


def test_engines_and_ranks_have_names_of_their_own() -> None:
    paths = {staging_path(engine, rank) for engine in ("a/b", "a-b", "../x") for rank in (0, 1)}
    assert len(paths) == 6 and len({path.parent for path in paths}) == 1


class SlotsMachine(RuleBasedStateMachine):
    """Any order of calls: a slot that is pinned, or promised in this step, is nobody else's."""

    used = Bundle("used")

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(3)
        self.pinned: list[Held] = []
        self.promised: list[Held] = []

    @rule(target=used, number=st.integers(0, 6))
    def take(self, number: int) -> Held | None:
        key = b"%d" % number
        if self.slots.get(key) is not None:
            with pytest.raises(KeyError):
                self.slots.take(key)
            return None
        held = self.slots.take(key)
        if held is None:
            assert len({one.slot for one in (*self.pinned, *self.promised)}) == 3, "one could have been had"
            return None
        assert held.slot not in {one.slot for one in self.pinned}
        assert all(one.dropped or one.slot != held.slot for one in self.promised)
        assert not held.ready
        self.pinned.append(held)
        return held

    @rule(held=used)
    def fill(self, held: Held | None) -> None:
        if held is not None and held in self.pinned and not held.dropped:
            held.ready = True

    @rule(held=used)
    def pin(self, held: Held | None) -> None:
        if held is not None and self.slots.get(held.key) is held and held.ready:
            self.slots.pin(held)
            self.pinned.append(held)

    @rule(held=used)
    def unpin(self, held: Held | None) -> None:
        if held in self.pinned:
            self.pinned.remove(held)
            self.slots.unpin(held)

    @rule(held=used)
    def promise(self, held: Held | None) -> None:
        if held is not None and self.slots.get(held.key) is held and held.ready:
            self.slots.promise(held)
            self.promised.append(held)

    @rule(held=consumes(used))
    def drop(self, held: Held | None) -> None:
        if held is not None:
            self.slots.drop(held)
            self.promised = [one for one in self.promised if one is not held]
            assert self.slots.get(held.key) is not held

    @precondition(lambda self: self.promised)
    @rule()
    def step(self) -> None:
        self.slots.step += 1
        self.promised.clear()

    @invariant()
    def nothing_is_lost_or_given_twice(self) -> None:
        found = {held.slot: held for held in self.slots.all()}
        assert len(found) == len(self.slots.all()) <= 3
        for held in (*self.pinned, *self.promised):
            assert found.get(held.slot, held) is held
        for held in self.promised:
            assert self.slots.get(held.key) is held
        free = set(range(3)) - set(found) - {held.slot for held in self.pinned}
        assert set(self.slots._free) == free


TestSlots = SlotsMachine.TestCase


def test_the_least_recently_used_goes_first() -> None:
    slots = Slots(2)
    for key in (b"a", b"b"):
        held = slots.take(key)
        assert held is not None
        held.ready = True
        slots.unpin(held)
    oldest = slots.get(b"a")
    assert oldest is not None
    slots.promise(oldest)
    slots.step += 1
    assert slots.take(b"c") is not None
    assert slots.get(b"a") is oldest and slots.get(b"b") is None


# -- copies ------------------------------------------------------------------------------------------------------------


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def memory(groups: list[list[int]], blocks: int, seed: int) -> list[list[torch.Tensor]]:
    """Pages of each layer of each group; padded, so that no two of them follow each other. On a GPU if there is one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(0, 256, (blocks, size + 3), dtype=torch.uint8, generator=generator).to(DEVICE)[:, :size]
            for size in sizes
        ]
        for sizes in groups
    ]


def test_blocks_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.runner(torch.device(DEVICE)) is None:
        pytest.skip("built without a compiler")
    staging = Staging.create(tmp_path / "a", slots=4, slot_bytes=8, about={})
    source, target = memory([[4]], 6, 1), memory([[4]], 6, 2)
    # What goes through a tensor of its own is copied twice.
    monkeypatch.setattr(torch.Tensor, "index_select", None, raising=False)
    order = Order(3, (2, 0), (0, 0), (staging.nonce,))
    assert Copier(staging, source, chunk_blocks=2, rank=0).store(order, Blocks([5, 1, 2, 3], [4], [0])) == 16
    assert Copier(staging, target, chunk_blocks=2, rank=0).load(order, Blocks([4, 0, 5], [3], [1])) == 12
    assert torch.equal(target[0][0][[4, 0, 5]], source[0][0][[1, 2, 3]])


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    chunk_blocks=st.integers(1, 3),
    data=st.data(),
)
def test_what_is_loaded_is_what_was_stored(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], chunk_blocks: int, data: st.DataObject
) -> None:
    if len(groups) > 1:
        chunk_blocks = 1
    counts = [data.draw(st.integers(0, 3)) for _ in groups]
    total, blocks = sum(counts), 12
    # A driver pins shared memory, and not every file.
    path = (Path("/dev/shm") / f"kvloom-test-{os.getpid()}") if DEVICE == "cuda" else tmp_path_factory.mktemp("a") / "a"
    size = chunk_blocks * max(map(sum, groups))
    staging = Staging.create(path, slots=total + 1, slot_bytes=size, about={})
    path.unlink()
    staging.data[:] = 255
    source, target = memory(groups, blocks, 1), memory(groups, blocks, 2)
    before = [[page.clone() for page in pages] for pages in target]
    slots = tuple(data.draw(st.permutations(range(total + 1)))[:total])
    of_group = tuple(group for group, count in enumerate(counts) for _ in range(count))
    order = Order(5, slots, of_group, (staging.nonce,))

    def some(counts: list[int]) -> list[list[int]]:
        return [data.draw(st.permutations(range(blocks)))[:count] for count in counts]

    stored = some([count * chunk_blocks for count in counts])
    ids = [block for group in stored for block in group]
    copiers = [Copier(staging, pages, chunk_blocks=chunk_blocks, rank=0) for pages in (source, target)]
    if data.draw(st.booleans()):  # as where there is no compiler
        for copier in copiers:
            copier._run = None
    device = SimulatedDevice(data.draw(st.integers(0, 1000)))
    if DEVICE == "cpu" and data.draw(st.booleans()):
        for copier in copiers:
            copier._buffers = BounceBuffers(device, data.draw(st.sampled_from([1, 4096])))
    copiers[0].store(order, Blocks(ids, [len(group) for group in stored], [0] * len(groups)))
    assert [int(staging.stamps[slot]) for slot in slots] == [5] * total
    unused = (set(range(total + 1)) - set(slots)).pop()
    assert staging.data[unused].tolist() == [255] * size and staging.stamps[unused] == 0
    for slot, group in zip(slots, of_group, strict=True):
        assert not staging.data[slot, chunk_blocks * sum(groups[group]) :].any(), "nobody else's bytes behind"

    skips = [data.draw(st.integers(0, chunk_blocks - 1)) if count else 0 for count in counts]
    ends = [data.draw(st.integers(0, chunk_blocks - 1 - skip)) if count else 0
            for count, skip in zip(counts, skips, strict=True)]  # fmt: skip
    wanted = [group[skip : len(group) - end] for group, skip, end in zip(stored, skips, ends, strict=True)]
    places = some([len(group) for group in wanted])
    copiers[1].load(
        order, Blocks([block for group in places for block in group], [len(group) for group in places], skips)
    )
    for group, pages in enumerate(target):
        for layer, page in enumerate(pages):
            expected = before[group][layer]
            for there, here in zip(wanted[group], places[group], strict=True):
                expected[here] = source[group][layer][there]
            assert torch.equal(page, expected)


def test_a_store_that_cannot_be_is_stamped_as_failed(tmp_path: Path) -> None:
    staging = Staging.create(tmp_path / "a", slots=4, slot_bytes=8, about={})
    pages = memory([[4]], 6, 1)
    copier = Copier(staging, pages, chunk_blocks=2, rank=0)
    order = Order(3, (0, 1), (0, 0), (staging.nonce,))
    assert copier.store(order, Blocks([1, 2, 3], [3], [1])) == 0  # the first chunk's first block is not there
    assert staging.stamps.tolist() == [-3, -3, 0, 0] and not staging.data.any()
    assert copier.store(order, Blocks([1, 2, 3, 4], [4], [1])) == 0  # nor is it here
    assert staging.stamps.tolist() == [-3, -3, 0, 0] and not staging.data.any()
    assert copier.store(order, Blocks([1, 2, 3, 99], [4], [0])) == 0  # there is no such block
    assert staging.stamps.tolist() == [-3, -3, 0, 0]
    assert copier.store(order, Blocks([1, 2, 3, 4], [4], [2])) == 16
    assert staging.stamps.tolist() == [3, 3, 0, 0]


def test_a_load_that_cannot_be_raises(tmp_path: Path) -> None:
    staging = Staging.create(tmp_path / "a", slots=4, slot_bytes=8, about={})
    pages = memory([[4]], 6, 1)
    before = pages[0][0].clone()
    copier = Copier(staging, pages, chunk_blocks=2, rank=0)
    with pytest.raises(RuntimeError, match="slots of another worker"):
        copier.load(Order(3, (0,), (0,), ("other",)), Blocks([1, 2], [2], [0]))
    with pytest.raises(RuntimeError, match="do not go with"):
        copier.load(Order(3, (0,), (0,), (staging.nonce,)), Blocks([1, 2, 3], [3], [0]))
    assert torch.equal(pages[0][0], before) and not staging.stamps.any()
